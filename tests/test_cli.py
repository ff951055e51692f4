"""What the command line says of itself."""

import pytest
from click.testing import CliRunner

from pagedattn.cli import _COMMANDS, main


def help_of(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_of_commands_cuts_no_sentence():
    listed = help_of().split("Commands:")[1].strip().splitlines()
    assert [line.split()[0] for line in listed] == list(_COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize("command", sorted(set(_COMMANDS) - {"bench"}))
def test_the_help_of_a_command_fits_80_columns_and_shows_no_escapes(command):
    said = help_of(command)
    assert max(map(len, said.splitlines())) <= 80
    assert "\\b" not in said
    assert "\b" not in said


def test_the_help_of_check_shows_the_signature_of_a_target_line_by_line():
    lines = [line.split()[0] for line in help_of("check").splitlines() if line.strip()]
    assert {"kv_indptr", "kv_indices", "kv_lens", "qo_indptr", "out"} <= set(lines)

"""`pagedattn check --target`: anybody's function is checked as backends are."""

import json
import re
import shlex
from pathlib import Path

import pytest
import targets
import torch
from click.testing import CliRunner

from pagedattn.checking.capsule import load_capsule
from pagedattn.checking.profiles import batch_of_seed
from pagedattn.checking.properties import PROPERTIES
from pagedattn.checking.target import attend_with_target, load_target, target_subject
from pagedattn.cli import main


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def check(target: str, *arguments: str):
    command = ["check", "--device", "cpu", "--target", f"targets:{target}", *arguments]
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, command)


@pytest.mark.parametrize("target", ["attention", "without_lse"])
def test_a_right_function_keeps_every_property_but_those_of_objects(target):
    result = check(target, "--examples", "1")
    assert result.exit_code == 0, result.output
    assert re.search(rf"targets:{target} vs float64 reference +mixed +1 .* ok", result.stdout)
    for name in set(PROPERTIES) - {"agreement", "graph replay", "bad metadata", "no host sync"}:
        assert re.search(rf"targets:{target}: {name} +any +1 .* ok", result.stdout), name
    assert f"targets:{target}: bad metadata is not tried: a function has no plan" in result.stdout


def test_a_wrong_function_is_shrunk_diagnosed_and_kept_for_replay(tmp_path):
    arguments = ("--property", "agreement", "--mode", "mixed", "--examples", "6")
    result = check("window_one_short", *arguments)
    assert result.exit_code == 1
    assert "MISMATCH: targets:window_one_short vs float64 reference" in result.stdout
    assert "Diagnosis: window one key short. It explains the whole answer." in result.stdout
    command = shlex.split(re.search(r"replay: pagedattn (replay .*)", result.stdout).group(1))
    capsule = load_capsule(Path(command[1]))
    assert (capsule.step.kv_lens, capsule.step.qo_lens) == ([2], [1])
    assert capsule.metadata.backend == "targets:window_one_short"
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 1
    assert "now: targets:window_one_short on cpu vs float64 reference: WRONG" in again.stdout
    right = CliRunner().invoke(main, [*command[:2], "--target", "targets:attention"])
    assert right.exit_code == 0
    assert "kept answer: targets:window_one_short vs float64 reference: WRONG" in right.stdout
    declined = CliRunner().invoke(main, [*command[:2], "--target", "targets:nothing"])
    assert declined.exit_code == 0
    assert "float64 reference: declined: comes next year" in declined.stdout


def test_what_is_declined_is_counted_shown_and_replaced():
    arguments = ["--property", "agreement", "--mode", "decode", "--examples", "4", "--json"]
    document = json.loads(check("without_soft_cap", *arguments).stdout)
    (counts,) = document["counts"]
    assert (counts["checked"], counts["wrong"]) == (4, 0)
    capped = [seed for seed in range(9) if batch_of_seed("decode", seed).spec.logits_soft_cap]
    assert counts["declined"] == len([s for s in capped if s < 4 + counts["declined"]]) > 0
    said = check("without_soft_cap", *arguments[:-1]).stdout
    assert (
        f"declined {counts['declined']} steps, which were not checked; the first: no soft cap yet"
        in said
    )
    options = check("without_soft_cap", "--property", "option effect", "--examples", "1")
    assert options.exit_code == 0, options.output


def test_a_function_that_declines_everything_passes_nothing():
    result = check("nothing", "--property", "agreement", "--examples", "1")
    assert result.exit_code == 2
    assert "not checked" in result.stdout
    assert "nothing was checked: targets:nothing declined" in result.output


def test_a_function_that_takes_other_arguments_is_refused_before_anything_is_drawn(tmp_path):
    (tmp_path / "other.py").write_text("def f(q, cache): return q\n")
    result = CliRunner().invoke(main, ["check", "--target", "other:f"])
    assert result.exit_code == 2
    assert "target 'other:f' takes (q, cache), and not what it is given" in result.output


def test_an_error_of_a_function_names_its_line():
    result = check("raising", "--property", "agreement", "--mode", "decode", "--examples", "1")
    assert result.exit_code == 1
    line = targets.raising.__code__.co_firstlineno + 1
    assert f"raised ZeroDivisionError: no kernel for this (targets.py:{line})" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("WRONG: targets:raising; 1 of 1 steps")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (targets.wrong_shape, r"t: out is torch.float16\[1, 2, 63\] on cpu, expected .*, 64\]"),
        (targets.a_list, r"t: out is a list, expected torch.float16\[1, 2, 64\] on cpu"),
        (lambda q, *_, **__: q.double(), r"t: out is torch.float64"),
        (lambda q, *_, **__: (q, q[..., 0]), r"t: lse is torch.float16\[1, 2\] .* torch.float32"),
    ],
)
def test_what_is_returned_must_be_an_answer(target, says):
    from attention_steps import batch_of

    from pagedattn import AttentionSpec

    step = batch_of(AttentionSpec(2, 1, 64, torch.float16), 4, (5,), (1,)).materialise()
    with pytest.raises(ValueError, match=says):
        attend_with_target(target, "t")(step)


def test_a_function_in_the_current_folder_is_found(tmp_path):
    (tmp_path / "mine.py").write_text("class A:\n    @staticmethod\n    def attend(): return 7\n")
    assert load_target("mine:A.attend")() == 7
    with pytest.raises(ValueError, match="target 'mine:B': AttributeError"):
        target_subject("mine:B")
    with pytest.raises(ValueError, match="must be module:function"):
        load_target("mine")

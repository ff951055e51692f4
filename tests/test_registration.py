"""`st.from_type` knows this package's types, and neither import becomes heavier for it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, PageTable
from pagedattn.registration import register_strategies
from pagedattn.testing import Batch, ReplaySequence
from pagedattn.validation import check_page_table

ROOT = Path(__file__).parents[1]


@given(table=st.from_type(PageTable), spec=st.from_type(AttentionSpec))
def test_drawn_tables_and_specs_are_valid(table, spec):
    check_page_table(table, table.page_size)
    assert spec.head_dim in (16, 40, 64, 128, 256)


@given(batch=st.from_type(Batch), sequence=st.from_type(ReplaySequence))
def test_drawn_batches_and_sequences_are_valid(batch, sequence):
    for each in (batch, *sequence.batches):
        check_page_table(each.page_table, each.page_size)


def test_a_strategy_is_inferred_for_an_annotated_function():
    @given(...)
    def takes_a_table(table: PageTable):
        assert table.kv_lens.dtype == torch.int32

    takes_a_table()


def test_registering_twice_changes_nothing():
    before = repr(st.from_type(PageTable))
    register_strategies()
    assert repr(st.from_type(PageTable)) == before


@pytest.mark.parametrize("no_plugins", ["", "1"])
def test_without_plugins_nothing_is_registered(monkeypatch, no_plugins):
    registered = []
    monkeypatch.setenv("HYPOTHESIS_NO_PLUGINS", no_plugins)
    monkeypatch.setattr(st, "register_type_strategy", lambda cls, _: registered.append(cls))
    register_strategies()
    assert registered == ([] if no_plugins else [PageTable, AttentionSpec])


@pytest.fixture
def installed(tmp_path) -> dict[str, str]:
    """An environment in which the entry points of pyproject.toml are installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "stand_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    lines = [f"{name} = {where}" for name, where in project["entry-points"]["hypothesis"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[hypothesis]", *lines]))
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def run_python(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:hypothesis", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = "[m for m in ('torch', 'pagedattn', 'pagedattn.testing') if m in sys.modules]"


def test_importing_hypothesis_imports_nothing_of_ours(installed):
    code = f"import sys, hypothesis; print({HEAVY}, '_pagedattn_hypothesis' in sys.modules)"
    assert run_python(code, installed) == "[] True"


@pytest.mark.parametrize(
    "imports", ["import hypothesis, pagedattn", "import pagedattn, hypothesis"]
)
def test_types_are_known_in_either_order_of_imports_without_importing_testing(installed, imports):
    code = (
        f"import sys; {imports}; from hypothesis import strategies as st; "
        f"print('pagedattn.testing' in sys.modules, end=' '); "
        "find = hypothesis.find(st.from_type(pagedattn.PageTable), lambda t: t.batch_size == 1); "
        "print(find.kv_lens.tolist(), find.kv_indices.tolist())"
    )
    assert run_python(code, installed) == "False [1] [0]"

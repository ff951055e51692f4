"""What the guides say: their code runs, and shows what they say it shows."""

import re
from pathlib import Path

import pytest
import torch
from run_guides import (
    blocks_of,
    commands_of,
    flashinfer_or_stand_in,
    output_of,
    paths,
    run_command,
    run_python,
)

PATHS = paths()
named = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
on_gpu = torch.cuda.is_available()


def test_there_are_guides():
    assert {"from_flashinfer", "from_block_tables", "parameters", "serving"} <= {
        path.stem for path in PATHS
    }


@named
def test_the_code_of_a_guide_runs_and_shows_what_the_guide_says(path, tmp_path, monkeypatch):
    page = path.read_text(encoding="utf-8")
    blocks = blocks_of(page)
    monkeypatch.chdir(tmp_path)
    namespace = {"device": "cuda" if on_gpu else "cpu"}
    with flashinfer_or_stand_in():
        for number, block in enumerate(blocks):
            line = page.count("\n", 0, block.begin)
            place = f"{path.name}, line {line + 1}"
            if block.language == "python" and (on_gpu or "gpu" not in block.tags):
                # lines before it, so that an error names the line of the page
                shown = run_python("\n" * (line + 1) + block.body, namespace, path.name)
                expected = output_of(blocks, number, page)
                assert expected is None or shown.text == expected.body, place
            elif block.language == "bash" and "long" not in block.tags:
                for arguments in commands_of(block.body):
                    code, output = run_command(arguments)
                    assert code == 0, f"{place}: {output}"


def test_the_example_of_the_readme_runs():
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = next(block for block in blocks_of(page) if block.language == "python")
    namespace = {}
    run_python(example.body, namespace, "README.md")
    assert namespace["out"].shape == namespace["q"].shape


@named
def test_a_guide_begins_with_its_title_and_links_to_what_exists(path):
    page = path.read_text(encoding="utf-8")
    assert page.startswith("# ")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target

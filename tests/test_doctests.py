"""The examples in docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import pagedattn

ROOT = Path(pagedattn.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_modules_with_examples():
    assert {"pagedattn.attention", "pagedattn.page_table", "pagedattn.spec"} <= set(MODULES)

"""Runs the code of the guides, `notebooks/guides/*.md`: for the tests, and for their pictures.

The ```python blocks of a guide run one after the other in one namespace, which has `device`. A
```text block right after one is what it shows: what it prints, then its last expression, as a
notebook shows both. Lines of ```bash blocks that begin with `pagedattn` run as that command. A
block ```python gpu needs a GPU; one ```bash long takes minutes.

`python tests/run_guides.py [NAME ...]` refreshes the ```text blocks of `notebooks/guides/NAME.md`.
"""

import ast
import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

GUIDES = Path(__file__).parent.parent / "notebooks" / "guides"
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; `begin` and `end` are its place in the page."""

    language: str
    tags: tuple[str, ...]
    body: str
    begin: int
    end: int


@dataclass(frozen=True)
class Shown:
    """What a block showed."""

    text: str
    value: object  # of its last expression, or None


def blocks_of(page):
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(page):
        language, *tags = match["info"].split() or [""]
        found.append(Block(language, tuple(tags), match["body"], *match.span()))
    return found


def output_of(blocks, number, page):
    """The block that holds what block `number` shows, if there is one right behind it."""
    if number + 1 == len(blocks):
        return None
    block, after = blocks[number], blocks[number + 1]
    is_next = not page[block.end : after.begin].strip()
    return after if is_next and after.language == "text" else None


def run_python(source, namespace, name="<guide>"):
    """Execute a block as a notebook does a cell."""
    tree = ast.parse(source)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(last, name, "eval"), namespace)
    text = printed.getvalue()
    if value is not None:
        text += f"{value!r}\n"
    return Shown(text, value)


def commands_of(source):
    """The arguments of each `pagedattn` command in a block of shell lines."""
    lines = source.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("pagedattn ")]


def run_command(arguments):
    """Run `pagedattn` with these arguments; return its exit code and what it printed."""
    from click.testing import CliRunner

    from pagedattn.cli import main

    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def paths(names=()):
    """The guides of these names, in order; without names all of them."""
    return sorted(p for p in GUIDES.glob("*.md") if not names or p.stem in names)


@contextlib.contextmanager
def flashinfer_or_stand_in():
    """Without a GPU the wrappers find a stand-in for FlashInfer, over plain torch."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    import flashinfer_stand_in

    from pagedattn.backends.flashinfer import backend, decode, head_dim, need, prefill

    with contextlib.ExitStack() as stack:
        for module in (backend, decode, head_dim, need, prefill):
            name = f"{module.__name__}.load_flashinfer"
            stack.enter_context(mock.patch(name, return_value=flashinfer_stand_in))
        yield


def refresh(page, namespace):
    """The page with every ```text block behind a block of Python as it is now."""
    blocks = blocks_of(page)
    written = []
    for number, block in enumerate(blocks):
        if block.language == "python" and not block.tags:
            shown = run_python(block.body, namespace)
            expected = output_of(blocks, number, page)
            if expected is not None:
                written.append((expected, f"```text\n{shown.text}```\n"))
    for block, text in reversed(written):
        page = page[: block.begin] + text + page[block.end :]
    return page


def main():
    for path in paths(sys.argv[1:]):
        print(path.name)
        with flashinfer_or_stand_in():
            page = refresh(path.read_text(encoding="utf-8"), {"device": "cpu"})
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

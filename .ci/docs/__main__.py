"""Builds the documentation: `python .ci/docs`, into `build/docs/html`, which git ignores.

Sphinx wants one folder of sources, so they are gathered from where they live: the README becomes
the first page, the notebooks keep their committed outputs, a guide's code runs and where it draws
the page shows the picture, and the reference is made of the docstrings. Warnings are errors.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "docs"
SOURCE = BUILD / "source"
NOTEBOOKS = SOURCE / "notebooks"

sys.path.insert(0, str(ROOT / "tests"))
from run_guides import (  # noqa: E402 - the tests run the guides with the same functions
    blocks_of,
    flashinfer_or_stand_in,
    output_of,
    paths,
    run_python,
)

GUIDES = (
    "parameters",
    "from_flashinfer",
    "from_block_tables",
    "compile",
    "serving",
    "troubleshooting",
)
# Pages of the reference and the modules on them; of a package, what its __all__ names.
REFERENCE = {
    "core": ("The core", "pagedattn", "pagedattn.attention"),
    "flashinfer": ("FlashInfer's wrappers, made safe", "pagedattn.flashinfer"),
    "checking": (
        "Checking",
        "pagedattn.checking.step",
        "pagedattn.checking.compare",
        "pagedattn.checking.bound",
        "pagedattn.checking.dense",
        "pagedattn.checking.shrink",
        "pagedattn.checking.diagnose",
        "pagedattn.checking.capsule",
    ),
    "testing": ("Strategies for tests", "pagedattn.testing"),
    "draw": ("Pictures", "pagedattn.draw"),
    "transformers": ("Models of transformers", "pagedattn.integrations.transformers"),
}
DOCSTRINGS_ALONE = {"pagedattn.attention"}  # what it defines is shown with the package
_LINK = re.compile(r"\[(?P<words>[^]]*)\]\((?P<target>(?!http|#)[^)]+)\)")


def main() -> None:
    """Gather the sources and call Sphinx."""
    shutil.rmtree(BUILD, ignore_errors=True)
    NOTEBOOKS.mkdir(parents=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, NOTEBOOKS)
    for path in paths():
        write(NOTEBOOKS / "guides" / path.name, with_pictures(path))
    shown: set[int] = set()
    for name, (title, *modules) in REFERENCE.items():
        write(SOURCE / "reference" / f"{name}.rst", reference_page(title, modules, shown))
    write(SOURCE / "changes.md", read(ROOT / "pagedattn" / "CHANGELOG.md"))
    write(SOURCE / "index.md", first_page())
    options = [
        "-W",
        "--keep-going",
        "-q",
        "-j",
        "2",
        "-c",
        str(HERE),
        "-d",
        str(BUILD / "doctrees"),
    ]
    command = [sys.executable, "-m", "sphinx", *options, str(SOURCE), str(BUILD / "html")]
    code = subprocess.run(command).returncode
    if code == 0:
        print(BUILD / "html" / "index.html")
    sys.exit(code)


def with_pictures(path: Path) -> str:
    """A guide whose code has run: what shows a picture as text shows the picture itself."""
    page = read(path)
    if "draw_" not in page:
        return page
    blocks = blocks_of(page)
    namespace: dict[str, object] = {"device": "cpu"}
    pictures = []
    with flashinfer_or_stand_in():
        for number, block in enumerate(blocks):
            if block.language != "python" or block.tags:
                continue
            value = run_python(block.body, namespace).value
            shown = output_of(blocks, number, page)
            if shown is not None and hasattr(value, "svg"):
                name = f"{path.stem}_{number}.svg"
                write(NOTEBOOKS / "guides" / name, value.svg)
                printed = shown.body.removesuffix(f"{value!r}\n")
                pictures.append((shown, name, printed))
    for shown, name, printed in reversed(pictures):
        text = f"```text\n{printed}```\n\n" if printed else ""
        page = f"{page[: shown.begin]}{text}![{name}]({name})\n{page[shown.end :]}"
    return page


def first_page() -> str:
    """The README, its links to pages, and a table of contents; what is no page is only named."""
    pages = {f"notebooks/guides/{path.name}" for path in paths()}
    pages |= {f"notebooks/{path.name}" for path in NOTEBOOKS.glob("*.ipynb")}
    pages |= {"pagedattn/CHANGELOG.md"}

    def link(match: re.Match[str]) -> str:
        target = match["target"].replace("pagedattn/CHANGELOG.md", "changes.md")
        return f"[{match['words']}]({target})" if match["target"] in pages else match["words"]

    notebooks = [f"notebooks/{path.stem}" for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    contents = {
        "Guides": [f"notebooks/guides/{name}" for name in GUIDES],
        "Notebooks": notebooks,
        "Reference": [*(f"reference/{name}" for name in REFERENCE), "changes"],
    }
    page = _LINK.sub(link, read(ROOT / "README.md"))
    for caption, entries in contents.items():
        lines = [f":caption: {caption}", ":hidden:", "", *entries]
        page += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"
    return page


def reference_page(title: str, modules: list[str], shown: set[int]) -> str:
    """What the docstrings of these modules say; `shown` are objects that have been shown already.

    Adds to `shown` what packages gather from their modules, so that nothing is shown twice.
    """
    lines = [title, "=" * len(title), ""]
    for name in modules:
        lines += [name, "-" * len(name), "", f".. automodule:: {name}"]
        if name not in DOCSTRINGS_ALONE:
            module = importlib.import_module(name)
            lines += ["   :members:"]
            gathered = {member: id(getattr(module, member)) for member in _names_of(module)}
            again = [member for member, number in gathered.items() if number in shown]
            lines += ["   :imported-members:"] if gathered else []
            lines += [f"   :exclude-members: {', '.join(again)}"] if again else []
            shown.update(gathered.values())
        lines += [""]
    return "\n".join(lines)


def _names_of(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", []))


def read(path: Path) -> str:
    """Text of a file."""
    return path.read_text(encoding="utf-8")


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

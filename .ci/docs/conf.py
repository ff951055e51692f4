"""Sphinx's settings; `python .ci/docs` gathers the sources and calls it with warnings as errors."""

from __future__ import annotations

from sphinx.application import Sphinx

import pagedattn

project = "pagedattn"
author = "The pagedattn maintainers"
version = release = pagedattn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
highlight_language = "none"  # formulas; examples and notebooks say theirs
default_role = "py:obj"  # docstrings write `name`: a link where there is one, else code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests execute notebooks; here their committed outputs are shown

html_theme = "furo"
html_title = f"pagedattn {release}"
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Modules' docstrings are written to be read as they are: make them what Sphinx reads."""
    app.connect("autodoc-process-docstring", _to_restructured_text, priority=1)
    app.connect("autodoc-skip-member", _skip_fields_of_named_tuples)


def _skip_fields_of_named_tuples(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Their docstrings are Python's, and say nothing."""
    is_field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_field else None


def _to_restructured_text(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Indented formulas become literal blocks, and tables with bars lists in columns."""
    if what != "module":
        return
    written: list[str] = []
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not before.startswith("|"):
                written += [".. list-table::", "   :header-rows: 1", ""]
            if set(cells[0]) != {"-"}:
                bullets = ["   * - ", *["     - "] * (len(cells) - 1)]
                written += [bullet + cell for bullet, cell in zip(bullets, cells, strict=True)]
            continue
        if line.startswith("    ") and not before and not _is_in_block(written):
            written += ["::", ""]
        written.append(line)
    lines[:] = written


def _is_in_block(written: list[str]) -> bool:
    """Whether the last line with words is indented, as in a literal block or a list's item."""
    last = next((line for line in reversed(written) if line), "")
    return last.startswith((" ", "- "))

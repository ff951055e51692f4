"""`pagedattn show`: the command that draws a page table from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import click
from rich.console import Console

from pagedattn.checking.capsule import SUFFIX, load_capsule
from pagedattn.draw.draw import draw_mask, draw_pages
from pagedattn.draw.picture import Picture
from pagedattn.draw.table_file import TableFile, read_table

_EXAMPLE = """
\b
Example:
  {"page_size": 4, "kv_lens": [10, 6], "pages": [[3, 1, 4], [3, 5]],
   "qo_lens": [1, 6], "window_left": 3, "num_pages": 8, "sink_page": 0}
"""


@click.command(epilog=_EXAMPLE, short_help="Draw a page table: who owns which page.")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option(
    "--mask",
    "request",
    type=int,
    metavar="REQUEST",
    help="Draw what the queries of this request, counted from 0, see.",
)
@click.option(
    "--svg", "svg_path", type=click.Path(path_type=Path, dir_okay=False), help="Write an SVG too."
)
def show(file: TextIO, request: int | None, svg_path: Path | None) -> None:
    """Draw the page table in FILE ("-": standard input): who owns which page.

    FILE is a JSON object with page_size, kv_lens and pages (of each request); optional are qo_lens,
    window_left, causal, num_pages, sink_page and names. Or it is a capsule, named *.safetensors.
    """
    try:
        is_capsule = file.name.endswith(SUFFIX)
        table = _table_of_capsule(Path(file.name)) if is_capsule else read_table(file.read())
        picture = _draw(table, request)
    except ValueError as error:
        raise click.ClickException(f"{file.name}: {error}") from None
    Console().print(picture, soft_wrap=True)
    if svg_path is not None:
        picture.save(svg_path)


def _table_of_capsule(path: Path) -> TableFile:
    """The table of a step that `pagedattn check` kept, pages under the numbers that they had."""
    capsule = load_capsule(path)
    spec, num_pages = capsule.metadata.spec, capsule.metadata.num_pages
    return TableFile(
        capsule.original_table,
        capsule.step.qo_indptr,
        spec.window_left,
        spec.causal,
        num_pages,
        sink_page=None,
        names=None,
    )


def _draw(table: TableFile, request: int | None) -> Picture:
    if request is not None:
        return draw_mask(
            table.page_table,
            request,
            qo_indptr=table.qo_indptr,
            causal=table.causal,
            window_left=table.window_left,
        )
    return draw_pages(
        table.page_table,
        qo_indptr=table.qo_indptr,
        window_left=table.window_left,
        num_pages=table.num_pages,
        sink_page=table.sink_page,
        names=table.names,
    )

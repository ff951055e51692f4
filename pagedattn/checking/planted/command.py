"""`pagedattn planted`: the command that plants faults and says which are caught and named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from pagedattn.checking.planted.table import (
    NAMES,
    Count,
    count_faults,
    drawn_steps,
    markdown,
    summary,
    with_table,
)


@click.command(short_help="Say which faults, planted on purpose, the checks catch.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option(
    "--update",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the table to this Markdown file, between its markers.",
)
def planted(as_markdown: bool, as_json: bool, update: Path | None) -> None:
    """Plant faults in the reference and say which are caught, and named right.

    Each fault is planted on a few drawn steps. Exit code 1 if one is caught in none of them.
    """
    bar = track(
        count_faults(drawn_steps()),
        total=len(NAMES),
        description="planting",
        console=Console(stderr=True),
        transient=True,
    )
    counts = list(bar)
    if update is not None:
        try:
            update.write_text(with_table(update.read_text(), markdown(counts)))
        except ValueError as error:
            raise click.UsageError(f"{update}: {error}") from None
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(count) for count in counts], indent=1))
    else:
        click.echo(markdown(counts) if as_markdown else _lines(counts))
    if any(count.caught == 0 for count in counts):
        raise SystemExit(1)


def _lines(counts: list[Count]) -> str:
    width = max(len(count.fault) for count in counts)
    lines = [
        f"{c.fault:<{width}}  changes {c.changed} of {c.steps} steps, caught in {c.caught}, "
        f"named in {c.named}: {c.name or 'no name for it'}"
        for c in counts
    ]
    return "\n".join([*lines, summary(counts)])

"""The command `pagedattn bench`: hands over to the benchmark of the source tree.

The benchmark and its results are not part of the installed package; an editable install of a
checkout has both side by side.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

import pagedattn

_HELP = (
    "the benchmark is not part of the installed package. In a checkout of the repository run "
    '`pip install -e ".[viz]"`, and then this command again or `python -m benchmarks`'
)


@click.command(
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
    short_help="Time the backends beside other libraries; checkout only.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Time paged attention: our backends beside FlashInfer's own calls (source tree only)."""
    root = Path(pagedattn.__file__).parent.parent
    if not (root / "benchmarks" / "command.py").is_file():
        raise click.ClickException(_HELP)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    command: click.Command = importlib.import_module("benchmarks.command").bench
    command.main(list(arguments), prog_name="pagedattn bench")

"""`pagedattn check`: the command that compares every backend of a machine with float64.

On a machine without a GPU Triton interprets, and decides so when it is imported: nothing that this
module imports may import it.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pagedattn.checking.choice import (
    all_that_run,
    interpret_on_cpu,
    named_backends,
    usable_device,
)
from pagedattn.checking.compare import compared_with
from pagedattn.checking.evidence import describe_batch, keep_failure
from pagedattn.checking.tally import Tally, check_batches, supported_batches
from pagedattn.spec import AttentionSpec

ALL_MODES = ("prefill", "decode", "mixed")
PLAIN_SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
"""A backend that cannot compute this here takes no part."""
DRAWS_PER_EXAMPLE = 20
"""So many steps are drawn for one example, at most, until the backend supports one."""


@click.command()
@click.option("--backend", "backends", multiple=True, help="Backend to check; may be repeated.")
@click.option("--mode", type=click.Choice([*ALL_MODES, "all"]), default="all", show_default=True)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Random steps for each backend and mode.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first step."
)
@click.option("--device", help="Where to compute. [default: the current GPU, else the CPU]")
@click.option(
    "--capsule-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("."),
    show_default=True,
    help="Where the capsule of a failing step goes.",
)
def check(
    backends: tuple[str, ...],
    mode: str,
    examples: int,
    seed: int,
    device: str | None,
    capsule_dir: Path,
) -> None:
    """Compare backends with float64 attention on random paged batches.

    Without --backend, every backend that runs on this machine. Exit code 1 if one is
    wrong: its first wrong step is shrunk and kept as a capsule, which `pagedattn replay` reads.
    """
    where = usable_device(device)
    interpret_on_cpu(where)
    console = Console()
    chosen = (
        named_backends(backends, PLAIN_SPEC, 16, where)
        if backends
        else all_that_run(PLAIN_SPEC, 16, where, console)
    )
    modes = ALL_MODES if mode == "all" else (mode,)
    seeds = range(seed, seed + examples * DRAWS_PER_EXAMPLE)

    tallies = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for backend in chosen:
            for each in modes:
                batches = islice(supported_batches(backend, each, seeds, where), examples)
                title = f"{backend} vs {compared_with(backend)}, {each}"
                shown = progress.track(batches, total=examples, description=title)
                tallies.append(check_batches(backend, each, iter(shown), where))
    console.print(_table(tallies, where, seed))
    wrong = [tally for tally in tallies if tally.failures]
    for tally in wrong:
        console.print(_report(tally, where), markup=False, highlight=False, soft_wrap=True)
        kept = keep_failure(tally.backend, tally.mode, tally.failures[0], where, capsule_dir)
        console.print(kept, markup=False, highlight=False, soft_wrap=True)
    if wrong:
        raise SystemExit(1)


def _table(tallies: list[Tally], device: torch.device, seed: int) -> Table:
    # narrow enough for 80 columns, which is what a pipe gets
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.title = f"Attention on {device}, steps drawn from seed {seed}"
    for column in ("compared", "mode", "steps", "worst error", "allowed", "verdict"):
        table.add_column(column, no_wrap=True)
    for tally in tallies:
        worst = tally.worst
        table.add_row(
            f"{tally.backend} vs {compared_with(tally.backend)}",
            tally.mode,
            str(tally.num_examples),
            "none" if worst is None else f"{worst.error:.1e} {worst.tensor}",
            "none" if worst is None else f"{worst.allowed:.1e}",
            f"[red]{len(tally.failures)} wrong[/red]" if tally.failures else "[green]ok[/green]",
        )
    return table


def _report(tally: Tally, device: torch.device) -> str:
    """The first failure of a tally, and how to see it again."""
    failure = tally.failures[0]
    batch = failure.batch
    lines = [
        f"MISMATCH: {tally.backend} vs {compared_with(tally.backend)}, {tally.mode}: "
        f"{len(tally.failures)} of {tally.num_examples} steps",
        f"  first: {failure.problem}",
        *describe_batch(batch),
        f"  again: pagedattn check --backend {tally.backend} --mode {tally.mode} "
        f"--seed {failure.seed} --examples 1 --device {device.type}",
    ]
    return "\n".join(lines)

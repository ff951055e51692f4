"""`pagedattn check`: the command that compares every backend of a machine with float64.

On a machine without a GPU Triton interprets, and decides so when it is imported: nothing that this
module imports may import it.
"""

from __future__ import annotations

import os
import warnings
from itertools import islice

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pagedattn.attention import resolve_device
from pagedattn.backends import backend_names, unsupported_reasons
from pagedattn.checking.compare import compared_with
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
def check(
    backends: tuple[str, ...], mode: str, examples: int, seed: int, device: str | None
) -> None:
    """Compare backends with float64 attention on random paged batches.

    Without --backend, every backend that runs on this machine. Exit code 1 if one is wrong.
    """
    where = _device(device)
    if where.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # where tanh saturates, exp2 overflows as it should
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning, "triton.runtime.interpreter")
    console = Console()
    chosen = _named(backends, where) if backends else _all_that_run(where, console)
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
    if wrong:
        raise SystemExit(1)


def _device(name: str | None) -> torch.device:
    try:
        device = resolve_device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise click.UsageError(f"--device {name}: {error}") from None
    return device


def _named(backends: tuple[str, ...], device: torch.device) -> list[str]:
    """The backends that were asked for, each of which must run here."""
    for name in backends:
        if name not in backend_names():
            known = ", ".join(backend_names())
            raise click.UsageError(f"unknown backend {name!r}, expected one of {known}")
        reasons = unsupported_reasons(name, PLAIN_SPEC, 16, device)
        if reasons:
            listed = "".join(f"\n  - {reason}" for reason in reasons)
            raise click.UsageError(f"backend {name!r} cannot run on {device}:{listed}")
    return list(dict.fromkeys(backends))


def _all_that_run(device: torch.device, console: Console) -> list[str]:
    """Every backend that runs here; the others are named with their reasons."""
    chosen = []
    for name in backend_names():
        reasons = unsupported_reasons(name, PLAIN_SPEC, 16, device)
        if reasons:
            line = f"{name} is left out: {'; '.join(reasons)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            chosen.append(name)
    return chosen


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
        f"  {batch.spec}",
        f"  page_size={batch.page_size} kv_lens={batch.kv_lens} qo_lens={batch.qo_lens} "
        f"values={batch.values!r} garbage={batch.garbage!r}",
        f"  again: pagedattn check --backend {tally.backend} --mode {tally.mode} "
        f"--seed {failure.seed} --examples 1 --device {device.type}",
    ]
    return "\n".join(lines)

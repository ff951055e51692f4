"""The command: what to time, where, for how long, and what to write.

Triton decides at its import whether it interprets: nothing that this module imports may import it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from benchmarks import cases, results_file
from benchmarks.cases import Case
from benchmarks.plots import draw_all
from benchmarks.results_file import Result
from pagedattn.checking.choice import interpret_on_cpu, usable_device

if TYPE_CHECKING:
    from benchmarks.peer import Peer
    from benchmarks.run import Measure


@click.command()
@click.option(
    "--case",
    "patterns",
    multiple=True,
    help="Name, glob, part of a name, or group; may be repeated. [default: all for the device]",
)
@click.option(
    "--backends",
    multiple=True,
    help="Names, globs or parts of names, with commas; may be repeated. [default: see --list]",
)
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="File to append rows to.")
@click.option("--plot", type=click.Path(path_type=Path), help="Folder for the two plots.")
@click.option("--device", help="Where to measure. [default: the current GPU, else the CPU]")
@click.option("--budget", type=float, default=float("inf"), help="Seconds after which none begins.")
@click.option(
    "--seconds",
    type=float,
    default=0.3,
    show_default=True,
    help="For the repetitions of one measurement.",
)
@click.option(
    "--isolate",
    type=float,
    help="Measure each pair in its own process, for so many seconds at most.",
)
@click.option("--list", "only_list", is_flag=True, help="Say what would be measured, and stop.")
def bench(
    patterns: tuple[str, ...],
    backends: tuple[str, ...],
    csv_path: Path | None,
    plot: Path | None,
    device: str | None,
    budget: float,
    seconds: float,
    isolate: float | None,
    only_list: bool,
) -> None:
    """Time paged attention: our backends, FlashInfer's own calls and others, case by case.

    Every pair of case and backend is checked once against float64 and then timed. Exit code 1
    if one of this package's backends failed or was wrong. On a CPU the cases are small, Triton
    interprets and times are wall clock: a rehearsal, not a result.
    """
    deadline = time.monotonic() + budget
    where = usable_device(device)
    interpret_on_cpu(where)
    chosen, peers = _chosen_cases(patterns, where), _usable_peers(backends, where)
    if only_list:
        for case in chosen:
            names = [peer.name for peer in peers if peer.takes(case)]
            click.echo(f"{case.group:12} {case.name:36} {' '.join(names)}")
        return
    results = []
    for result in _results(chosen, peers, _measure(chosen, where, seconds, isolate), deadline):
        click.echo(line_of(result))
        results.append(result)
        if csv_path is not None:
            results_file.append(csv_path, result)
    if plot is not None:
        draw_all(results if csv_path is None else results_file.read(csv_path), plot)
    ours = [peer.name for peer in peers if peer.ours]
    if any(result.backend in ours and not result.is_usable for result in results):
        raise SystemExit(1)


def _chosen_cases(patterns: tuple[str, ...], device: torch.device) -> list[Case]:
    """The cases of all patterns, each once, in order of importance."""
    if not patterns:
        return cases.select(None, device.type)
    chosen: list[Case] = []
    for pattern in patterns:
        found = cases.select(pattern, device.type)
        if not found:
            raise click.UsageError(f"no case is named like {pattern!r}: --list names them all")
        chosen += found
    return [case for case in cases.CASES if case in chosen]


def _usable_peers(backends: tuple[str, ...], device: torch.device) -> list[Peer]:
    """The peers that can run here; the others are named with what they miss."""
    from benchmarks import peers

    patterns = tuple(name for names in backends for name in names.split(",") if name)
    try:
        wanted = peers.select(patterns)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    usable = []
    for peer in wanted:
        reason = peer.missing(device)
        if reason is None:
            usable.append(peer)
        else:
            click.echo(f"{peer.name} is left out: {reason}", err=True)
    return usable


def _measure(
    chosen: list[Case], device: torch.device, seconds: float, isolate: float | None
) -> Measure:
    """How a pair is measured."""
    from benchmarks.run import Apart
    from benchmarks.session import Session

    if isolate is not None:
        return Apart(device, seconds, isolate).measure
    return Session(chosen, device, seconds).measure


def _results(
    chosen: list[Case], peers: list[Peer], measure: Measure, deadline: float
) -> Iterator[Result]:
    """Measure every pair, and say at the end how far that came."""
    from benchmarks.run import Progress, pairs_of, run

    pairs, progress = pairs_of(chosen, peers), Progress()
    yield from run(pairs, measure, deadline, progress)
    left = len(pairs) - progress.num_done
    why = f", stopped by {progress.stopped_by} with {left} left" if progress.stopped_by else ""
    click.echo(f"{progress.num_done} measurements{why}", err=True)


def line_of(result: Result) -> str:
    """One measurement for a terminal."""
    line = f"{result.case_tag:36} {result.backend:28} "
    if result.median_time is not None and result.plan_time_us is not None:
        line += f"{1e3 * result.median_time:10.1f} us  plan {result.plan_time_us:7.1f} us  "
    if result.percent_of_ceiling is not None:
        line += f"{result.percent_of_ceiling:5.1f} %  "
    if result.error is not None:
        line += f"{result.verdict} (error {result.error:.1e}, allowed {result.allowed_error:.1e})"
    return f"{line}  {result.failure}".rstrip()

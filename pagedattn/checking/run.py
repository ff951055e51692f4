"""`pagedattn check`: the command that holds backends and anybody's functions to properties.

On a machine without a GPU Triton interprets, and decides so when it is imported: nothing that this
module imports may import it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress

from pagedattn.checking.choice import (
    BACKEND_HELP,
    all_that_run,
    interpret_on_cpu,
    named_backends,
    named_targets,
    usable_device,
)
from pagedattn.checking.here import Examiner, outcomes_here
from pagedattn.checking.profiles import PROFILES, Profile
from pagedattn.checking.properties import AGREEMENT, PROPERTIES
from pagedattn.checking.report import Report
from pagedattn.checking.schedule import Schedule, groups_of, shared_out
from pagedattn.checking.subject import Subject, backend_subject
from pagedattn.checking.tally import tally
from pagedattn.checking.task import Outcome
from pagedattn.checking.workers import WorkerLimits, outcomes_of_workers
from pagedattn.spec import AttentionSpec

ALL_MODES = ("prefill", "decode", "mixed")
PLAIN_SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
"""A backend that cannot compute this here takes no part."""


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What a command line asks for."""

    profile: Profile
    props: tuple[str, ...]
    modes: tuple[str, ...]
    examples: int | None
    seconds: float | None
    seed: int
    jobs: int
    folder: Path
    limits: WorkerLimits


def _list_properties(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        width = max(map(len, PROPERTIES))
        for prop in PROPERTIES.values():
            click.echo(f"{prop.name:<{width}}  {prop.compares}")
        context.exit()


@click.command(short_help="Compare backends, or your functions, with float64 attention.")
@click.option("--backend", "backends", multiple=True, help=BACKEND_HELP)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Function to check instead of backends, see above; may be repeated.",
)
@click.option(
    "--mode",
    type=click.Choice([*ALL_MODES, "all"]),
    default="all",
    show_default=True,
    help="Steps that are drawn: query lengths alone differ.",
)
@click.option(
    "--property",
    "props",
    multiple=True,
    type=click.Choice(list(PROPERTIES)),
    metavar="NAME",
    help="Property to try, see --list-properties; may be repeated. [default: all]",
)
@click.option(
    "--list-properties",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_properties,
    help="Say what each property compares with what, and exit.",
)
@click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    default="quick",
    show_default=True,
    help="How much is drawn: under a minute on two cores, some minutes, or more.",
)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    help="Random steps for each backend and property, of the agreement for each mode. With the "
    "profile deep: steps in all. [default: by profile]",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Draw until so many seconds have passed; with --examples, whichever comes first.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first step."
)
@click.option("--device", help="Where to compute. [default: the current GPU, else the CPU]")
@click.option(
    "--jobs",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Worker processes; 0: none. A worker that hangs or dies is replaced, and what it was "
    "computing is a mismatch.",
)
@click.option(
    "--case-time",
    type=click.FloatRange(min=0, min_open=True),
    default=WorkerLimits.case,
    show_default=True,
    metavar="SECONDS",
    help="What a worker has for one step; ten times as long where kernels are compiled first.",
)
@click.option(
    "--capsule-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("."),
    show_default=True,
    help="Where the capsule of a failing step goes.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the document of --json to this file too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def check(
    backends: tuple[str, ...],
    targets: tuple[str, ...],
    mode: str,
    props: tuple[str, ...],
    profile: str,
    examples: int | None,
    seconds: float | None,
    seed: int,
    device: str | None,
    jobs: int,
    case_time: float,
    capsule_dir: Path,
    record: Path | None,
    as_json: bool,
) -> None:
    """Compare backends with float64 attention on drawn steps, and try properties of attention.

    Without --backend and --target, every backend that runs on this machine. All are compared with
    the float64 reference, and that with dense float64, which knows no pages. Exit code 1 if one is
    wrong: its first wrong step is shrunk and kept as a capsule, which `pagedattn replay` reads.

    A target is any importable function

    \b
      fn(q, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, qo_indptr, *,
         causal, window_left, sm_scale, logits_soft_cap) -> out or (out, lse)

    \b
      q           dtype[tokens, num_qo_heads, head_dim]
      k_pages     dtype[pages, page_size, num_kv_heads, head_dim]; v_pages alike
      kv_indptr   i32[batch + 1], where each request's pages begin in kv_indices
      kv_indices  i32[kv_indptr[-1]], physical page ids
      kv_lens     i32[batch], keys of each request, with this step's new tokens
      qo_indptr   i32[batch + 1], where each request's queries begin in q
      out         as q; lse f32[tokens, num_qo_heads], natural logarithm

    What it cannot compute it declines with NotImplementedError: such steps are counted, and others
    are drawn in their place.
    """  # noqa: D301 - click wants the character
    where = usable_device(device)
    interpret_on_cpu(where)
    console = Console(stderr=as_json)
    wanted = _Wanted(
        PROFILES[profile],
        tuple(dict.fromkeys(props)) or tuple(PROPERTIES),
        ALL_MODES if mode == "all" else (mode,),
        examples,
        seconds,
        seed,
        jobs,
        capsule_dir,
        WorkerLimits(case=case_time),
    )
    subjects = _subjects(backends, targets, wanted.profile, where, console)
    report = _check(wanted, subjects, where)
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(report.document(), indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(report.document(), indent=1))
    else:
        _print(report, console)
    if report.wrong:
        raise SystemExit(1)
    if not report.num_checked:
        raise click.UsageError(f"nothing was checked: {'; '.join(report.notes()) or 'no time'}")


def _subjects(
    backends: tuple[str, ...],
    targets: tuple[str, ...],
    profile: Profile,
    device: torch.device,
    console: Console,
) -> list[Subject]:
    """What the command line names, by default every backend that runs here."""
    functions = named_targets(targets, live=profile.live)
    if backends:
        names = named_backends(backends, PLAIN_SPEC, 16, device)
    else:
        names = [] if targets else all_that_run(PLAIN_SPEC, 16, device, console)
    return [*(backend_subject(name, live=profile.live) for name in names), *functions]


def _check(wanted: _Wanted, subjects: list[Subject], device: torch.device) -> Report:
    """Try every task and count what comes out."""
    begin = time.monotonic()
    profile = wanted.profile

    def num_tasks(prop: str, num_modes: int) -> int:
        if prop == AGREEMENT.name:
            return num_modes * (wanted.examples or profile.agreement)
        return wanted.examples or profile.others

    groups, left_out = groups_of(subjects, wanted.props, wanted.modes, device, num_tasks)
    if profile.live and wanted.examples:
        groups = shared_out(groups, wanted.examples)
    endless = wanted.seconds is not None and wanted.examples is None
    schedule = Schedule(groups, subjects, profile, wanted.seed, device, endless=endless)
    end = begin + (wanted.seconds or float("inf"))
    by_name = {subject.name: subject for subject in subjects}
    examiner = Examiner(by_name, profile, device, wanted.folder)
    if wanted.jobs:
        outcomes = outcomes_of_workers(examiner, schedule, wanted.jobs, wanted.limits, end)
    else:
        outcomes = outcomes_here(examiner, schedule, end)
    tallies = tally(_shown(outcomes, None if endless else schedule.num_tasks, left_out))
    order = {(group.subject, group.prop): i for i, group in enumerate(groups)}
    tallies.sort(key=lambda t: (order[t.subject, t.prop], ALL_MODES.index(t.mode)))
    seconds = time.monotonic() - begin
    return Report(device, profile, wanted.seed, by_name, tallies, left_out, seconds)


def _shown(
    outcomes: Iterator[Outcome], total: int | None, left_out: list[str]
) -> Iterator[Outcome]:
    """The outcomes, with a bar that says how far it is; those before an interruption count."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("check", total=total)
        try:
            for outcome in outcomes:
                task = outcome.task
                said = f"{task.subject}: {task.prop}, {task.mode}"
                progress.update(bar, advance=outcome.declined is None, description=said)
                yield outcome
        except KeyboardInterrupt:
            left_out.append("interrupted: what was not tried until then is not counted")


def _print(report: Report, console: Console) -> None:
    console.print(report.table())
    for line in [*report.notes(), *report.mismatches(), report.summary()]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

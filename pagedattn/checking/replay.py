"""`pagedattn replay`: the command that computes the step of a capsule again.

On a machine without a GPU Triton interprets, and decides so when it is imported: nothing that this
module imports may import it.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from pagedattn.checking.capsule import Capsule, load_capsule
from pagedattn.checking.choice import (
    BACKEND_HELP,
    all_that_run,
    interpret_on_cpu,
    named_backends,
    named_targets,
    usable_device,
)
from pagedattn.checking.compare import Comparison, compare
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.place import describe_row
from pagedattn.checking.step import Step
from pagedattn.checking.subject import Subject, backend_subject
from pagedattn.checking.task import words_of_error


@click.command(short_help="Compute the step of a capsule again.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--backend", "backends", multiple=True, help=BACKEND_HELP)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Function to run, as in `pagedattn check`; may be repeated.",
)
@click.option("--device", help="Where to compute. [default: the current GPU, else the CPU]")
def replay(
    file: Path, backends: tuple[str, ...], targets: tuple[str, ...], device: str | None
) -> None:
    """Compute the step of a capsule again and compare it with float64 attention.

    Without --backend and --target, every backend that runs it on this machine. Exit code 1 if one
    is wrong now.
    """
    try:
        capsule = load_capsule(file)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file}: {error}") from None
    where = usable_device(device)
    interpret_on_cpu(where)
    console = Console()
    subjects = named_targets(targets)
    _say(console, *_describe(capsule))
    _say(console, *_verdicts_of_kept(capsule))
    spec, page_size = capsule.metadata.spec, capsule.metadata.page_size
    if backends:
        names = named_backends(backends, spec, page_size, where)
    else:
        names = [] if targets else all_that_run(spec, page_size, where, console)
    subjects = [*map(backend_subject, names), *subjects]
    step = capsule.step_on(where)
    if not all([_is_right(subject, step, console) for subject in subjects]):
        raise SystemExit(1)


def _is_right(subject: Subject, step: Step, console: Console) -> bool:
    """Compute the step and say how far it is from right; what is declined is not wrong."""
    now = f"now: {subject.name} on {step.q.device}"
    try:
        comparison = compare(subject.attend(step), *subject.truth(step))
    except Exception as error:  # whatever a subject may raise: the others still count
        declined = subject.may_decline and isinstance(error, NotImplementedError)
        what = f"declined: {error}" if declined else f"WRONG, {words_of_error(error)}"
        _say(console, f"{now} vs {subject.compared_with}: {what}")
        return declined
    _say(console, f"{now} vs {_verdict(subject, step, comparison)}")
    return comparison.ok


def _describe(capsule: Capsule) -> list[str]:
    metadata, step = capsule.metadata, capsule.step
    versions = ", ".join(f"{name} {version}" for name, version in metadata.versions.items())
    lines = [
        f"kept: {metadata.backend}: {metadata.problem or 'no words'}",
        f"  {metadata.spec}",
        f"  page_size={metadata.page_size} kv_lens={_short(step.kv_lens)} "
        f"qo_lens={_short(step.qo_lens)} seed={metadata.seed}",
        f"  with {versions or 'versions unknown'}",
    ]
    if not capsule.keeps_page_numbers:
        lines.append(f"  its cache had {metadata.num_pages} pages: they are numbered anew")
    return lines


def _verdicts_of_kept(capsule: Capsule) -> list[str]:
    """Whether the answers in the file are wrong, by a float64 answer that is computed here."""
    step = capsule.step
    subject = backend_subject(capsule.metadata.backend)
    expected, bound = subject.truth(step)
    lines = []
    if not compare(capsule.expected, expected, bound).ok:
        lines.append("kept float64 answer: WRONG, it is not that of the kept inputs")
    if capsule.got is None:
        return [*lines, "kept answer: none, there was an error instead"]
    comparison = compare(capsule.got, expected, bound)
    lines.append(f"kept answer: {subject.name} vs {_verdict(subject, step, comparison)}")
    found = diagnose(step, capsule.got, arithmetic=subject.arithmetic, has_lse=capsule.has_lse)
    return lines if found is None else [*lines, *str(found).splitlines()]


def _verdict(subject: Subject, step: Step, comparison: Comparison) -> str:
    worst = comparison.worst
    if worst is None:
        return f"{subject.compared_with}: ok, nothing to compare"
    verdict = "ok" if comparison.ok else "WRONG"
    place = describe_row(step, worst.row)
    return f"{subject.compared_with}: {verdict}, worst at {worst} ({place})"


def _short(lens: list[int]) -> str:
    """Lengths, the first few of many."""
    return str(lens) if len(lens) <= 16 else f"{lens[:16]} and {len(lens) - 16} more"


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

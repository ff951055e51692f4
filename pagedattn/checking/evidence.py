"""What is left of a failed check: its smallest case, as a picture and as a capsule to replay."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedattn.checking.batch import Batch
from pagedattn.checking.capsule import SUFFIX, save_capsule
from pagedattn.checking.capsule_metadata import printable
from pagedattn.checking.compare import compare
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.kinds import is_compiled
from pagedattn.checking.properties import PROPERTIES, Answer
from pagedattn.checking.shrink import shrink_batch
from pagedattn.checking.step import Step, attend_with
from pagedattn.checking.subject import Subject
from pagedattn.checking.task import Outcome, Task, Tried, try_task
from pagedattn.checking.truth import truth_of
from pagedattn.draw import draw_pages

MAX_SHRINK_SECONDS = 60.0
"""On a GPU each simpler layer kind is a kernel to compile."""


@dataclass(frozen=True)
class Found:
    """A problem at its smallest."""

    tried: Tried
    batch: Batch
    note: str | None = None  # why it is not smaller


def look_into(
    subject: Subject, tried: Tried, batch: Batch, device: torch.device, folder: Path
) -> Outcome:
    """Shrink a failing step, write its capsule, and say in lines what it is and how to replay it.

    Args:
        subject: What failed.
        tried: How it failed.
        batch: The step.
        device: Where it failed.
        folder: Where the capsule goes; made where it does not exist.

    Returns:
        The outcome with its evidence.
    """
    found = _smallest(subject, tried, batch, device)
    outcome = found.tried.outcome
    answer, wrong = _suspect(subject, found.tried.answers)
    lines = [f"  smallest: {printable(str(outcome.problem))}"]
    own_step = PROPERTIES[outcome.task.prop].own_step
    lines += describe_step(answer.step) if answer and own_step else describe_batch(found.batch)
    if found.note:
        lines.append(f"  {found.note}")
    lines.append(_picture(answer.step if answer and own_step else found.batch))
    if answer is not None:
        lines += wrong or _diagnosis(subject, answer)
    path = folder / f"capsule-{_file_name(tried.outcome.task)}{SUFFIX}"
    try:
        _save(path, subject, found, answer)
    except (OSError, ValueError) as error:
        lines.append(f"  no capsule written: {error}")
        return replace(tried.outcome, evidence="\n".join(lines))
    again = f"{subject.option} --device {device.type}"
    lines.append(f"  replay: pagedattn replay {shlex.quote(str(path))} {again}")
    return replace(tried.outcome, evidence="\n".join(lines), capsule=str(path))


def describe_batch(batch: Batch) -> list[str]:
    """Two indented lines: the layer kind, and the step's structure."""
    return [
        f"  {batch.spec}",
        f"  page_size={batch.page_size} kv_lens={batch.kv_lens} qo_lens={batch.qo_lens} "
        f"values={batch.values!r} garbage={batch.garbage!r}",
    ]


def describe_step(step: Step) -> list[str]:
    """Two indented lines: the layer kind, and the step's structure."""
    lens = f"kv_lens={step.kv_lens} qo_lens={step.qo_lens}"
    return [f"  {step.spec}", f"  page_size={step.page_size} {lens}"]


def as_found(outcome: Outcome, batch: Batch, subject: Subject, folder: Path) -> Outcome:
    """Keep a step that nothing can be asked about again: its process hung or died."""
    path = folder / f"capsule-{_file_name(outcome.task)}{SUFFIX}"
    lines = [_picture(batch)]
    try:
        _save(path, subject, Found(Tried(outcome), batch), None)
    except (OSError, ValueError) as error:
        return replace(outcome, evidence="\n".join([*lines, f"  no capsule written: {error}"]))
    lines.append(f"  replay: pagedattn replay {shlex.quote(str(path))} {subject.option}")
    return replace(outcome, evidence="\n".join(lines), capsule=str(path))


def _smallest(subject: Subject, tried: Tried, batch: Batch, device: torch.device) -> Found:
    """The smallest batch that fails alike, and what the subject makes of it."""
    task, raised = tried.outcome.task, tried.outcome.raised
    if PROPERTIES[task.prop].own_step:
        return Found(tried, batch)
    if raised and device.type == "cuda":  # after some errors a GPU answers no more
        return Found(tried, batch, "not shrunk: it raised an error on a GPU")
    if subject.backend is not None:
        subject = replace(subject, attend=attend_with(subject.backend))  # objects made anew
    end = time.monotonic() + MAX_SHRINK_SECONDS if device.type == "cuda" else torch.inf

    def fails_alike(candidate: Batch) -> bool:
        spec, page_size = candidate.spec, candidate.page_size
        if time.monotonic() > end or not is_compiled(subject.name, spec):
            return False
        if subject.unsupported_reasons(spec, page_size, device):
            return False
        again = try_task(subject, task, candidate, device).outcome
        return again.problem is not None and again.raised == raised

    try:
        if not fails_alike(batch):
            return Found(tried, batch, "not shrunk: with new objects it does not happen")
        smallest = shrink_batch(batch, fails_alike)
        return Found(try_task(subject, task, smallest, device), smallest)
    except RuntimeError:  # a GPU that answers no more
        dead = Tried(tried.outcome)  # its answers are on that GPU
        return Found(dead, batch, "not shrunk: the device failed meanwhile")


def _suspect(subject: Subject, answers: tuple[Answer, ...]) -> tuple[Answer | None, list[str]]:
    """The answer that is not that of float64, or the first one and a line that says so."""
    for answer in answers:
        if not compare(answer.got, *subject.truth(answer.step)).ok:
            return answer, []
    if not answers:
        return None, []
    count = "the answer is" if len(answers) == 1 else f"each of {len(answers)} answers is"
    return answers[0], [f"  {count} within its bound of float64; the capsule keeps the first"]


def _diagnosis(subject: Subject, answer: Answer) -> list[str]:
    """The fault that would compute this answer, in lines."""
    found = diagnose(answer.step, answer.got, arithmetic=subject.arithmetic, has_lse=answer.has_lse)
    return [f"  {line}" for line in str(found).splitlines()] if found is not None else []


def _save(path: Path, subject: Subject, found: Found, answer: Answer | None) -> None:
    """Write a capsule of the suspect's step, or of the drawn one."""
    outcome = found.tried.outcome
    # where nothing is left to ask, the step is made on the host
    step = found.batch.materialise("cpu") if answer is None else answer.step
    expected = truth_of(step, subject.arithmetic, dense=subject.backend == "reference").expected
    path.parent.mkdir(parents=True, exist_ok=True)
    save_capsule(
        path,
        step,
        None if answer is None else answer.got,
        expected,
        backend=printable(subject.name),
        problem=printable(str(outcome.problem)),
        seed=outcome.task.seed,
        has_lse=answer is None or answer.has_lse,
    )


def _file_name(task: Task) -> str:
    name = f"{task.subject}-{task.prop}-{task.mode}-seed{task.seed}"
    return re.sub(r"[^\w.-]+", "_", name)


def _picture(case: Batch | Step) -> str:
    return draw_pages(
        case.page_table,
        qo_indptr=case.qo_indptr,
        window_left=case.spec.window_left,
        num_pages=case.num_pages if isinstance(case, Batch) else case.kv_cache.shape[0],
    ).text

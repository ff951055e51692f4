"""One task of a check, a property on a drawn step, and what comes out; both travel as JSON."""

from __future__ import annotations

import math
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import pagedattn
from pagedattn.backends import backend_names
from pagedattn.checking.batch import Batch
from pagedattn.checking.compare import Difference
from pagedattn.checking.drawing import RandomChoices
from pagedattn.checking.properties import PROPERTIES, Answer, Trial
from pagedattn.checking.subject import Subject, backend_subject
from pagedattn.checking.target import target_subject

PROCESS_ENDED = "process ended"
"""What was raised where a worker process hung or died."""


@dataclass(frozen=True)
class Task:
    """A property to try on the step of a mode and a seed."""

    subject: str
    prop: str
    mode: str
    seed: int

    @property
    def group(self) -> tuple[str, str, str]:
        """What is counted together: subject, property and mode."""
        return (self.subject, self.prop, self.mode)


@dataclass(frozen=True)
class Outcome:
    """What came of a task.

    Attributes:
        task: The task.
        worst: The place of all comparisons that is nearest to what is allowed, or furthest above.
        problem: What is wrong; `None`: nothing.
        raised: The error's type, where one was raised.
        declined: Why the subject does not compute this; then nothing was checked.
        evidence: Of a problem that was looked into: its smallest case, in lines.
        capsule: The file that keeps it.
    """

    task: Task
    worst: Difference | None = None
    problem: str | None = None
    raised: str | None = None
    declined: str | None = None
    evidence: str | None = None
    capsule: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinite numbers become text."""
        values = asdict(self)
        if self.worst is not None:
            values["worst"] = {k: _finite(v) for k, v in asdict(self.worst).items()}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """What `to_json` made, from our own worker."""
        worst = values["worst"]
        if worst is not None:
            numbers = {k: float(worst[k]) for k in ("got", "expected", "error", "allowed")}
            worst = Difference(**(worst | numbers))
        return cls(**(values | {"task": Task(**values["task"]), "worst": worst}))


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, eq=False)
class Tried:
    """An outcome, and the answers that took part in what is wrong."""

    outcome: Outcome
    answers: tuple[Answer, ...] = ()


def try_task(subject: Subject, task: Task, batch: Batch, device: torch.device) -> Tried:
    """Try a property on a step; an error that the subject raises is a problem."""
    choices = RandomChoices(f"{task.prop} {task.seed}")
    outcome = Outcome(task)
    try:
        for finding in PROPERTIES[task.prop].check(Trial(subject, batch, choices, device)):
            worst = finding.worst
            if worst and (outcome.worst is None or worst.excess > outcome.worst.excess):
                outcome = replace(outcome, worst=worst)
            if finding.problem is not None:
                return Tried(replace(outcome, problem=finding.problem), finding.answers)
    except Exception as error:  # whatever a subject may raise: the other steps still count
        if subject.may_decline and isinstance(error, NotImplementedError):
            return Tried(Outcome(task, declined=str(error) or "without a word"))
        raised = type(error).__name__
        return Tried(replace(outcome, problem=words_of_error(error), raised=raised))
    return Tried(outcome)


def words_of_error(error: BaseException) -> str:
    """What was raised, and by which line of code that is neither ours nor of a library we call."""
    frames = traceback.extract_tb(error.__traceback__)
    known = tuple(str(Path(module.__file__ or "").parent) for module in (pagedattn, torch))
    foreign = [frame for frame in frames if not frame.filename.startswith(known)]
    place = f" ({Path(foreign[-1].filename).name}:{foreign[-1].lineno})" if foreign else ""
    return f"raised {type(error).__name__}: {error}{place}"


def subject_named(name: str, *, live: bool = False) -> Subject:
    """A backend by its name, or a function as "module:function".

    Raises:
        ValueError: There is no such function.
    """
    if name in backend_names():
        return backend_subject(name, live=live)
    return target_subject(name, live=live)

"""Trying a check's tasks one after the other in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from pagedattn.checking.evidence import look_into
from pagedattn.checking.profiles import Profile, batch_of_task
from pagedattn.checking.schedule import Schedule
from pagedattn.checking.subject import Subject
from pagedattn.checking.task import Outcome, Task, try_task


class Examiner:
    """Tries tasks, and looks into the first failure of each group.

    Args:
        subjects: By name.
        profile: How steps are drawn.
        device: Where to compute.
        folder: Where capsules go.
    """

    def __init__(
        self, subjects: Mapping[str, Subject], profile: Profile, device: torch.device, folder: Path
    ) -> None:
        self.subjects = subjects
        self.profile = profile
        self.device = device
        self.folder = folder
        self._looked_into: set[tuple[str, str, str]] = set()

    def examine(self, task: Task) -> Iterator[Outcome]:
        """The outcome of a task; where it is looked into, once more with its evidence."""
        subject = self.subjects[task.subject]
        batch = batch_of_task(
            self.profile, task.subject, task.prop, task.mode, task.seed, self.device
        )
        tried = try_task(subject, task, batch, self.device)
        yield tried.outcome
        if tried.outcome.problem is not None and task.group not in self._looked_into:
            self._looked_into.add(task.group)
            yield look_into(subject, tried, batch, self.device, self.folder)


def outcomes_here(
    examiner: Examiner, schedule: Schedule, end: float = float("inf")
) -> Iterator[Outcome]:
    """Every task's outcome, until `time.monotonic()` reaches `end`."""
    while time.monotonic() < end and (task := schedule.take()) is not None:
        *_, outcome = examiner.examine(task)
        if outcome.declined is not None:
            schedule.declined(task)
        yield outcome

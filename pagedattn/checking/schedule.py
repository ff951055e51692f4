"""Which tasks a check has, in which order: all groups advance alike, so any part is a fair one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from pagedattn.checking.profiles import Profile, batch_of_task, kind_of_task
from pagedattn.checking.properties import AGREEMENT, PROPERTIES
from pagedattn.checking.subject import Subject
from pagedattn.checking.task import Task

DRAWS_PER_EXAMPLE = 200
"""So many steps are drawn for one example, at most, until the subject computes one."""
WEIGHTS = {AGREEMENT.name: 12, "graph replay": 3}
"""Shares of a number of examples in all; the other properties have 1 each."""


@dataclass(frozen=True)
class Group:
    """One property for one subject."""

    subject: str
    prop: str
    modes: tuple[str, ...]
    num_tasks: int


def groups_of(
    subjects: Sequence[Subject],
    props: Sequence[str],
    modes: Sequence[str],
    device: torch.device,
    num_tasks: Callable[[str, int], int],
) -> tuple[list[Group], list[str]]:
    """What can be tried, and why the rest cannot.

    Args:
        subjects: What is checked.
        props: Names of properties.
        modes: Modes to draw.
        device: Where to compute.
        num_tasks: Of a property and the number of its modes, how often it is tried.

    Returns:
        The groups, and a line for each property of a subject that cannot run.
    """
    groups, left_out = [], []
    for subject in subjects:
        if subject.no_low_scores is not None:
            left_out.append(
                f"{subject.name}: low scores are not drawn, a known defect: {subject.no_low_scores}"
            )
        for name in props:
            prop = PROPERTIES[name]
            # mixed steps first, where a group has one step only
            of_these = tuple(mode for mode in reversed(modes) if mode in prop.modes)
            reason = prop.reason_against(subject, device)
            if reason is None and not of_these:
                reason = f"it is tried on {', '.join(prop.modes)} steps"
            if reason is not None:
                left_out.append(f"{subject.name}: {name} is not tried: {reason}")
            else:
                tasks = num_tasks(name, len(of_these))
                groups.append(Group(subject.name, name, of_these, tasks))
    return groups, left_out


def shared_out(groups: Sequence[Group], total: int) -> list[Group]:
    """The groups with shares of a number of tasks in all, at least one each."""
    weights = [WEIGHTS.get(group.prop, 1) for group in groups]
    return [
        Group(group.subject, group.prop, group.modes, max(1, total * weight // sum(weights)))
        for group, weight in zip(groups, weights, strict=True)
    ]


class Schedule:
    """Every group's tasks, spread evenly over the whole.

    Args:
        groups: What to try.
        subjects: Of the groups.
        profile: How steps are drawn.
        first_seed: Seeds count up from here, in each mode of each group; those whose steps are not
            supported are skipped.
        device: Where to compute.
        endless: Go on behind the last task.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        subjects: Sequence[Subject],
        profile: Profile,
        first_seed: int,
        device: torch.device,
        *,
        endless: bool = False,
    ) -> None:
        self.endless = endless
        by_name = {subject.name: subject for subject in subjects}
        self._progress = {
            (group.subject, group.prop): _Progress(
                group,
                [
                    _supported_seeds(
                        by_name[group.subject], group.prop, mode, profile, first_seed, device
                    )
                    for mode in group.modes
                ],
            )
            for group in groups
        }

    @property
    def num_tasks(self) -> int:
        """How many are wanted."""
        return sum(progress.group.num_tasks for progress in self._progress.values())

    def take(self) -> Task | None:
        """The next task; `None` where enough is under way, until something is declined."""
        while True:
            active = [p for p in self._progress.values() if p.wants_more(self.endless)]
            if not active:
                return None
            task = min(active, key=_Progress.share).take()
            if task is not None:
                return task

    def declined(self, task: Task) -> None:
        """A task checked nothing: another one may take its place."""
        self._progress[task.subject, task.prop].num_declined += 1


@dataclass(eq=False)
class _Progress:
    """How far a group is."""

    group: Group
    seeds: list[Iterator[int]]  # of each mode
    num_taken: int = 0
    num_declined: int = 0
    exhausted: bool = False

    def share(self) -> float:
        return (self.num_taken - self.num_declined) / self.group.num_tasks

    def wants_more(self, endless: bool) -> bool:
        if self.exhausted:
            return False
        drawn_too_often = self.num_taken >= DRAWS_PER_EXAMPLE * self.group.num_tasks
        return endless or (self.share() < 1 and not drawn_too_often)

    def take(self) -> Task | None:
        turn = self.num_taken % len(self.group.modes)
        seed = next(self.seeds[turn], None)
        self.num_taken += 1
        self.exhausted = seed is None
        if seed is None:
            return None
        return Task(self.group.subject, self.group.prop, self.group.modes[turn], seed)


def _supported_seeds(
    subject: Subject,
    prop: str,
    mode: str,
    profile: Profile,
    first_seed: int,
    device: torch.device,
) -> Iterator[int]:
    """Seeds whose steps the subject supports; none after too many that it does not."""
    num_refused = 0
    answers: dict[object, bool] = {}  # of the few kinds of a GPU
    for seed in count(first_seed):
        kind = kind_of_task(profile, subject.name, prop, seed, device)
        if kind is None:
            batch = batch_of_task(profile, subject.name, prop, mode, seed, device)
            supported = not subject.unsupported_reasons(batch.spec, batch.page_size, device)
        else:
            if kind not in answers:
                answers[kind] = not subject.unsupported_reasons(*kind, device)
            supported = answers[kind]
        if supported:
            num_refused = 0
            yield seed
        elif (num_refused := num_refused + 1) > DRAWS_PER_EXAMPLE:
            return

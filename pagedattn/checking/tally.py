"""Many outcomes, counted: how close to float64 each group stays, and what it gets wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagedattn.checking.compare import Difference
from pagedattn.checking.task import Outcome


@dataclass
class Tally:
    """What came out for one property of one subject in one mode."""

    subject: str
    prop: str
    mode: str
    num_checked: int = 0
    num_declined: int = 0
    declined: str | None = None  # why, the first time
    worst: Difference | None = None  # the nearest to its allowed error, or the furthest above it
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        if outcome.declined is not None:
            self.num_declined += 1
            self.declined = self.declined or outcome.declined
            return
        self.num_checked += 1
        worst = outcome.worst
        if worst is not None and (self.worst is None or worst.excess > self.worst.excess):
            self.worst = worst
        if outcome.problem is not None:
            self.failures.append(outcome)


def tally(outcomes: Iterable[Outcome]) -> list[Tally]:
    """Count outcomes by subject, property and mode, in the order of their first ones."""
    tallies: dict[tuple[str, str, str], Tally] = {}
    for outcome in outcomes:
        group = outcome.task.group
        tallies.setdefault(group, Tally(*group)).add(outcome)
    return list(tallies.values())

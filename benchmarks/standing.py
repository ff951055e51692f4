"""Where our backends stand in a case: their times beside those of the peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results_file import Result

OUR_PREFIX = "pagedattn-"


@dataclass(frozen=True)
class Standing:
    """The usable results of one case, each backend's once."""

    case: str
    ours: tuple[Result, ...]
    others: tuple[Result, ...]  # at least one

    @property
    def best_peer(self) -> Result:
        """The fastest of the others."""
        return min(self.others, key=milliseconds)

    def speed(self, result: Result) -> float:
        """How many times as fast as the best peer a result is."""
        return milliseconds(self.best_peer) / milliseconds(result)


def milliseconds(result: Result) -> float:
    """The time of a usable result."""
    if result.median_time is None:
        raise ValueError(f"{result.case_tag}, {result.backend} has no time: {result.failure}")
    return result.median_time


def latest(results: Sequence[Result]) -> list[Result]:
    """The last row of each case and backend."""
    rows = {(r.case_tag, r.backend): r for r in results}
    return list(rows.values())


def standings(results: Sequence[Result]) -> list[Standing]:
    """Cases that one of ours and one peer were measured in, in the order of the results."""
    usable = [r for r in latest(results) if r.is_usable]
    found = []
    for case in dict.fromkeys(r.case_tag for r in usable):
        of_case = [r for r in usable if r.case_tag == case]
        ours = tuple(r for r in of_case if r.backend.startswith(OUR_PREFIX))
        others = tuple(r for r in of_case if not r.backend.startswith(OUR_PREFIX))
        if ours and others:
            found.append(Standing(case, ours, others))
    return found

"""Where the backends stand in a case: their times beside the best that there was without ours.

The measure is the fastest way to read the pages that is not our Triton backend: FlashInfer's own
calls, our wrappers of them, FlashAttention. PyTorch on gathered keys and values is shown and is no
measure, since gathering is not in its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results_file import Result

TRITON = "pagedattn-triton"
NO_MEASURE = (TRITON, f"{TRITON}-invariant", "pagedattn-reference", "torch-sdpa", "torch-flex")


@dataclass(frozen=True)
class Standing:
    """The usable results of one case, each backend's once, and the peer that others are held to."""

    case: str
    results: tuple[Result, ...]
    best_peer: Result

    def speed(self, result: Result) -> float:
        """How many times as fast as the best peer a result is."""
        return milliseconds(self.best_peer) / milliseconds(result)

    def time_of(self, backend: str) -> float | None:
        """Milliseconds of a backend, None where it has no right answer."""
        return next((milliseconds(r) for r in self.results if r.backend == backend), None)


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
    """Cases in which some peer was measured, in the order of the results."""
    usable = [r for r in latest(results) if r.is_usable]
    found = []
    for case in dict.fromkeys(r.case_tag for r in usable):
        of_case = tuple(r for r in usable if r.case_tag == case)
        peers = [r for r in of_case if r.backend not in NO_MEASURE]
        if peers:
            found.append(Standing(case, of_case, min(peers, key=milliseconds)))
    return found

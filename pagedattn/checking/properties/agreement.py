"""Agreement: the answer is that of float64, within a bound that is derived for each element."""

from __future__ import annotations

from collections.abc import Iterator

from pagedattn.checking.compare import compare
from pagedattn.checking.place import describe_row
from pagedattn.checking.properties.base import Finding, Property, Trial


def _check(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    answer = trial.answer(step)
    comparison = compare(answer.got, *trial.subject.truth(step))
    worst, problem = comparison.worst, None
    if worst is not None and not comparison.ok:
        problem = f"{worst} ({describe_row(step, worst.row)})"
    yield Finding((answer,), worst, problem)


AGREEMENT = Property("agreement", "the answer vs float64", _check)

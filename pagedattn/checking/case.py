"""A wrong answer with all that is known of it, and what a hypothesis about it looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Arithmetic, Bound
from pagedattn.checking.step import Step
from pagedattn.checking.variant import Prediction, Variant


@dataclass(frozen=True, eq=False)
class Case:
    """A step, the answer that was got and the right one; answers are f64 on the CPU."""

    step: Step
    got: AttentionOutput
    expected: AttentionOutput
    bound: Bound
    arithmetic: Arithmetic
    earlier: Sequence[Step] = ()
    has_lse: bool = True  # False: no LSE was asked for, and that of `got` is the right one

    @cached_property
    def wrong(self) -> tuple[Tensor, Tensor]:
        """bool, as `out` and as `lse`: where the answer is wrong."""
        prediction = Prediction(self.expected, self.bound)
        out, lse = agreement(self.got, prediction)
        return ~out, ~lse

    @cached_property
    def wrong_rows(self) -> Tensor:
        """i64[rows]: rows with a wrong element."""
        out, lse = self.wrong
        return (out.flatten(1).any(1) | lse.any(1)).nonzero().flatten()

    @cached_property
    def smallest_wrong_request(self) -> int:
        """The request with a wrong row that is computed fastest."""
        wrong = {self.request_of(row) for row in self.wrong_rows.tolist()}
        qo_lens, kv_lens = self.step.qo_lens, self.step.kv_lens
        return min(wrong, key=lambda request: (qo_lens[request] * kv_lens[request], request))

    def request_of(self, row: int) -> int:
        """The request that a row of `q` belongs to."""
        bounds = self.step.qo_indptr
        return int(torch.searchsorted(bounds, row, right=True)) - 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """One fault that might explain an answer."""

    name: str
    detail: str  # what more there is to say, or ""
    makes: Variant | Prediction
    copies_the_answer: bool = False  # what was got is part of it: only the whole answer counts


Hypothesis = Callable[[Case], Iterator[Candidate]]


def agreement(got: AttentionOutput, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """bool, as `out` and as `lse`: where an answer is what is predicted, up to rounding."""
    places = []
    for value, predicted, allowed in zip(got, prediction.answer, prediction.allowed, strict=True):
        near = (value == predicted) | ((value - predicted).abs() <= allowed)
        places.append(torch.where(predicted.isnan(), ~value.isfinite(), near))
    return places[0], places[1]

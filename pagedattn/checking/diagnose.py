"""What kind of wrong is it: the fault that would compute an answer like this one, and where.

Each hypothesis computes, in float64, what an implementation with its fault would answer; the first
that predicts the wrong answer, up to rounding, names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import FLOAT32_SUMS, Arithmetic, allowed_error
from pagedattn.checking.case import Candidate, Case, Hypothesis, agreement
from pagedattn.checking.fitted import fitted_scale, missing_piece
from pagedattn.checking.misread import (
    stale_plan,
    wrong_layout,
    wrong_length,
    wrong_mask,
    wrong_pages,
    wrong_scores,
)
from pagedattn.checking.miswritten import (
    finite_minus_infinity,
    lse_in_another_base,
    nan_leak,
    offsets_beyond_32_bits,
    rows_in_another_order,
    rows_never_written,
    rows_without_keys,
)
from pagedattn.checking.place import Place, first_and_worst
from pagedattn.checking.step import Step, oracle
from pagedattn.checking.variant import Variant, predict

HYPOTHESES: tuple[tuple[Hypothesis, ...], ...] = (
    # simplest first; a group is tried where none before it explains the whole answer
    (
        lse_in_another_base,
        wrong_mask,
        wrong_length,
        nan_leak,
        stale_plan,
        wrong_pages,
        wrong_layout,
        wrong_scores,
        finite_minus_infinity,
        rows_without_keys,
        rows_never_written,
    ),
    (fitted_scale, missing_piece),
    (rows_in_another_order, offsets_beyond_32_bits),
)


MAX_LISTED = 3
"""Further explanations that are printed."""


@dataclass(frozen=True)
class Explanation:
    """A fault that predicts every wrong element, up to rounding."""

    name: str
    detail: str
    num_unlike: int  # right elements that it would have changed; 0: it is the whole answer

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with an answer.

    Attributes:
        explanations: Faults that predict the whole answer, simplest first; failing that, one that
            predicts what is wrong of it but would have changed more. Empty: none explains it.
        first: The first wrong element, in the order of rows.
        worst: The one furthest above what is allowed.
        num_wrong: Wrong elements of `out` and `lse`.
        num_elements: All of them.
        num_tried: Faults that were computed.
    """

    explanations: tuple[Explanation, ...]
    first: Place
    worst: Place
    num_wrong: int
    num_elements: int
    num_tried: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the explanations, each once."""
        return tuple(dict.fromkeys(explanation.name for explanation in self.explanations))

    def __str__(self) -> str:
        lines = [self._verdict()]
        if len(self.names) > 1:
            others = [e for e in self.explanations if e.name != self.names[0]]
            listed = "; ".join(map(str, others[:MAX_LISTED]))
            more = f"; and {len(others) - MAX_LISTED} more" if len(others) > MAX_LISTED else ""
            lines.append(f"Explained as well by: {listed}{more}.")
        lines.append(f"{self.num_wrong} of {self.num_elements} elements are wrong.")
        lines += [f"First: {self.first}", f"Worst: {self.worst}"]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not self.explanations:
            return f"Unexplained: none of {self.num_tried} known faults computes this answer."
        best = self.explanations[0]
        if best.num_unlike == 0:
            return f"Diagnosis: {best}. It explains the whole answer."
        return (
            f"Perhaps: {best}. It explains all that is wrong, but would also have changed "
            f"{best.num_unlike} elements that are right."
        )


def diagnose(
    step: Step,
    got: AttentionOutput,
    *,
    earlier: Sequence[Step] = (),
    arithmetic: Arithmetic = FLOAT32_SUMS,
    has_lse: bool = True,
) -> Diagnosis | None:
    """Find out what kind of wrong an answer is.

    Args:
        step: What was to be computed.
        got: dtype[tokens, num_qo_heads, head_dim] and f32[tokens, num_qo_heads], on any device.
        earlier: Steps that were planned before, one of which may still be in force.
        arithmetic: How the backend computes.
        has_lse: False: no LSE was asked for, and that of `got` is the right one.

    Returns:
        None where every element is within its bound.
    """
    expected = oracle(step)
    bound = allowed_error(step, expected, arithmetic)
    answer = AttentionOutput(*(tensor.detach().double().cpu() for tensor in got))
    case = Case(step, answer, expected, bound, arithmetic, earlier, has_lse)
    num_wrong = sum(int(wrong.sum()) for wrong in case.wrong)
    if num_wrong == 0:
        return None
    explanations, num_tried = _explain(case)
    first, worst = first_and_worst(case)
    num_elements = answer.out.numel() + answer.lse.numel()
    return Diagnosis(explanations, first, worst, num_wrong, num_elements, num_tried)


def _explain(case: Case) -> tuple[tuple[Explanation, ...], int]:
    """Those that predict the whole answer, else the one that is closest; how many were tried."""
    partial: list[Explanation] = []
    num_tried = 0
    for group in HYPOTHESES:
        whole: list[Explanation] = []
        for candidate in _candidates(case, group):
            num_tried += 1
            explanation = _judge(case, candidate)
            if explanation is not None:
                (partial if explanation.num_unlike else whole).append(explanation)
        if whole:
            return tuple(whole), num_tried
    return tuple(sorted(partial, key=lambda e: e.num_unlike)[:1]), num_tried


def _candidates(case: Case, group: tuple[Hypothesis, ...]) -> Iterator[Candidate]:
    for hypothesis in group:
        yield from hypothesis(case)


def _is_refuted(case: Case, variant: Variant) -> bool:
    """Whether the smallest request that is wrong shows already that it is not this fault."""
    request = case.smallest_wrong_request
    begin, end = case.step.qo_indptr[request : request + 2].tolist()
    if variant.step.qo_indptr.tolist() != case.step.qo_indptr.tolist():
        return False
    agrees = agreement(case.got, predict(variant, case.arithmetic, request))
    pairs = zip(agrees, case.wrong, strict=True)
    return any(bool((wrong & ~like)[begin:end].any()) for like, wrong in pairs)


def _judge(case: Case, candidate: Candidate) -> Explanation | None:
    """Whether a fault predicts every wrong element, and how many right ones it would change."""
    made = candidate.makes
    if isinstance(made, Variant):
        if _is_refuted(case, made):
            return None
        made = predict(made, case.arithmetic)
    agrees = agreement(case.got, made)
    error, left = 0.0, 0.0
    for i, (like, wrong) in enumerate(zip(agrees, case.wrong, strict=True)):
        if not bool(like[wrong].all()):
            return None
        got, right, predicted = (a[i][wrong] for a in (case.got, case.expected, made.answer))
        error += float((got - right).abs().nan_to_num(0, 0, 0).sum())
        left += float((got - predicted).abs().nan_to_num(0, 0, 0).sum())
    if left > error / 2:  # bounds so wide that they say nothing
        return None
    told = agrees if case.has_lse else agrees[:1]
    num_unlike = sum(int((~like).sum()) for like in told)
    if num_unlike and candidate.copies_the_answer:
        return None
    return Explanation(candidate.name, candidate.detail, num_unlike)

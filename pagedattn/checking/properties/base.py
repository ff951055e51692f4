"""What a property is: a relation that right attention keeps on any step, and what a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.batch import Batch
from pagedattn.checking.bound import Bound
from pagedattn.checking.compare import Difference, compare
from pagedattn.checking.drawing import MODES, Choices
from pagedattn.checking.step import Step
from pagedattn.checking.subject import Subject

OutAndLse = TypeVar("OutAndLse", AttentionOutput, Bound)


class Answer(NamedTuple):
    """A step and what the subject made of it."""

    step: Step
    got: AttentionOutput

    @property
    def has_lse(self) -> bool:
        """Whether the LSE is the subject's; one in float64 stands in for it."""
        return self.got.lse.dtype != torch.float64


@dataclass(frozen=True, eq=False)
class Finding:
    """One comparison that a property made.

    Attributes:
        answers: The subject's answers that took part: if something is wrong, it is in one of them.
        worst: The place that is nearest to what is allowed, or furthest above it.
        problem: What is wrong, in words; `None`: nothing.
    """

    answers: tuple[Answer, ...]
    worst: Difference | None = None
    problem: str | None = None


@dataclass(frozen=True, eq=False)
class Trial:
    """What a property is tried on.

    Attributes:
        subject: What is checked.
        batch: The drawn step.
        choices: For what else a property draws.
        device: Where to compute.
    """

    subject: Subject
    batch: Batch
    choices: Choices
    device: torch.device

    def step(self, batch: Batch | None = None) -> Step:
        """The drawn step, or another one, as tensors."""
        return (self.batch if batch is None else batch).materialise(self.device)

    def answer(self, step: Step) -> Answer:
        """Let the subject compute a step."""
        return Answer(step, self.subject.attend(step))

    def bound(self, step: Step) -> Bound:
        """How far from float64 an answer may be."""
        return self.subject.truth(step).bound

    def same(
        self,
        what: str,
        got: AttentionOutput,
        expected: AttentionOutput,
        answers: Sequence[Answer],
        bound: Callable[[], Bound],
    ) -> Finding:
        """Compare answers that the same arithmetic makes: bits, where the subject keeps them.

        Args:
            what: What is compared with what.
            got: One answer, or rows of it.
            expected: The other one.
            answers: Those that take part.
            bound: Of `expected`; asked where bits may differ.
        """
        if self.subject.same_bits:
            zeros = Bound(*(torch.zeros_like(t, dtype=torch.float64) for t in expected))
            return related(f"{what}, bit for bit", got, expected, answers, zeros)
        allowed = bound()
        return related(what, got, expected, answers, allowed, allowed)


Check = Callable[[Trial], Iterator[Finding]]


def runs_anywhere(subject: Subject, device: torch.device) -> str | None:
    """No reason against running."""
    return None


@dataclass(frozen=True, eq=False)
class Property:
    """A relation that right attention keeps.

    Attributes:
        name: On the command line.
        compares: What is compared with what.
        check: Makes the comparisons, one after the other.
        modes: The modes of the steps that it is tried on.
        reason_against: Why it cannot run for a subject and a device; `None`: it can.
        own_step: It is tried on a step of its own, of which the drawn one decides little.
    """

    name: str
    compares: str
    check: Check
    modes: tuple[str, ...] = MODES
    reason_against: Callable[[Subject, torch.device], str | None] = runs_anywhere
    own_step: bool = False


def related(
    what: str,
    got: AttentionOutput,
    expected: AttentionOutput,
    answers: Sequence[Answer],
    *bounds: Bound,
) -> Finding:
    """Compare two answers that may differ by the sum of what their bounds allow.

    Args:
        what: What is compared with what.
        got: One answer, or rows of it.
        expected: What it should be.
        answers: The subject's answers that take part.
        bounds: At least one.
    """
    bound = Bound(sum((b.out for b in bounds[1:]), bounds[0].out), _sum_of_lse(bounds))
    where = bound.out.device
    doubled = AttentionOutput(*(tensor.to(where).double() for tensor in expected))
    comparison = compare(got, doubled, bound)
    problem = None if comparison.ok else f"{what}: {comparison.worst}"
    return Finding(tuple(answers), comparison.worst, problem)


def _sum_of_lse(bounds: Sequence[Bound]) -> Tensor:
    return sum((b.lse for b in bounds[1:]), bounds[0].lse)


def pick(answer: OutAndLse, index: Tensor) -> OutAndLse:
    """These rows of an answer or of a bound."""
    out, lse = (tensor[index.to(tensor.device)] for tensor in answer)
    return type(answer)(out, lse)

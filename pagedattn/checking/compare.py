"""Comparing an answer with the float64 one: how far, how far is allowed, and where it is worst."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import FLASHINFER, FLOAT32_SUMS, Arithmetic, Bound, allowed_error
from pagedattn.checking.dense import dense_attention
from pagedattn.checking.step import Attend, Step, attend_with, oracle


@dataclass(frozen=True)
class Difference:
    """One place where an answer was compared."""

    tensor: str  # "out" or "lse"
    row: int  # row of q and out
    head: int
    element: int | None  # of the head; None for lse
    got: float
    expected: float
    error: float  # infinite where the answer is NaN, or infinite where it should not be
    allowed: float

    @property
    def excess(self) -> float:
        """Error over allowed error; up to 1 is right."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else torch.inf

    def __str__(self) -> str:
        place = f"{self.tensor}[{self.row}, {self.head}"
        place += "]" if self.element is None else f", {self.element}]"
        return (
            f"{place} is {self.got:.9g}, expected {self.expected:.9g}: "
            f"error {self.error:.3g}, allowed {self.allowed:.3g}"
        )


@dataclass(frozen=True)
class Comparison:
    """An answer against the expected one; `worst` is None where there was nothing to compare."""

    worst: Difference | None

    @property
    def ok(self) -> bool:
        """Whether every element is within its bound."""
        return self.worst is None or self.worst.excess <= 1


def compare(got: AttentionOutput, expected: AttentionOutput, bound: Bound) -> Comparison:
    """Compare every element of `out` and `lse` with its own bound.

    NaN never passes, and an `lse` of minus infinity must match exactly.

    Args:
        got: dtype[tokens, num_qo_heads, head_dim] and f32[tokens, num_qo_heads], on any device.
        expected: `oracle(step)`; its device is where they are compared.
        bound: `allowed_error(step, expected)`, there too.

    Raises:
        ValueError: A tensor has another shape than the expected one.
    """
    places = [
        _worst("out", got.out, expected.out, bound.out),
        _worst("lse", got.lse, expected.lse, bound.lse),
    ]
    found = [place for place in places if place is not None]
    return Comparison(max(found, key=lambda place: place.excess, default=None))


def check_step(attend: Attend, step: Step, arithmetic: Arithmetic = FLOAT32_SUMS) -> Comparison:
    """Compute `step` with `attend` and compare it with the float64 oracle."""
    expected = oracle(step)
    return compare(attend(step), expected, allowed_error(step, expected, arithmetic))


def compared_with(backend: str) -> str:
    """What `check_backend` compares this backend with, in words."""
    return "dense float64" if backend == "reference" else "float64 reference"


def check_backend(backend: str, step: Step, *, attend: Attend | None = None) -> Comparison:
    """Compare a backend with float64: with the oracle, and the oracle's own with `dense.py`.

    Args:
        backend: Its name, which decides what is allowed.
        step: What to compute.
        attend: How to compute it with this backend; by default `attend_with(backend)`.
    """
    attend = attend or attend_with(backend)
    expected = expected_of(backend, step)
    return compare(attend(step), expected, allowed_error(step, expected, arithmetic_of(backend)))


def expected_of(backend: str, step: Step) -> AttentionOutput:
    """The float64 answer that this backend is compared with."""
    return dense_attention(step, torch.float64) if backend == "reference" else oracle(step)


def arithmetic_of(backend: str) -> Arithmetic:
    """How a backend computes, for `allowed_error`."""
    return FLASHINFER if backend == "flashinfer" else FLOAT32_SUMS


def _worst(tensor: str, got: Tensor, expected: Tensor, allowed: Tensor) -> Difference | None:
    if got.shape != expected.shape:
        raise ValueError(f"{tensor} has shape {list(got.shape)}, expected {list(expected.shape)}")
    if not expected.numel():
        return None
    got = got.detach().to(expected.device).double()
    error = torch.where(got == expected, 0.0, (got - expected).abs())
    error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
    excess = torch.where(error == 0, 0.0, error / allowed)  # x / 0 is infinite
    flat = excess.nan_to_num(nan=torch.inf).argmax()
    found = [each.flatten()[flat] for each in (got, expected, error, allowed)]
    index, *numbers = torch.stack([flat.double(), *found]).tolist()  # a GPU is waited for once
    place = [int(i) for i in torch.unravel_index(torch.tensor(int(index)), expected.shape)]
    element = place[2] if len(place) > 2 else None
    return Difference(tensor, place[0], place[1], element, *numbers)

"""The verdict on an answer that anybody's kernel gave: right within rounding, or what is wrong."""

from __future__ import annotations

from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import FLOAT32_SUMS, Arithmetic
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.step import Step, oracle


def assert_attention(
    step: Step, out: Tensor, lse: Tensor | None = None, *, arithmetic: Arithmetic = FLOAT32_SUMS
) -> None:
    """Require that an answer is attention of a step, each element within its derived bound.

    Args:
        step: What was to be computed, as `Batch.materialise` makes it.
        out: dtype[tokens, num_qo_heads, head_dim], on any device.
        lse: f32[tokens, num_qo_heads], natural logarithm; None where the kernel gives none.
        arithmetic: How the kernel computes, where that decides what rounding can do.

    Raises:
        AssertionError: It is not. The message names the fault that would compute this answer, where
            one is known, and the request, position, page and slot of the first and of the worst
            difference.
        ValueError: A tensor has another shape than it should have.
    """
    for name, tensor, shape in (("out", out, step.q.shape), ("lse", lse, step.q.shape[:2])):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    got = AttentionOutput(out, oracle(step).lse if lse is None else lse)
    found = diagnose(step, got, arithmetic=arithmetic, has_lse=lse is not None)
    if found is not None:
        raise AssertionError(str(found))

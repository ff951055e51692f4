r"""How far from the float64 answer a right computation may be: a derived bound for each element.

    allowed = 2 * (error of an independent low-precision computation) + band

The first term says how hard this input is: `dense.py` in the spec's dtype, its largest error over
the elements of a row and head. The band is the worst that rounding can do, at this element, to an
honest kernel, whose scores and sums are float32.

Notation: `u` is the unit roundoff of the spec's dtype (half its epsilon) and `w = 2^-24` that of
float32; `s_j` the exact score of visible key `j`, `m` the largest, `l = sum exp(s_j - m)`,
`p_j = exp(s_j - m) / l`, `o = sum p_j v_j`. A float32 sum of `n` terms, in any order, is off by at
most `t(n) w sum |terms|`, `t(n) = min(n, 6 sqrt(n))`: `n` always, `6 sqrt(n)` but for a chance of
`2 n exp(-18)` (Higham and Mary 2019, A new approach to probabilistic rounding error analysis).

Scores. A kernel sums `q_d k_jd` in float32, scales, maybe caps, subtracts a maximum, takes `exp2`:

    d_j = w ((t(head_dim) + 1) scale sum_d |q_d k_jd|   products and their sum
             + 3 |s_j|                                  the scale's rounding, products with it
             + |s_j - m| + 16)                          the subtraction; exp2 (2^-22 in the PTX ISA,
                                                        4 w) and the rescaling of earlier tiles

With a soft cap `c` the first two lines are those of the uncapped score times the slope of the cap,
and `c (2^-21 + tanh_error |tanh|)` joins: tanh through float32 exponentials, or the hardware's.

The weights become `p_j exp(e_j) / z` with `|e_j| <= d_j` and `z = sum p_j exp(e_j)`, at least
`Z = sum p_j exp(-d_j)`. Since `sum p_j (v_j - o) = 0`:

    |o' - o| = |sum p_j (exp(e_j) - 1) (v_j - o)| / z
            <= sum p_j (exp(d_j) - 1) (|v_j| + |o|) / Z                                          (A)
    |lse' - lse| = |log z| <= log sum p_j exp(d_j)      (its lower side by Jensen's inequality)  (B)

Sums. Probabilities, normalised or not, are at most 1 and are rounded to the spec's dtype before
they meet V: relative `u`, and half its smallest step `q` where they are tiny. With
`P_j = p_j exp(d_j) / Z` and float32 sums over `n` visible keys, of `p v` and of `p`:

    (u + (t(n) + 16) w) sum P_j |v_j| + (t(n) + 16) w |o| + q / 2 sum |v_j| / l                  (C)

Output: `A + C`, and its rounding, `u (|o| + A + C) + q / 2`. LSE: `B`, the sum `(t(n) + 16) w`, and
`4 w (|m| + |lse|)` for the logarithm and the way from base 2. A backend that sums weights which are
rounded already (`Arithmetic.sums_rounded_weights`) has a sum that is off by at most `u` of itself,
so `u / (1 - u) |o|` joins its output and `-log(1 - u)` its LSE. A row that sees no key is allowed
nothing: 0 and minus infinity, exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.dense import DenseBlock, dense_attention, dense_blocks
from pagedattn.checking.step import Step
from pagedattn.spec import AttentionSpec

FLOAT32_ROUNDOFF = 2.0**-24
TANH_ERROR = 2.0**-21
"""Absolute error of tanh through float32 exponentials."""
HARDWARE_TANH_ERROR = 2.0**-10.987
"""Relative error of `tanh.approx.f32` (PTX ISA), which FlashInfer's soft cap uses."""


@dataclass(frozen=True)
class Arithmetic:
    """How a backend computes, where that decides what rounding can do.

    Attributes:
        tanh_error: Relative error of the tanh in its soft cap, beyond what float32 makes.
        sums_rounded_weights: Whether weights are rounded to the spec's dtype before their sum, the
            denominator, is made.
    """

    tanh_error: float = 0.0
    sums_rounded_weights: bool = False


FLOAT32_SUMS = Arithmetic()
FLASHINFER = Arithmetic(HARDWARE_TANH_ERROR, sums_rounded_weights=True)
"""FlashInfer's fa2 makes the row sums with the tensor cores that take the rounded weights."""


class Bound(NamedTuple):
    """What error is allowed where, float64 on the CPU."""

    out: Tensor  # f64[tokens, num_qo_heads, head_dim]
    lse: Tensor  # f64[tokens, num_qo_heads]


def allowed_error(
    step: Step, expected: AttentionOutput, arithmetic: Arithmetic = FLOAT32_SUMS
) -> Bound:
    """Derive the bound of a step; the module's docstring has the derivation.

    Args:
        step: The inputs.
        expected: `oracle(step)`.
        arithmetic: How the backend under test computes.
    """
    small = step.compacted()
    low = dense_attention(small)
    out = 2 * distance(low.out, expected.out).amax(-1, keepdim=True).expand_as(low.out).clone()
    lse = 2 * distance(low.lse, expected.lse)
    for block in dense_blocks(small, torch.float64):
        out_band, lse_band = band(small.spec, block, arithmetic)
        out[block.rows] += out_band.transpose(0, 1)
        lse[block.rows] += lse_band.transpose(0, 1)
    return Bound(out, lse)


def distance(got: Tensor, expected: Tensor) -> Tensor:
    """f64: absolute difference, 0 between equal infinities."""
    return torch.where(got == expected, 0.0, (got.double() - expected).abs())


def _terms(n: Tensor | int) -> Tensor:
    """How many roundings the sum of `n` float32 terms is charged with."""
    n = torch.as_tensor(n, dtype=torch.float64)
    return torch.minimum(n, 6 * n.sqrt())


def band(spec: AttentionSpec, block: DenseBlock, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """f64[heads, rows, head_dim] and f64[heads, rows]: the band of `out` and of `lse`.

    A block may have more leading dimensions than heads, and a mask for each.
    """
    unit = torch.finfo(spec.dtype).eps / 2
    smallest = torch.finfo(spec.dtype).tiny * torch.finfo(spec.dtype).eps
    sees_key = block.visible.any(-1)
    scores, drift = _scores_and_drift(spec, block, arithmetic.tanh_error)
    top = scores.amax(-1, keepdim=True).masked_fill(~sees_key[..., None], 0)
    denominator = torch.exp(scores - top).sum(-1, keepdim=True).clamp(min=1)
    p = torch.exp(scores - top) / denominator
    grown = p * torch.exp(drift)
    z = (p * torch.exp(-drift)).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    v = block.v.abs()
    sums = FLOAT32_ROUNDOFF * (_terms(block.visible.sum(-1)) + 16)
    value = (p @ block.v).abs()
    moved = p * torch.expm1(drift) / z
    out = moved @ v + moved.sum(-1, keepdim=True) * value  # (A)
    out += (unit + sums[..., None]) * (grown / z @ v) + sums[..., None] * value  # (C)
    out += smallest / 2 * (block.visible.double() @ v) / denominator
    if arithmetic.sums_rounded_weights:
        out += unit / (1 - unit) * value
    out += unit * (value + out) + smallest / 2

    lse_value = (top + torch.log(denominator))[..., 0]
    lse = torch.log(grown.sum(-1).clamp(min=1)) + sums
    lse += 4 * FLOAT32_ROUNDOFF * (top[..., 0].abs() + lse_value.abs())
    if arithmetic.sums_rounded_weights:
        lse -= math.log1p(-unit)
    return out * sees_key[..., None], lse * sees_key


def _scores_and_drift(
    spec: AttentionSpec, block: DenseBlock, tanh_error: float
) -> tuple[Tensor, Tensor]:
    """f64[heads, rows, keys] twice: exact scores, -inf where hidden, and `d_j`, 0 where hidden."""
    scores = block.q @ block.k.transpose(-1, -2) * spec.scale
    products = block.q.abs() @ block.k.abs().transpose(-1, -2) * spec.scale
    drift = (_terms(spec.head_dim) + 1) * products + 3 * scores.abs()
    drift *= FLOAT32_ROUNDOFF
    cap = spec.logits_soft_cap
    if cap > 0:
        nearest = (scores.abs() - drift).clamp(min=0)  # where the cap's slope is largest
        drift *= torch.cosh((nearest / cap).clamp(max=math.log(1e8))) ** -2
        bent = torch.tanh(scores / cap)
        drift += cap * (TANH_ERROR + tanh_error * bent.abs())
        scores = cap * bent
    hidden = ~block.visible
    scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    drift += FLOAT32_ROUNDOFF * ((scores - top).abs() + 16)
    return scores, drift.masked_fill(hidden, 0)

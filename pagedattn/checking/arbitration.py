"""Two answers to the same rows: whether they agree, and which of them is wrong.

Two right kernels round differently. Where they differ by no more than rounding commonly makes them,
they agree, which is decided on their device. Where they differ by more, there is a doubt, which the
float64 answer and the derived bound of `bound.py` settle on the host, for either side by itself.

What agrees is within `AGREEMENT_UNITS` units of the spec's dtype at the largest element of the head
(and within a float32 tolerance for the LSE): less than the derived bound but for rows that see a
handful of keys, and more than two kernels differ by that round the same probabilities, the sum and
the output (about five units of a typical element in a hundred thousand, and the largest element of
a head is two or three typical ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import allowed_error
from pagedattn.checking.compare import Comparison, arithmetic_of, compare, expected_of
from pagedattn.checking.row_sample import RowStep
from pagedattn.checking.step import Step
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

AGREEMENT_UNITS = 4
FLOAT32_TOLERANCE = 2.0**-16
"""For scores and sums in float32: relative for `out`, relative and absolute for the LSE."""
PAGES_AT_ONCE = 1024
"""Gathered on the device before they go to the host."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What a backend answered for some rows."""

    backend: str
    out: Tensor  # dtype[rows, num_qo_heads, head_dim]
    lse: Tensor | None  # f32[rows, num_qo_heads]; None: it was not asked for

    def of_rows(self, begin: int, end: int) -> Answer:
        """The answer for some of the rows."""
        lse = None if self.lse is None else self.lse[begin:end]
        return Answer(self.backend, self.out[begin:end], lse)

    def with_lse(self, lse: Tensor) -> AttentionOutput:
        """The answer, with this LSE where none was asked for."""
        return AttentionOutput(self.out, lse if self.lse is None else self.lse)


def disagreement(spec: AttentionSpec, one: Answer, other: Answer) -> Tensor:
    """f32[rows]: how far two answers differ, 1 being the most at which they agree.

    Infinite where either is NaN or only one is infinite. Waits for no device.
    """
    unit = torch.finfo(spec.dtype).eps / 2
    relative = AGREEMENT_UNITS * unit + FLOAT32_TOLERANCE
    out, other_out = one.out.float(), other.out.float()
    allowed = relative * other_out.abs().amax(-1, keepdim=True)
    excess = _excess(out, other_out, allowed).flatten(1).amax(1)
    if one.lse is None or other.lse is None:
        return excess
    allowed = FLOAT32_TOLERANCE * (1 + other.lse.abs())
    if any(arithmetic_of(answer.backend).sums_rounded_weights for answer in (one, other)):
        allowed += unit
    return torch.maximum(excess, _excess(one.lse, other.lse, allowed).amax(1))


def _excess(got: Tensor, other: Tensor, allowed: Tensor) -> Tensor:
    apart = torch.where(got == other, 0.0, (got - other).abs() / allowed)
    return apart.nan_to_num(nan=torch.inf, posinf=torch.inf)


def compare_with_float64(answer: Answer, step: Step) -> Comparison:
    """Compare an answer to a small step with float64; an LSE that was not asked for is right."""
    expected = expected_of(answer.backend, step)
    bound = allowed_error(step, expected, arithmetic_of(answer.backend))
    return compare(answer.with_lse(expected.lse), expected, bound)


def host_step(
    spec: AttentionSpec, rows: RowStep, q: Tensor, k_pages: Tensor, v_pages: Tensor
) -> tuple[Step, Tensor]:
    """Bring rows to the host as a step, with the pages that they use under new numbers.

    Args:
        spec: The layer kind.
        rows: Which rows.
        q: dtype[tokens, num_qo_heads, head_dim], of the whole step.
        k_pages: dtype[pages, page_size, num_kv_heads, head_dim].
        v_pages: As `k_pages`.

    Returns:
        The step, and i32[pages in use]: the number that each page had.
    """
    table = rows.page_table
    ids, renumbered = torch.unique(table.kv_indices, return_inverse=True)
    small = PageTable(table.page_size, table.kv_indptr, renumbered.int(), table.kv_lens)
    kv_cache = torch.stack([_gathered(k_pages, ids), _gathered(v_pages, ids)], dim=1)
    step = Step(spec, small, rows.qo_indptr, q[rows.rows.to(q.device)].cpu(), kv_cache)
    return step, ids


def _gathered(pages: Tensor, ids: Tensor) -> Tensor:
    parts = torch.split(ids.long().to(pages.device), PAGES_AT_ONCE)
    return torch.cat([pages[part].cpu() for part in parts])

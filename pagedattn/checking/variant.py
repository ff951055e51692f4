"""Attention as a fault would compute it, in float64, with the rounding that it may show.

A `Variant` is a step that is read wrongly on purpose. Slots that are not finite are followed: where
they would be read, the prediction is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Arithmetic, Bound, band
from pagedattn.checking.dense import MAX_SCORES, DenseBlock, masked_scores, visible_mask
from pagedattn.checking.step import Step


def right_mask(step: Step, request: int) -> Tensor:
    """bool[qo_len, kv_len]: what the queries of a request should see."""
    return visible_mask(step.spec, step.qo_lens[request], step.kv_lens[request])


def first_page_of_the_pool(step: Step, request: int) -> int:
    """The page that a table filled up with zeros names after a request's last one."""
    return 0


@dataclass(frozen=True, eq=False)
class Variant:
    """A step as a fault would compute it.

    Attributes:
        step: What is read; a fault in the table or in the spec is a fault of this step.
        mask: Of a step and a request, bool[qo_len, keys]: what its queries see. More keys than
            `kv_len` go on in its last page, and then in `page_after`.
        page_after: Of a step and a request, the page that is read after its last one.
        kv_heads_interleaved: Query head `h` reads KV head `h % num_kv_heads`.
        hidden_score: The score of a key that is not visible.
    """

    step: Step
    mask: Callable[[Step, int], Tensor] = right_mask
    page_after: Callable[[Step, int], int] = first_page_of_the_pool
    kv_heads_interleaved: bool = False
    hidden_score: float = -torch.inf


class Prediction(NamedTuple):
    """What a fault makes of a step, NaN where anything not finite may come out."""

    answer: AttentionOutput  # f64, on the CPU
    allowed: Bound


def predict(variant: Variant, arithmetic: Arithmetic, request: int | None = None) -> Prediction:
    """Compute a variant in float64, and how far rounding may take a kernel that has its fault.

    Args:
        variant: What to compute.
        arithmetic: How the backend computes.
        request: Compute the rows of this one alone; the others are left as if they saw no key.
    """
    step = variant.step
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    lse = torch.full(step.q.shape[:2], -torch.inf, dtype=torch.float64)
    allowed = Bound(torch.zeros_like(out), torch.zeros_like(lse))
    numbers = range(step.page_table.batch_size) if request is None else [request]
    for block in _blocks(variant, numbers):
        finite = block._replace(k=_finite(block.k), v=_finite(block.v))
        scores = masked_scores(step.spec, finite)
        if variant.hidden_score > -torch.inf:
            scores = scores.masked_fill(~block.visible, variant.hidden_score)
            finite = finite._replace(visible=torch.ones_like(block.visible))
        sees_key = (scores > -torch.inf).any(-1, keepdim=True)
        p = torch.softmax(scores, -1).masked_fill(~sees_key, 0)
        seen = finite.visible.double()
        bad_lse = seen @ (~block.k.isfinite()).any(-1, keepdim=True).double() > 0
        bad_out = bad_lse | (seen @ (~block.v.isfinite()).double() > 0)
        value = (p @ finite.v).masked_fill(bad_out, torch.nan)
        log_sum = torch.logsumexp(scores, -1).masked_fill(bad_lse[..., 0], torch.nan)
        out[block.rows] = value.transpose(0, 1)
        lse[block.rows] = log_sum.transpose(0, 1)
        out_band, lse_band = band(step.spec, finite, arithmetic)
        if variant.hidden_score > -torch.inf:  # the band knows other weights: rounding of these
            out_band += torch.finfo(step.spec.dtype).eps * (p @ finite.v.abs())
        allowed.out[block.rows] = out_band.transpose(0, 1)
        allowed.lse[block.rows] = lse_band.transpose(0, 1)
    return Prediction(AttentionOutput(out, lse), allowed)


def read_slots(
    step: Step, request: int, num_keys: int, page_after: int = 0
) -> tuple[Tensor, Tensor]:
    """Read K and V of the first slots of a request's pages, whether it owns them or not.

    Returns:
        f64[num_keys, num_kv_heads, head_dim] twice, on the CPU.
    """
    pages = [*step.page_table.pages_of(request).tolist(), page_after]
    key = torch.arange(num_keys)
    page = torch.tensor(pages)[key // step.page_size].to(step.kv_cache.device)
    offset = (key % step.page_size).to(step.kv_cache.device)
    k, v = (step.kv_cache[page, i, offset].double().cpu() for i in (0, 1))
    return k, v


def _blocks(variant: Variant, requests: Iterable[int]) -> Iterator[DenseBlock]:
    """Queries with all the keys that a variant reads; slots that none of them sees are zero."""
    step, spec = variant.step, variant.step.spec
    for request in requests:
        first_row = int(step.qo_indptr[request])
        visible = variant.mask(step, request)
        num_queries, num_keys = visible.shape
        if not visible.numel():
            continue
        page_after = variant.page_after(step, request)
        kv = torch.stack(read_slots(step, request, num_keys, page_after)).transpose(1, 2)
        heads = torch.arange(spec.num_qo_heads)
        kv_head = heads % spec.num_kv_heads
        if not variant.kv_heads_interleaved:
            kv_head = heads // spec.group_size
        k, v = kv[:, kv_head]
        num_rows = max(1, MAX_SCORES // (spec.num_qo_heads * num_keys))
        for begin in range(0, num_queries, num_rows):
            seen = visible[begin : begin + num_rows]
            rows = slice(first_row + begin, first_row + begin + seen.shape[0])
            q = step.q[rows].double().cpu().transpose(0, 1)
            yield DenseBlock(rows, q, k, v, seen)


def _finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=0, posinf=0, neginf=0)

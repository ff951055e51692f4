"""Attention written a second time: dense scores, a full mask, `softmax`. No code of the oracle.

Two uses: in float64 it checks the oracle; in a spec's own dtype it shows what error an honest
low-precision computation makes, which the tolerance of `bound.py` starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.step import Step
from pagedattn.spec import AttentionSpec

MAX_SCORES = 2**24
"""Scores held at once; longer requests are cut by query rows."""


class DenseBlock(NamedTuple):
    """Some query rows of one request with all its keys; KV heads repeated to query heads."""

    rows: slice  # rows of q and out
    q: Tensor  # [num_qo_heads, rows, head_dim]
    k: Tensor  # [num_qo_heads, keys, head_dim]  zero where no row of the block may look
    v: Tensor  # as k
    visible: Tensor  # bool[rows, keys]


def dense_blocks(step: Step, dtype: torch.dtype) -> Iterator[DenseBlock]:
    """Cut a step on the CPU into blocks in `dtype`. Requests without queries or keys give none."""
    flat = step.kv_cache.transpose(1, 2).flatten(0, 1)  # [slots, 2, num_kv_heads, head_dim]
    slots_of_pages = step.page_table.to_block_table(fill=0).long()[..., None] * step.page_size
    slots = (slots_of_pages + torch.arange(step.page_size)).flatten(1)
    first_row = 0
    for request, (qo_len, kv_len) in enumerate(zip(step.qo_lens, step.kv_lens, strict=True)):
        kv = flat[slots[request, :kv_len]].to(dtype).permute(1, 2, 0, 3)
        visible = visible_mask(step.spec, qo_len, kv_len)
        num_rows = max(1, MAX_SCORES // (step.spec.num_qo_heads * max(kv_len, 1)))
        for begin in range(0, qo_len if kv_len else 0, num_rows):
            seen = visible[begin : begin + num_rows]
            kept = torch.where(seen.any(0)[:, None], kv, 0)
            k, v = kept.repeat_interleave(step.spec.group_size, dim=1)
            rows = slice(first_row + begin, first_row + begin + seen.shape[0])
            yield DenseBlock(rows, step.q[rows].to(dtype).transpose(0, 1), k, v, seen)
        first_row += qo_len


def visible_mask(spec: AttentionSpec, qo_len: int, kv_len: int) -> Tensor:
    """bool[qo_len, kv_len]: the mask of one request, written out in full."""
    key = torch.arange(kv_len)
    position = torch.arange(kv_len - qo_len, kv_len)[:, None]
    visible = torch.ones(qo_len, kv_len, dtype=torch.bool)
    if spec.causal:
        visible &= key <= position
    if spec.window_left >= 0:
        visible &= position - key <= spec.window_left
    return visible


def masked_scores(spec: AttentionSpec, block: DenseBlock) -> Tensor:
    """[num_qo_heads, rows, keys]: scaled and capped scores, minus infinity where not visible."""
    scores = block.q @ block.k.transpose(-1, -2) * spec.scale
    if spec.logits_soft_cap > 0:
        scores = torch.tanh(scores / spec.logits_soft_cap) * spec.logits_soft_cap
    return scores.masked_fill(~block.visible, -torch.inf)


def dense_attention(step: Step, dtype: torch.dtype = torch.float32) -> AttentionOutput:
    """Attention of `step` with scores and sums in `dtype`.

    Args:
        step: What to compute.
        dtype: float64: nothing is rounded further. float32: the probabilities and the output are
            rounded to the spec's dtype, as a kernel on tensor cores does.

    Returns:
        dtype[tokens, num_qo_heads, head_dim] and dtype[tokens, num_qo_heads], on the CPU.
    """
    small = step.compacted()
    rounded = dtype if dtype == torch.float64 else small.spec.dtype
    out = torch.zeros(small.q.shape, dtype=dtype)
    lse = torch.full(small.q.shape[:2], -torch.inf, dtype=dtype)
    for block in dense_blocks(small, dtype):
        values, log_sums = attend_block(small.spec, block, rounded)
        out[block.rows] = values.transpose(0, 1)
        lse[block.rows] = log_sums.transpose(0, 1)
    return AttentionOutput(out, lse)


def attend_block(
    spec: AttentionSpec, block: DenseBlock, rounded: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[heads, rows, head_dim] and [heads, rows] of a block, in the block's dtype.

    Args:
        spec: Scale, mask and soft cap.
        block: Its leading dimensions may be more than heads.
        rounded: What probabilities and output are rounded to.
    """
    dtype = block.q.dtype
    scores = masked_scores(spec, block)
    # a row that sees no key has the softmax NaN
    p = torch.softmax(scores, dim=-1).masked_fill(~block.visible.any(-1, keepdim=True), 0)
    product = p.to(rounded).to(dtype) @ block.v
    return product.to(rounded).to(dtype), torch.logsumexp(scores, dim=-1)

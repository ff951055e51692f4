"""Attention that is wrong on purpose: one function for each kind of fault.

Each computes a step with its fault planted. They know nothing of `diagnose.py`, which is to name
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.backends.reference import attend_one_query, visible_range
from pagedattn.checking.step import Step, attend_with, decoy_of

right = attend_with("reference")


def with_spec(step: Step, **changes: Any) -> AttentionOutput:
    """Compute a step as if its layer kind were another one."""
    return right(replace(step, spec=replace(step.spec, **changes)))


def with_range(
    step: Step,
    change: Callable[[int, int, int], tuple[int, int]],
    extra_of: Callable[[int], int] = lambda kv_len: 0,
) -> AttentionOutput:
    """See `change(low, high, kv_len)` where the keys `[low, high)` should be seen.

    Args:
        step: What to compute.
        change: Of the keys that a query sees, and of its request's length.
        extra_of: How many slots behind `kv_len` are there to be seen: of the last page, then of
            page 0.
    """
    out = torch.zeros_like(step.q)
    lse = step.q.new_full(step.q.shape[:2], -torch.inf, dtype=torch.float32)
    bounds = step.qo_indptr.tolist()
    for request, kv_len in enumerate(step.kv_lens):
        pages = torch.cat([step.page_table.pages_of(request), torch.zeros(1, dtype=torch.int32)])
        slot = torch.arange(kv_len + extra_of(kv_len))
        k, v = step.kv_cache[pages[slot // step.page_size], :, slot % step.page_size].unbind(1)
        for row in range(*bounds[request : request + 2]):
            position = kv_len - bounds[request + 1] + row
            low, high = visible_range(step.spec, kv_len, position)
            if low < high:
                low, high = change(low, high, kv_len)
            if low < high:
                q, keys = step.q[row].double(), slice(low, high)
                out[row], lse[row] = attend_one_query(
                    step.spec, q, k[keys].double(), v[keys].double()
                )
    return AttentionOutput(out, lse)


def with_extra_slots(step: Step, extra_of: Callable[[int], int]) -> AttentionOutput:
    """Read `extra_of(kv_len)` slots past the last token as if they were keys."""

    def see_on(low: int, high: int, kv_len: int) -> tuple[int, int]:
        return low, high + extra_of(kv_len) * (high == kv_len)

    return with_range(step, see_on, extra_of)


def with_pages(step: Step, order: Tensor) -> AttentionOutput:
    """Read the entries of the page table in another order."""
    table = replace(step.page_table, kv_indices=step.page_table.kv_indices[order].contiguous())
    return right(replace(step, page_table=table))


def window_one_short(step: Step) -> AttentionOutput:
    """The window ends one key early."""
    window_left = step.spec.window_left
    return with_spec(step, window_left=window_left - 1 if window_left > 0 else window_left)


def window_one_long(step: Step) -> AttentionOutput:
    """The window ends one key late."""
    window_left = step.spec.window_left
    return with_spec(step, window_left=window_left + (window_left >= 0))


def window_ignored(step: Step) -> AttentionOutput:
    """There is no window."""
    return with_spec(step, window_left=-1)


def mask_dropped(step: Step) -> AttentionOutput:
    """There is no causal mask."""
    return with_spec(step, causal=False)


def diagonal_one_early(step: Step) -> AttentionOutput:
    """The causal diagonal is one key early: no query sees itself."""
    return with_range(step, lambda low, high, kv_len: (low, high - 1 if high > low + 1 else high))


def diagonal_one_late(step: Step) -> AttentionOutput:
    """The causal diagonal is one key late: queries see the next token."""
    return with_range(step, lambda low, high, kv_len: (low, min(high + 1, kv_len)))


def last_page_read_to_its_end(step: Step) -> AttentionOutput:
    """The unused tail of the last page is read."""
    return with_extra_slots(step, lambda kv_len: -kv_len % step.page_size)


def one_page_too_many(step: Step) -> AttentionOutput:
    """The tail of the last page is read, and a page after it."""
    return with_extra_slots(step, lambda kv_len: -kv_len % step.page_size + step.page_size)


def last_page_dropped(step: Step) -> AttentionOutput:
    """Keys of the last page are not read."""
    size = step.page_size

    def drop(low: int, high: int, kv_len: int) -> tuple[int, int]:
        return low, max(low, min(high, (kv_len - 1) // size * size)) if kv_len > size else high

    return with_range(step, drop)


def first_tile_dropped(step: Step) -> AttentionOutput:
    """A split whose piece is not merged."""
    return with_range(step, lambda low, high, _: (low + 16 if high - low > 32 else low, high))


def pages_in_reverse_order(step: Step) -> AttentionOutput:
    """The page table is read backwards."""
    return with_pages(step, _reversed(step))


def _reversed(step: Step) -> Tensor:
    return torch.arange(step.page_table.kv_indices.numel()).flip(0)


def pages_of_the_next_request(step: Step) -> AttentionOutput:
    """Page ids are off by one entry of the table."""
    return with_pages(step, torch.arange(step.page_table.kv_indices.numel()).roll(1))


def nan_of_the_tail_times_zero(step: Step) -> AttentionOutput:
    """V of unused slots enters the product with weight 0: NaN and infinity come through."""
    out, lse = right(step)
    for request, kv_len in enumerate(step.kv_lens):
        if kv_len % step.page_size:
            page = int(step.page_table.pages_of(request)[-1])
            tail = step.kv_cache[page, 1, kv_len % step.page_size :]
            begin, end = step.qo_indptr[request : request + 2].tolist()
            leak = (tail * 0).sum(0).repeat_interleave(step.spec.group_size, dim=0)
            out[begin:end] += leak
    return AttentionOutput(out, lse)


def lse_in_base_2(step: Step) -> AttentionOutput:
    """The LSE is a logarithm of base 2."""
    out, lse = right(step)
    return AttentionOutput(out, lse / math.log(2))


def lse_without_the_maximum(step: Step) -> AttentionOutput:
    """The LSE is never below 0."""
    out, lse = right(step)
    return AttentionOutput(out, lse.clamp(min=0))


def scale_of_another_head_dim(step: Step) -> AttentionOutput:
    """`sm_scale` is that of a head twice as large."""
    return with_spec(step, sm_scale=step.spec.scale * 2**-0.5)


def soft_cap_ignored(step: Step) -> AttentionOutput:
    """There is no soft cap."""
    return with_spec(step, logits_soft_cap=0.0)


def keys_and_values_swapped(step: Step) -> AttentionOutput:
    """K is read where V should be."""
    return right(replace(step, kv_cache=step.kv_cache.flip(1)))


def kv_heads_interleaved(step: Step) -> AttentionOutput:
    """Query head h reads KV head h % num_kv_heads."""
    spec = step.spec
    shape = (-1, spec.group_size, spec.num_kv_heads, spec.head_dim)
    q = step.q.view(shape).transpose(1, 2).reshape(step.q.shape)
    out, lse = right(replace(step, q=q))
    back = (-1, spec.num_kv_heads, spec.group_size)
    out = out.view(*back, spec.head_dim).transpose(1, 2).reshape(out.shape)
    return AttentionOutput(out, lse.view(back).transpose(1, 2).reshape(lse.shape))


def rows_in_reverse_order(step: Step) -> AttentionOutput:
    """Rows are written backwards."""
    out, lse = right(step)
    return AttentionOutput(out.flip(0), lse.flip(0))


def last_row_never_written(step: Step) -> AttentionOutput:
    """The last row is not written."""
    out, lse = right(step)
    out[-1:] = torch.nan
    return AttentionOutput(out, lse)


def nan_where_no_key_is_visible(step: Step) -> AttentionOutput:
    """Rows that see no key are NaN."""
    out, lse = right(step)
    out[lse == -torch.inf] = torch.nan
    return AttentionOutput(out, lse)


def mean_where_no_key_is_visible(step: Step) -> AttentionOutput:
    """Rows that see no key are not 0."""
    out, lse = right(step)
    return AttentionOutput(torch.where((lse == -torch.inf)[..., None], 1e-3, out), lse)


def finite_lse_where_no_key_is_visible(step: Step) -> AttentionOutput:
    """Rows that see no key have a finite LSE."""
    out, lse = right(step)
    return AttentionOutput(out, lse.clamp(min=-1e30))


def finite_minus_infinity(step: Step) -> AttentionOutput:
    """Scores below -5e4 never become the running maximum."""
    out, lse = right(step)
    return AttentionOutput(torch.where((lse < -5e4)[..., None], 0, out), lse)


def probabilities_in_8_bits(step: Step) -> AttentionOutput:
    """Values rounded to e5m2, as if V went through the wrong dtype."""
    rough = step.kv_cache.clamp(-5e4, 5e4).to(torch.float8_e5m2).to(step.kv_cache.dtype)
    cache = torch.stack([step.kv_cache[:, 0], rough[:, 1]], dim=1)
    return right(replace(step, kv_cache=cache))


def stale_plan(step: Step) -> AttentionOutput:
    """The step before is computed: its pages and lengths."""
    return right(replace(step, page_table=decoy_of(step.page_table)))

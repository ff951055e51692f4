"""Wrong attention is caught: each planted fault fails the draws that `pagedattn check` makes."""

import math
from dataclasses import replace

import pytest
import torch

from pagedattn import PageTable, backends
from pagedattn.attention import AttentionOutput
from pagedattn.backends import reference
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking.bound import allowed_error
from pagedattn.checking.compare import compare
from pagedattn.checking.drawing import MODES
from pagedattn.checking.step import Step, attend_with, oracle
from pagedattn.checking.tally import batch_of_seed

right = attend_with("reference")


@pytest.fixture(scope="module")
def draws():
    """What the check command draws by default, with the right answers."""
    cases = []
    for mode in MODES:
        for seed in range(10):
            step = batch_of_seed(mode, seed, torch.device("cpu")).materialise()
            expected = oracle(step)
            cases.append((step, expected, allowed_error(step, expected)))
    return cases


def with_spec(step: Step, **changes) -> AttentionOutput:
    return right(replace(step, spec=replace(step.spec, **changes)))


def with_range(step: Step, change) -> AttentionOutput:
    """The reference, seeing `change(low, high, kv_len)` where it should see `[low, high)`."""

    def wrong_range(spec, kv_len, position):
        low, high = visible_range(spec, kv_len, position)
        return change(low, high, kv_len) if low < high else (low, high)

    visible_range = reference.visible_range
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "visible_range", wrong_range)
        return right(step)


def with_extra_slots(step: Step, extra_of) -> AttentionOutput:
    """The reference, reading `extra_of(kv_len)` slots past the last token as if they were keys."""
    gather, visible_range = reference._gather, reference.visible_range

    def read_on(pages, ids, kv_len):
        return gather(pages, torch.cat([ids, ids.new_zeros(1)]), kv_len + extra_of(kv_len))

    def see_on(spec, kv_len, position):
        low, high = visible_range(spec, kv_len, position)
        return low, high + extra_of(kv_len) * (low < high == kv_len)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_gather", read_on)
        patch.setattr(reference, "visible_range", see_on)
        return right(step)


def with_pages(step: Step, order) -> AttentionOutput:
    table = replace(step.page_table, kv_indices=step.page_table.kv_indices[order].contiguous())
    return right(replace(step, page_table=table))


def window_one_short(step):
    window_left = step.spec.window_left
    return with_spec(step, window_left=window_left - 1 if window_left > 0 else window_left)


def window_one_long(step):
    window_left = step.spec.window_left
    return with_spec(step, window_left=window_left + (window_left >= 0))


def window_ignored(step):
    return with_spec(step, window_left=-1)


def mask_dropped(step):
    return with_spec(step, causal=False)


def diagonal_one_early(step):
    return with_range(step, lambda low, high, kv_len: (low, high - 1 if high > low + 1 else high))


def diagonal_one_late(step):
    return with_range(step, lambda low, high, kv_len: (low, min(high + 1, kv_len)))


def last_page_read_to_its_end(step):
    return with_extra_slots(step, lambda kv_len: -kv_len % step.page_size)


def one_page_too_many(step):
    return with_extra_slots(step, lambda kv_len: -kv_len % step.page_size + step.page_size)


def last_page_dropped(step):
    size = step.page_size

    def drop(low, high, kv_len):
        return low, max(low, min(high, (kv_len - 1) // size * size)) if kv_len > size else high

    return with_range(step, drop)


def first_tile_dropped(step):
    """A split whose piece is not merged."""
    return with_range(step, lambda low, high, _: (low + 16 if high - low > 32 else low, high))


def pages_in_reverse_order(step):
    return with_pages(step, slice(None)) if not step.kv_lens else with_pages(step, reverse(step))


def reverse(step):
    return torch.arange(step.page_table.kv_indices.numel()).flip(0)


def pages_of_the_next_request(step):
    return with_pages(step, torch.arange(step.page_table.kv_indices.numel()).roll(1))


def nan_of_the_tail_times_zero(step):
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


def lse_in_base_2(step):
    out, lse = right(step)
    return AttentionOutput(out, lse / math.log(2))


def lse_without_the_maximum(step):
    out, lse = right(step)
    return AttentionOutput(out, lse.clamp(min=0))


def scale_of_another_head_dim(step):
    return with_spec(step, sm_scale=step.spec.scale * 2**-0.5)


def soft_cap_ignored(step):
    return with_spec(step, logits_soft_cap=0.0)


def keys_and_values_swapped(step):
    return right(replace(step, kv_cache=step.kv_cache.flip(1)))


def kv_heads_interleaved(step):
    """Query head h reads KV head h % num_kv_heads."""
    spec = step.spec
    shape = (-1, spec.group_size, spec.num_kv_heads, spec.head_dim)
    q = step.q.view(shape).transpose(1, 2).reshape(step.q.shape)
    out, lse = right(replace(step, q=q))
    back = (-1, spec.num_kv_heads, spec.group_size)
    out = out.view(*back, spec.head_dim).transpose(1, 2).reshape(out.shape)
    return AttentionOutput(out, lse.view(back).transpose(1, 2).reshape(lse.shape))


def rows_in_reverse_order(step):
    out, lse = right(step)
    return AttentionOutput(out.flip(0), lse.flip(0))


def last_row_never_written(step):
    out, lse = right(step)
    out[-1:] = torch.nan
    return AttentionOutput(out, lse)


def nan_where_no_key_is_visible(step):
    out, lse = right(step)
    out[lse == -torch.inf] = torch.nan
    return AttentionOutput(out, lse)


def mean_where_no_key_is_visible(step):
    out, lse = right(step)
    return AttentionOutput(torch.where((lse == -torch.inf)[..., None], 1e-3, out), lse)


def finite_lse_where_no_key_is_visible(step):
    out, lse = right(step)
    return AttentionOutput(out, lse.clamp(min=-1e30))


def finite_minus_infinity(step):
    """Scores below -5e4 never become the running maximum."""
    out, lse = right(step)
    return AttentionOutput(torch.where((lse < -5e4)[..., None], 0, out), lse)


def probabilities_in_8_bits(step):
    """Values rounded to e5m2, as if V went through the wrong dtype."""
    rough = step.kv_cache.clamp(-5e4, 5e4).to(torch.float8_e5m2).to(step.kv_cache.dtype)
    cache = torch.stack([step.kv_cache[:, 0], rough[:, 1]], dim=1)
    return right(replace(step, kv_cache=cache))


FAULTS = [
    window_one_short,
    window_one_long,
    window_ignored,
    mask_dropped,
    diagonal_one_early,
    diagonal_one_late,
    last_page_read_to_its_end,
    one_page_too_many,
    last_page_dropped,
    first_tile_dropped,
    pages_in_reverse_order,
    pages_of_the_next_request,
    nan_of_the_tail_times_zero,
    lse_in_base_2,
    lse_without_the_maximum,
    scale_of_another_head_dim,
    soft_cap_ignored,
    keys_and_values_swapped,
    kv_heads_interleaved,
    rows_in_reverse_order,
    last_row_never_written,
    nan_where_no_key_is_visible,
    mean_where_no_key_is_visible,
    finite_lse_where_no_key_is_visible,
    finite_minus_infinity,
    probabilities_in_8_bits,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(draws, fault):
    assert any(not compare(fault(step), *answer).ok for step, *answer in draws)


def test_the_right_answer_passes_every_draw(draws):
    assert all(compare(right(step), *answer).ok for step, *answer in draws)


class StalePlan(ReferenceBackend):
    """Keeps its first plan for ever."""

    def plan(self, page_table: PageTable, qo_indptr: torch.Tensor) -> None:
        if not hasattr(self, "kv_lens"):
            super().plan(page_table, qo_indptr)


class StalePages(ReferenceBackend):
    """Takes new lengths and keeps its first pages."""

    def plan(self, page_table: PageTable, qo_indptr: torch.Tensor) -> None:
        first = getattr(self, "pages", None)
        super().plan(page_table, qo_indptr)
        if first is not None and [len(p) for p in first] == [len(p) for p in self.pages]:
            self.pages = first


@pytest.mark.parametrize("fault", [StalePlan, StalePages])
def test_a_stale_plan_is_caught(draws, fault, monkeypatch):
    entry = backends._Entry(f"{__name__}.{fault.__name__}", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "stale", entry)
    attend = attend_with("stale")
    assert any(not compare(attend(step), *answer).ok for step, *answer in draws)

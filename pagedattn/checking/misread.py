"""Hypotheses about what was read: the wrong keys, the wrong pages, the wrong scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2

import torch
from torch import Tensor

from pagedattn.checking.case import Candidate, Case
from pagedattn.checking.dense import visible_mask
from pagedattn.checking.step import Step
from pagedattn.checking.variant import Variant, right_mask


def wrong_mask(case: Case) -> Iterator[Candidate]:
    """The window and the causal mask: absent, or off by one."""
    step, spec = case.step, case.step.spec
    if spec.window_left > 0:
        shorter = replace(spec, window_left=spec.window_left - 1)
        yield Candidate("window one key short", "", Variant(replace(step, spec=shorter)))
    if spec.window_left >= 0:
        longer = replace(spec, window_left=spec.window_left + 1)
        yield Candidate("window one key long", "", Variant(replace(step, spec=longer)))
        without = replace(spec, window_left=-1)
        yield Candidate("window ignored", "", Variant(replace(step, spec=without)))
    early = "diagonal one key early"
    yield Candidate(early, "", Variant(step, _without_last_key))
    if spec.causal:
        without = replace(spec, causal=False)
        yield Candidate("causal mask ignored", "", Variant(replace(step, spec=without)))
        late = "diagonal one key late"
        yield Candidate(late, "", Variant(step, _one_key_late))
        yield Candidate(late, "in rows that see a key", Variant(step, _one_key_late_if_any))
    spared = "not in rows that see one key"
    yield Candidate(early, spared, Variant(step, _without_last_key_of_several))


def wrong_length(case: Case) -> Iterator[Candidate]:
    """Unused slots are read, or the last page is not."""
    step, size = case.step, case.step.page_size
    tail = Variant(step, lambda step, r: _read_on(step, r, -step.kv_lens[r] % size))
    yield Candidate("last page read to its end", "", tail)

    def page_more(step: Step, request: int) -> Tensor:
        return _read_on(step, request, -step.kv_lens[request] % size + size)

    too_many = "one page too many"
    yield Candidate(too_many, "page 0 after the last one", Variant(step, page_more))
    following = Variant(step, page_more, page_after=_page_of_the_next_request)
    yield Candidate(too_many, "the next entry of kv_indices", following)
    dropped = "last page dropped"
    several = "in requests of several pages"
    yield Candidate(dropped, several, Variant(step, lambda s, r: _without_last_page(s, r, 1)))
    yield Candidate(dropped, "", Variant(step, lambda s, r: _without_last_page(s, r, 0)))


def wrong_pages(case: Case) -> Iterator[Candidate]:
    """The page table is read in another order, or the cache in another layout."""
    step, table = case.step, case.step.page_table
    ids, bounds = table.kv_indices, table.kv_indptr.tolist()
    requests = range(table.batch_size)
    orders = [
        ("pages in reverse order", "kv_indices as a whole", ids.flip(0)),
        (
            "pages in reverse order",
            "within each request",
            torch.cat([ids[:0], *(table.pages_of(r).flip(0) for r in requests)]),
        ),
        ("pages of another request", "kv_indices read one entry early", ids.roll(1)),
        ("pages of another request", "kv_indices read one entry late", ids.roll(-1)),
    ]
    wrongs = {case.request_of(row) for row in case.wrong_rows.tolist()}
    for wrong in sorted(wrongs):
        for other in requests:
            count = min(len(table.pages_of(wrong)), len(table.pages_of(other)))
            if count == 0 or other == wrong or (other in wrongs and other < wrong):
                continue
            swapped = ids.clone()
            swapped[bounds[wrong] : bounds[wrong] + count] = table.pages_of(other)[:count]
            swapped[bounds[other] : bounds[other] + count] = table.pages_of(wrong)[:count]
            detail = f"requests {wrong} and {other} swapped"
            orders.append(("pages of another request", detail, swapped))
    for name, detail, order in orders:
        if not torch.equal(order, ids):
            moved = replace(step, page_table=replace(table, kv_indices=order.contiguous()))
            yield Candidate(name, detail, Variant(moved))


def wrong_layout(case: Case) -> Iterator[Candidate]:
    """K and V, heads, or the stride of a page are taken for something else."""
    step, spec, cache = case.step, case.step.spec, case.step.kv_cache
    swapped = Variant(replace(step, kv_cache=cache.flip(1)))
    yield Candidate("keys and values swapped", "", swapped)
    if 1 < spec.num_kv_heads < spec.num_qo_heads:
        interleaved = Variant(step, kv_heads_interleaved=True)
        yield Candidate("query heads of another KV head", "h % num_kv_heads", interleaved)
    if step.page_size > 1 and spec.num_kv_heads > 1:
        shape = (*cache.shape[:2], spec.num_kv_heads, step.page_size, spec.head_dim)
        turned = cache.contiguous().view(shape).transpose(2, 3)
        name = "pages read as [num_kv_heads, page_size, head_dim]"
        yield Candidate(name, "", Variant(replace(step, kv_cache=turned)))
    halves = cache.flatten(0, 1)[: cache.shape[0] + 1]
    strided = torch.stack([halves[:-1], halves[1:]], dim=1)
    yield Candidate(
        "page stride wrong", "half of what it is", Variant(replace(step, kv_cache=strided))
    )


def wrong_scores(case: Case) -> Iterator[Candidate]:
    """The soft cap is absent or comes after the mask; the scale is another usual one."""
    step, spec = case.step, case.step.spec
    cap = spec.logits_soft_cap
    if cap > 0:
        uncapped = replace(spec, logits_soft_cap=0.0)
        yield Candidate("soft cap ignored", "", Variant(replace(step, spec=uncapped)))
        yield Candidate("soft cap after the mask", "", Variant(step, hidden_score=-cap))
    factors = {
        "sm_scale ignored": 1 / spec.scale,
        "sm_scale applied twice": spec.scale,
        "head_dim ** -0.5 in the place of sm_scale": spec.head_dim**-0.5 / spec.scale,
        "sm_scale without log2(e)": log2(torch.e) ** -1,
        "sm_scale with log2(e) twice": log2(torch.e),
        "head_dim twice as large": 2**-0.5,
        "head_dim half as large": 2**0.5,
    }
    for detail, factor in factors.items():
        if factor != 1:
            yield scaled(step, factor, f"{detail}, {factor:.6g} times as large")


def stale_plan(case: Case) -> Iterator[Candidate]:
    """The plan of an earlier step is still in force, all of it or its pages alone."""
    step, num_pages = case.step, case.step.kv_cache.shape[0]
    for number, earlier in enumerate(case.earlier):
        table = earlier.page_table
        if table.page_size != step.page_size or bool((table.kv_indices >= num_pages).any()):
            continue
        which = f"of earlier step {number}"
        if int(earlier.qo_indptr[-1]) == step.q.shape[0]:
            stale = replace(step, page_table=table, qo_indptr=earlier.qo_indptr)
            yield Candidate("stale plan", which, Variant(stale))
            if earlier.q.shape == step.q.shape and earlier.spec == step.spec:
                yield Candidate("stale plan", f"the whole answer {which}", Variant(earlier))
        if torch.equal(table.kv_indptr, step.page_table.kv_indptr):
            pages = replace(step.page_table, kv_indices=table.kv_indices)
            stale = replace(step, page_table=pages)
            yield Candidate("stale plan", f"the pages {which}", Variant(stale))


def scaled(step: Step, factor: float, detail: str) -> Candidate:
    """The candidate of a scale that is `factor` times the right one."""
    spec = replace(step.spec, sm_scale=step.spec.scale * factor)
    return Candidate("sm_scale wrong", detail, Variant(replace(step, spec=spec)))


def ranked(step: Step, keep: Callable[[Tensor, Tensor], Tensor]) -> Variant:
    """A variant that sees of each row's visible keys those that `keep` says.

    Args:
        step: What is read.
        keep: Of i64[rows, keys] twice, the place of each visible key among its row's, counted from
            0 from the left and from the right.
    """

    def mask(step: Step, request: int) -> Tensor:
        visible = right_mask(step, request)
        from_left = visible.cumsum(1) - 1
        from_right = visible.sum(1, keepdim=True) - 1 - from_left
        return visible & keep(from_left, from_right)

    return Variant(step, mask)


def _without_last_key(step: Step, request: int) -> Tensor:
    mask = right_mask(step, request)
    return mask & (mask.flip(1).cumsum(1).flip(1) > 1)


def _without_last_key_of_several(step: Step, request: int) -> Tensor:
    mask = right_mask(step, request)
    return torch.where(mask.sum(1, keepdim=True) > 1, _without_last_key(step, request), mask)


def _one_key_late(step: Step, request: int) -> Tensor:
    qo_len, kv_len = step.qo_lens[request], step.kv_lens[request]
    left = visible_mask(replace(step.spec, causal=False), qo_len, kv_len)
    return left & (torch.arange(kv_len) <= torch.arange(kv_len - qo_len, kv_len)[:, None] + 1)


def _one_key_late_if_any(step: Step, request: int) -> Tensor:
    return _one_key_late(step, request) & right_mask(step, request).any(1, keepdim=True)


def _read_on(step: Step, request: int, num_keys: int) -> Tensor:
    """The right mask, with further keys for the rows that see the last key."""
    mask = right_mask(step, request)
    if not mask.numel():
        return mask
    return torch.cat([mask, mask[:, -1:].expand(-1, num_keys)], dim=1)


def _page_of_the_next_request(step: Step, request: int) -> int:
    following = step.page_table.kv_indices[int(step.page_table.kv_indptr[request + 1]) :]
    return int(following[0]) if len(following) else 0


def _without_last_page(step: Step, request: int, fewest_pages: int) -> Tensor:
    mask = right_mask(step, request)
    num_full = max(0, step.kv_lens[request] - 1) // step.page_size
    if num_full < fewest_pages:
        return mask
    return mask & (torch.arange(mask.shape[1]) < num_full * step.page_size)

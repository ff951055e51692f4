"""The same attention asked in another way: transformed steps whose answers are related.

Each function takes a step and returns one whose answer follows from the first one's; the docstring
says how. Pages are copied, so the steps share no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pagedattn.checking.step import Step
from pagedattn.page_table import PageTable


def rename_pages(step: Step, new_ids: Sequence[int], num_pages: int) -> Step:
    """Move page `i` to page `new_ids[i]` of a pool of `num_pages`: the answer is the same.

    Pages of the new pool that nothing moves to are NaN.
    """
    ids = torch.tensor(new_ids)
    kv_cache = step.kv_cache.new_full((num_pages, *step.kv_cache.shape[1:]), torch.nan)
    kv_cache[ids.to(kv_cache.device)] = step.kv_cache
    table = step.page_table
    renamed = replace(table, kv_indices=ids[table.kv_indices.long()].int())
    return replace(step, page_table=renamed, kv_cache=kv_cache)


def select_requests(step: Step, requests: Sequence[int]) -> Step:
    """Keep these requests, in this order: their rows of the answer, in this order."""
    rows = rows_of(step, requests)
    pages = [page for r in requests for page in step.page_table.pages_of(r).tolist()]
    table = PageTable.from_lengths([step.kv_lens[r] for r in requests], step.page_size, pages)
    qo_indptr = _indptr([step.qo_lens[r] for r in requests])
    return replace(step, page_table=table, qo_indptr=qo_indptr, q=step.q[rows.to(step.q.device)])


def rows_of(step: Step, requests: Sequence[int]) -> Tensor:
    """i64[rows]: the rows of `q` that belong to these requests, one after the other."""
    bounds = step.qo_indptr.tolist()
    return torch.cat([torch.arange(0), *(torch.arange(*bounds[r : r + 2]) for r in requests)])


def last_queries(step: Step, num_queries: int) -> Step:
    """Keep the last queries of each request: the last rows of its answer."""
    qo_lens = [min(qo_len, num_queries) for qo_len in step.qo_lens]
    return replace(step, qo_indptr=_indptr(qo_lens), q=step.q[last_rows(step, num_queries)])


def last_rows(step: Step, num_queries: int) -> Tensor:
    """i64[rows], on the step's device: the rows that `last_queries` keeps."""
    bounds = step.qo_indptr.tolist()
    ends = pairwise(bounds)
    rows = [torch.arange(max(begin, end - num_queries), end) for begin, end in ends]
    return torch.cat([torch.arange(0), *rows]).to(step.q.device)


def repack(step: Step, page_size: int) -> Step:
    """Lay the same keys and values out in pages of another size: the answer is the same.

    No page is shared, and unused slots are NaN.
    """
    table = PageTable.from_lengths(step.kv_lens, page_size)
    num_slots = max(1, table.kv_indices.numel()) * page_size
    _, _, _, *head_shape = step.kv_cache.shape
    slots = step.kv_cache.new_full((num_slots, 2, *head_shape), torch.nan)
    old_slots = step.kv_cache.transpose(1, 2).flatten(0, 1)
    for request, kv_len in enumerate(step.kv_lens):
        old = _slots(step.page_table, request, kv_len).to(slots.device)
        slots[_slots(table, request, kv_len).to(slots.device)] = old_slots[old]
    kv_cache = slots.view(-1, page_size, 2, *head_shape).transpose(1, 2).contiguous()
    return replace(step, page_table=table, kv_cache=kv_cache)


def split_keys(step: Step, num_pages: Sequence[int]) -> tuple[Step, Step]:
    """Cut each request's keys after `num_pages[request]` pages, for all of its queries.

    The two answers, merged by their LSE, are the answer. Every query must see the whole first part,
    and the step has no window.

    Raises:
        ValueError: There is a window, or a first part reaches past a request's first query.
    """
    if step.spec.window_left >= 0:
        raise ValueError(f"keys under a window cannot be split, got {step.spec.window_left=}")
    first_pages, rest_pages, first_lens, rest_lens = [], [], [], []
    for request, (kv_len, qo_len) in enumerate(zip(step.kv_lens, step.qo_lens, strict=True)):
        first_len = min(num_pages[request] * step.page_size, kv_len)
        if step.spec.causal and first_len > max(0, kv_len - qo_len + 1):
            raise ValueError(
                f"request {request}: the first {first_len} of {kv_len} keys are not all visible to "
                f"the first of {qo_len} queries"
            )
        pages = step.page_table.pages_of(request).tolist()
        first_pages += pages[: num_pages[request]]
        rest_pages += pages[num_pages[request] :]
        first_lens.append(first_len)
        rest_lens.append(kv_len - first_len)
    first = PageTable.from_lengths(first_lens, step.page_size, first_pages)
    rest = PageTable.from_lengths(rest_lens, step.page_size, rest_pages)
    return (
        replace(step, spec=replace(step.spec, causal=False), page_table=first),
        replace(step, page_table=rest),
    )


def _indptr(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def _slots(table: PageTable, request: int, kv_len: int) -> Tensor:
    """i64[kv_len]: the flat slots of a request's tokens."""
    pages = table.pages_of(request).long()
    return (pages[:, None] * table.page_size + torch.arange(table.page_size)).flatten()[:kv_len]

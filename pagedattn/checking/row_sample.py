"""A few query rows of a step as a small step of their own, with the same answers.

A row keeps its pages and its position among its keys, so nothing that it may see changes. All of it
is decided on the host, from the tables that planning has there: no GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class SampledRow:
    """One query row of a step, and what its request looks like when it ends there."""

    row: int  # of q and out
    request: int
    query: int  # of the request
    kv_len: int  # keys of the request, without those that come after all that the row sees
    num_after: int  # queries of the request that must come along: `kv_len` counts them
    pages: Tensor  # i32[ceil(kv_len / page_size)]  a copy


@dataclass(frozen=True, eq=False)
class RowStep:
    """Rows as a step, on the host; each sampled row is a request."""

    page_table: PageTable
    qo_indptr: Tensor  # i32[requests + 1]
    rows: Tensor  # i64[queries]  which row of the whole step each query is


def draw_rows(
    spec: AttentionSpec, page_table: PageTable, qo_indptr: Tensor, num_rows: int, random: Random
) -> list[SampledRow]:
    """Draw up to `num_rows` rows: as many requests as possible, then rows of each.

    By request first, since one long prompt has more rows than all requests that decode.

    Args:
        spec: The layer kind.
        page_table: The step's table, on the host.
        qo_indptr: i32[batch + 1], where each request's queries begin, on the host.
        num_rows: How many to draw, at least 1.
        random: Where chance comes from.
    """
    bounds = list(pairwise(qo_indptr.tolist()))
    asking = [request for request, (begin, end) in enumerate(bounds) if end > begin]
    chosen = random.sample(asking, min(num_rows, len(asking)))
    drawn = []
    for place, request in enumerate(chosen):
        begin, end = bounds[request]
        share = (num_rows + place) // len(chosen)  # these sum to num_rows
        queries = random.sample(range(end - begin), min(share, end - begin))
        for query in sorted(queries):
            drawn.append(_row(spec, page_table, (begin, end), request, query))
    return drawn


def _row(
    spec: AttentionSpec, table: PageTable, bounds: tuple[int, int], request: int, query: int
) -> SampledRow:
    begin, end = bounds
    kv_len, num_after = int(table.kv_lens[request]), 0
    if spec.causal:
        kv_len = max(0, kv_len - (end - begin) + query + 1)
    elif spec.window_left >= 0:  # the window hangs on the position, which counts from the end
        num_after = end - begin - 1 - query
    num_pages = -(-kv_len // table.page_size)
    pages = table.pages_of(request)[:num_pages].clone()
    return SampledRow(begin + query, request, query, kv_len, num_after, pages)


def step_of_rows(rows: Sequence[SampledRow], page_size: int, max_before: int = 0) -> RowStep:
    """Make a step of sampled rows, at least one.

    Args:
        rows: Of one step.
        page_size: Tokens in one page.
        max_before: So many queries of the same request, at most, come before each row.
    """
    ends: list[int] = []
    numbers: list[int] = []
    for row in rows:
        first = row.row - min(row.query, max_before)
        numbers += range(first, row.row + row.num_after + 1)
        ends.append(len(numbers))
    table = PageTable.from_lengths(
        [row.kv_len for row in rows], page_size, torch.cat([row.pages for row in rows])
    )
    qo_indptr = torch.tensor([0, *ends], dtype=torch.int32)
    return RowStep(table, qo_indptr, torch.tensor(numbers))

"""A step's index arrays as FlashInfer takes them: checked, on the host, padded to a capacity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.page_table import PageTable, write_slots
from pagedattn.validation import check_index_tensor, check_indptr, check_page_table


@dataclass(frozen=True, eq=False)
class HostStep:
    """What one plan needs, on the host."""

    table: PageTable
    qo_indptr: Tensor  # i32[batch + 1]
    num_pages: int  # pages that a cache must have

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.table.batch_size

    @property
    def num_tokens(self) -> int:
        """Query tokens over all requests."""
        return int(self.qo_indptr[-1])


def read_step(
    qo_indptr: Tensor | None,
    paged_kv_indptr: Tensor,
    paged_kv_indices: Tensor,
    paged_kv_last_page_len: Tensor,
    page_size: int,
    kv_lens: Tensor | None = None,
) -> HostStep:
    """Check FlashInfer's index arrays and bring them to the host.

    Args:
        qo_indptr: i32[batch + 1], where each request's query tokens begin; `None`: one token each.
        paged_kv_indptr: i32[batch + 1], where each request's pages begin.
        paged_kv_indices: i32[paged_kv_indptr[-1]], page ids.
        paged_kv_last_page_len: i32[batch], 1 to `page_size`, and 0 where a request has no page.
        page_size: Tokens in one page.
        kv_lens: i32[batch], tokens of each request; must agree with the others.

    Raises:
        ValueError: An array is malformed; the message names it.
    """
    last_page_len = paged_kv_last_page_len.to("cpu")
    check_index_tensor(last_page_len, "paged_kv_last_page_len")
    batch_size = last_page_len.shape[0]
    indptr = paged_kv_indptr.to("cpu")
    check_indptr(indptr, "paged_kv_indptr", batch_size)
    indices = paged_kv_indices.to("cpu")
    check_index_tensor(indices, "paged_kv_indices", int(indptr[-1]))
    table = PageTable.from_csr(indptr, indices, last_page_len, page_size)
    if kv_lens is not None:
        lens = kv_lens.to("cpu")
        check_index_tensor(lens, "kv_lens", batch_size)
        if not torch.equal(lens, table.kv_lens):
            row = int((lens != table.kv_lens).nonzero()[0, 0])
            raise ValueError(
                f"kv_lens[{row}] is {int(lens[row])}, but the page table holds "
                f"{int(table.kv_lens[row])} tokens"
            )
    if qo_indptr is None:
        qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32)
    else:
        qo_indptr = qo_indptr.to("cpu")
        check_indptr(qo_indptr, "qo_indptr", batch_size)
    return HostStep(table, qo_indptr, check_page_table(table, page_size))


def pad_step(step: HostStep, batch_size: int, num_tokens: int, sink_page: int | None) -> HostStep:
    """Add requests without tokens, and a last one that takes the tokens that are left.

    Args:
        step: At most `batch_size - 1` requests and `num_tokens` tokens.
        batch_size: Requests of the result.
        num_tokens: Tokens of the result.
        sink_page: The page whose first token the last request reads; `None`: it has no key.
    """
    table = step.table
    num_added = batch_size - step.batch_size
    sink = [] if sink_page is None else [sink_page]
    num_indices = table.kv_indices.shape[0]
    qo_ends = torch.full((num_added,), step.num_tokens, dtype=torch.int32)
    qo_ends[-1] = num_tokens
    kv_ends = torch.full((num_added,), num_indices, dtype=torch.int32)
    kv_ends[-1] = num_indices + len(sink)
    lens = torch.zeros(num_added, dtype=torch.int32)
    lens[-1] = len(sink)
    padded = PageTable(
        table.page_size,
        torch.cat([table.kv_indptr, kv_ends]),
        torch.cat([table.kv_indices, torch.tensor(sink, dtype=torch.int32)]),
        torch.cat([table.kv_lens, lens]),
    )
    num_pages = max(step.num_pages, *(page + 1 for page in sink), 0)
    return HostStep(padded, torch.cat([step.qo_indptr, qo_ends]), num_pages)


def pad_decode_step(step: HostStep, batch_size: int, sink_page: int | None) -> HostStep:
    """Add requests of one token that read the first token of the sink page, or no key at all."""
    table = step.table
    num_added = batch_size - step.batch_size
    keys = 0 if sink_page is None else 1
    ends = torch.arange(1, num_added + 1, dtype=torch.int32)
    padded = PageTable(
        table.page_size,
        torch.cat([table.kv_indptr, table.kv_indptr[-1] + keys * ends]),
        torch.cat(
            [table.kv_indices, torch.full((keys * num_added,), sink_page or 0, dtype=torch.int32)]
        ),
        torch.cat([table.kv_lens, torch.full((num_added,), keys, dtype=torch.int32)]),
    )
    num_pages = max(step.num_pages, 0 if sink_page is None or not num_added else sink_page + 1)
    return HostStep(padded, torch.cat([step.qo_indptr, step.qo_indptr[-1] + ends]), num_pages)


NO_SLOTS = [torch.empty(0, dtype=torch.int64)] * 3
"""In place of `token_slots`, where somebody else says where new tokens belong."""


def token_slots(step: HostStep, num_tokens: int, sink_page: int | None) -> list[Tensor]:
    """Where each query token's key and value belong.

    Args:
        step: The step, without padding.
        num_tokens: Tokens with padding.
        sink_page: Where padding may be written.

    Returns:
        i64[tokens] slots as of `pagedattn.page_table.write_slots`, i64[tokens] pages, and
        i64[tokens] places inside the page. Padding, and a token that has no place (more queries
        than keys), have slot -1; their page and place are the first of the sink page, or -1.
    """
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    slots[: step.num_tokens] = write_slots(step.table, step.qo_indptr)
    page_size = step.table.page_size
    has_place = slots >= 0
    page = torch.where(has_place, slots // page_size, -1 if sink_page is None else sink_page)
    place = torch.where(has_place, slots % page_size, -1 if sink_page is None else 0)
    return [slots, page, place]


def rows_without_keys(step: HostStep) -> Tensor:
    """bool[tokens]: the queries that a causal mask leaves without a key."""
    qo_lens = step.qo_indptr.diff()
    num_tokens = step.num_tokens
    request = torch.repeat_interleave(qo_lens, output_size=num_tokens)
    first = step.table.kv_lens - qo_lens - step.qo_indptr[:-1]
    return first[request] + torch.arange(num_tokens) < 0

"""A step's index arrays as FlashInfer takes them: checked, on the host, padded to a capacity.

In numpy: on arrays this small a torch operation costs five times as much, and a plan does many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.page_table import PageTable, slots_of_arrays
from pagedattn.validation import check_index_tensor, check_indptr, lens_of_last_pages

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class HostStep:
    """What one plan needs, on the host."""

    page_size: int
    qo_indptr: Ints  # i32[batch + 1]
    kv_indptr: Ints  # i32[batch + 1]
    kv_indices: Ints  # i32[kv_indptr[-1]]
    kv_lens: Ints  # i32[batch]
    last_page_len: Ints  # i32[batch]  tokens in each last page, 0 where there is none
    num_pages: int  # pages that a cache must have

    @classmethod
    def of_table(cls, table: PageTable, qo_indptr: Tensor) -> HostStep:
        """A step from a table that has been checked, on the host."""
        ids, indptr, lens = (x.numpy() for x in (table.kv_indices, table.kv_indptr, table.kv_lens))
        full_pages = np.maximum(indptr[1:] - indptr[:-1] - 1, 0)
        last_page_len = lens - full_pages * table.page_size
        num_pages = int(ids.max(initial=-1)) + 1
        return cls(table.page_size, qo_indptr.numpy(), indptr, ids, lens, last_page_len, num_pages)

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens over all requests."""
        return int(self.qo_indptr[-1])

    @property
    def qo_lens(self) -> Ints:
        """i32[batch]: query tokens of each request."""
        return self.qo_indptr[1:] - self.qo_indptr[:-1]

    def rows(self, chosen: NDArray[np.bool_]) -> HostStep:
        """The chosen requests alone, in order, with one token each."""
        num_pages = self.kv_indptr[1:] - self.kv_indptr[:-1]
        kv_indptr = _indptr_of(num_pages[chosen])
        return HostStep(
            self.page_size,
            np.arange(len(kv_indptr), dtype=np.int32),
            kv_indptr,
            self.kv_indices[np.repeat(chosen, num_pages)],
            self.kv_lens[chosen],
            self.last_page_len[chosen],
            self.num_pages,
        )


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
    last_page_len, indptr = paged_kv_last_page_len.to("cpu"), paged_kv_indptr.to("cpu")
    check_index_tensor(last_page_len, "paged_kv_last_page_len")
    batch_size = last_page_len.shape[0]
    check_indptr(indptr, "paged_kv_indptr", batch_size)
    indices = paged_kv_indices.to("cpu")
    check_index_tensor(indices, "paged_kv_indices", int(indptr.numpy()[-1]))
    lens = lens_of_last_pages(last_page_len, "paged_kv_last_page_len", indptr, page_size)
    if kv_lens is not None:
        _check_agrees(kv_lens.to("cpu"), lens)
    if qo_indptr is None:
        queries = np.arange(batch_size + 1, dtype=np.int32)
    else:
        qo_indptr = qo_indptr.to("cpu")
        check_indptr(qo_indptr, "qo_indptr", batch_size)
        queries = qo_indptr.numpy()
    ids = indices.numpy()
    highest = int(ids.view(np.uint32).max()) if len(ids) else -1
    if highest >= 1 << 31:  # as a negative id looks then
        raise ValueError(f"paged_kv_indices must not be negative, got page id {ids.min()}")
    last = last_page_len.numpy()
    return HostStep(page_size, queries, indptr.numpy(), ids, lens, last, highest + 1)


def pad_step(step: HostStep, batch_size: int, num_tokens: int) -> HostStep:
    """Add requests without keys; the last one takes the tokens that are left.

    Args:
        step: At most `batch_size - 1` requests and `num_tokens` tokens.
        batch_size: Requests of the result.
        num_tokens: Tokens of the result.
    """
    num_added = batch_size - step.batch_size
    qo_ends = np.full(num_added, step.num_tokens, dtype=np.int32)
    qo_ends[-1] = num_tokens
    kv_ends = np.full(num_added, len(step.kv_indices), dtype=np.int32)
    no_keys = np.zeros(num_added, dtype=np.int32)
    return _append(step, qo_ends, kv_ends, no_keys[:0], no_keys)


def pad_decode_step(step: HostStep, batch_size: int, sink_page: int | None) -> HostStep:
    """Add requests of one token that read the first token of the sink page, or no key at all."""
    keys = 0 if sink_page is None else 1
    ends = np.arange(1, batch_size - step.batch_size + 1, dtype=np.int32)
    ids = np.full(keys * len(ends), sink_page or 0, dtype=np.int32)
    lens = np.full(len(ends), keys, dtype=np.int32)
    return _append(step, step.num_tokens + ends, len(step.kv_indices) + keys * ends, ids, lens)


NO_SLOTS = [np.empty(0, dtype=np.int64)] * 3
"""In place of `token_slots`, where somebody else says where new tokens belong."""


def token_slots(step: HostStep, num_tokens: int, sink_page: int | None) -> list[NDArray[np.int64]]:
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
    arrays = (step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_lens)
    slots = slots_of_arrays(*arrays, step.page_size)
    if len(slots) < num_tokens:
        padding = np.full(num_tokens - len(slots), -1, dtype=np.int64)
        slots = np.concatenate([slots, padding])
    page = slots // step.page_size
    place = slots - page * step.page_size
    has_no_place = slots < 0
    if has_no_place.any():
        page[has_no_place] = -1 if sink_page is None else sink_page
        place[has_no_place] = -1 if sink_page is None else 0
    return [slots, page, place]


def separate_rows_without_keys(step: HostStep, min_keys: int = 1) -> HostStep:
    """Make the queries that a causal mask leaves without a key requests of their own, without keys.

    FlashInfer's kernels are wrong where such queries share a request with others: see `defects.py`.

    Args:
        step: The step.
        min_keys: Requests with fewer keys stay as they are.
    """
    shared = np.flatnonzero((step.qo_lens > step.kv_lens) & (step.kv_lens >= min_keys))
    if not len(shared):
        return step
    first_with_key = step.qo_indptr[shared + 1] - step.kv_lens[shared]
    return replace(
        step,
        qo_indptr=np.insert(step.qo_indptr, shared + 1, first_with_key),
        kv_indptr=np.insert(step.kv_indptr, shared + 1, step.kv_indptr[shared]),
        kv_lens=np.insert(step.kv_lens, shared, 0),
        last_page_len=np.insert(step.last_page_len, shared, 0),
    )


def _append(step: HostStep, qo_ends: Ints, kv_ends: Ints, ids: Ints, lens: Ints) -> HostStep:
    """Add requests, given where their tokens and pages end."""
    return HostStep(
        step.page_size,
        np.concatenate([step.qo_indptr, qo_ends], dtype=np.int32),
        np.concatenate([step.kv_indptr, kv_ends], dtype=np.int32),
        np.concatenate([step.kv_indices, ids], dtype=np.int32),
        np.concatenate([step.kv_lens, lens], dtype=np.int32),
        np.concatenate([step.last_page_len, lens], dtype=np.int32),  # 1 or no token, 1 or 0 there
        max(step.num_pages, int(ids.max(initial=-1)) + 1),
    )


def _indptr_of(lens: Ints) -> Ints:
    indptr = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=indptr[1:])
    return indptr


def _check_agrees(kv_lens: Tensor, lens: Ints) -> None:
    check_index_tensor(kv_lens, "kv_lens", len(lens))
    differs = kv_lens.numpy() != lens
    if differs.any():
        row = int(differs.argmax())
        raise ValueError(
            f"kv_lens[{row}] is {int(kv_lens[row])}, but the page table holds {lens[row]} tokens"
        )

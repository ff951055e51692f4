"""A step's index arrays as FlashInfer takes them: checked, on the host, padded to a capacity.

In numpy: on arrays this small a torch operation costs five times as much, and a plan does many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.page_table import PageTable
from pagedattn.validation import check_index_tensor, check_indptr, lens_of_last_pages

Ints = NDArray[np.int32]
INT_MAX = np.iinfo(np.int32).max


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
    decodes: bool = False  # known to have one query token and at least one key a request

    @classmethod
    def of_table(cls, table: PageTable, qo_indptr: Ints) -> HostStep:
        """A step from a table that has been checked, on the host; caches are checked elsewhere."""
        indptr, ids, lens = table.arrays
        full_pages = indptr[1:] - indptr[:-1] - 1
        all_have_keys = len(lens) > 0 and np.minimum.reduce(full_pages) >= 0
        if not all_have_keys:
            full_pages = np.maximum(full_pages, 0)
        last = lens - full_pages * table.page_size
        decodes = False
        if all_have_keys and len(lens) == qo_indptr[-1]:
            decodes = bool(np.maximum.reduce(qo_indptr[1:] - qo_indptr[:-1]) == 1)
        return cls(table.page_size, qo_indptr, indptr, ids, lens, last, 0, decodes)

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.kv_lens)

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens over all requests."""
        return int(self.qo_indptr[-1])

    @cached_property
    def qo_lens(self) -> Ints:
        """i32[batch]: query tokens of each request."""
        return self.qo_indptr[1:] - self.qo_indptr[:-1]

    @cached_property
    def max_qo_len(self) -> int:
        """The most query tokens of a request."""
        return int(np.maximum.reduce(self.qo_lens, initial=0))

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
    last = _array_of(paged_kv_last_page_len, "paged_kv_last_page_len")
    batch_size = len(last)
    indptr = _array_of(paged_kv_indptr, "paged_kv_indptr", batch_size + 1)
    ids = _array_of(paged_kv_indices, "paged_kv_indices")
    if len(ids) != indptr[-1]:
        check_indptr(torch.from_numpy(indptr), "paged_kv_indptr", batch_size)
        check_index_tensor(torch.from_numpy(ids), "paged_kv_indices", int(indptr[-1]))
    lens, all_have_keys = _lens_of(indptr, last, page_size)
    if kv_lens is not None:
        _check_agrees(_array_of(kv_lens, "kv_lens", batch_size), lens)
    if qo_indptr is None:
        queries = np.arange(batch_size + 1, dtype=np.int32)
    else:
        queries = _array_of(qo_indptr, "qo_indptr", batch_size + 1)
        if queries[0] != 0 or not _rises(queries):
            check_indptr(torch.from_numpy(queries), "qo_indptr", batch_size)
    highest = _highest(ids) if len(ids) else -1
    if highest >= 1 << 31:  # as a negative id looks then
        raise ValueError(f"paged_kv_indices must not be negative, got page id {ids.min()}")
    decodes = qo_indptr is None and all_have_keys
    return HostStep(page_size, queries, indptr, ids, lens, last, highest + 1, decodes)


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


def _check_agrees(kv_lens: Ints, lens: Ints) -> None:
    differs = kv_lens != lens
    if differs.any():
        row = int(differs.argmax())
        raise ValueError(
            f"kv_lens[{row}] is {kv_lens[row]}, but the page table holds {lens[row]} tokens"
        )


def _array_of(tensor: Tensor, name: str, length: int | None = None) -> Ints:
    """Check an index tensor's type and shape, and bring it to the host."""
    host = tensor if tensor.is_cpu else tensor.to("cpu")
    if host.dtype is not torch.int32:
        check_index_tensor(host, name, length)
    array: Ints = host.numpy()
    # asked of the array, which answers in a third of a tensor's time
    if array.ndim != 1 or not array.flags.c_contiguous or length not in (None, len(array)):
        check_index_tensor(host, name, length)
    return array


def _lens_of(indptr: Ints, last: Ints, page_size: int) -> tuple[Ints, bool]:
    """Check bounds and lengths of last pages against each other.

    Returns:
        i32[batch] `kv_lens`, and whether all requests have a key.
    """
    # Two passes say that all is well, as it nearly always is; what is wrong is asked afterwards.
    num_entries = int(indptr[-1])
    if len(last) and indptr[0] == 0 and 0 < num_entries * max(len(last), page_size) <= INT_MAX:
        full_pages = indptr[1:] - indptr[:-1] - 1
        # of 0 that makes a huge number, and so does any overflow: one of the steps is too large
        if _highest(full_pages) < num_entries and _highest(last - 1) < page_size:
            return full_pages * page_size + last, True
    check_indptr(torch.from_numpy(indptr), "paged_kv_indptr", len(last))
    host = torch.from_numpy(last), "paged_kv_last_page_len", torch.from_numpy(indptr)
    return lens_of_last_pages(*host, page_size), False


def _rises(indptr: Ints) -> bool:
    """Whether it is certain that bounds never decrease; where they are huge it never is."""
    end = int(indptr[-1])
    if end < 0 or end * len(indptr) > INT_MAX:
        return False
    return len(indptr) == 1 or _highest(indptr[1:] - indptr[:-1]) <= end


def _highest(values: Ints) -> int:
    """The largest value, where a negative one counts as a huge one: one pass, not two."""
    return int(np.maximum.reduce(values.view(np.uint32)))

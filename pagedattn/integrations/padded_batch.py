"""A padded batch as requests of their own lengths.

Libraries that pad the prompts of a batch to one width see a rectangle: each of its columns is, in
each row, a token or padding. Pages hold tokens only. Nothing here knows which library pads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.kv_cache import OutOfPages, PagedKVCache
from pagedattn.page_table import PageTable
from pagedattn.slots import write_slots


@dataclass(frozen=True, eq=False)
class PaddedStep:
    """The new columns of one step, as its layers need them."""

    page_table: PageTable  # on the host, new tokens included
    qo_indptr: Tensor  # i32[batch + 1]  on the host; where each row's new tokens begin
    slots: Tensor  # i64[batch * q_len]  on the device; the slot of each new column, -1 for padding
    tokens: Tensor | None  # i64[tokens]  on the device; new columns that are tokens; None: all are


class PaddedBatch:
    """The rows of a batch, each a request that holds the tokens of its row.

    Args:
        kv_cache: Where the rows' pages are. Its allocator serves this batch alone.
        batch_size: Rows.
    """

    def __init__(self, kv_cache: PagedKVCache, batch_size: int) -> None:
        self.kv_cache = kv_cache
        self.mask = torch.zeros(batch_size, 0, dtype=torch.bool)  # bool[batch, columns] on the host
        self._num_requests_made = 0
        self._requests = self._new_requests(batch_size)
        for request in self._requests:
            kv_cache.extend(request, 0)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._requests)

    @property
    def num_columns(self) -> int:
        """Tokens and padding of each row."""
        return self.mask.shape[1]

    @property
    def has_gaps(self) -> bool:
        """Whether some row has padding between tokens."""
        before = torch.nn.functional.pad(self.mask, (1, 0))[:, :-1]
        return bool(((self.mask & ~before).sum(1) > 1).any())

    def page_table(self) -> PageTable:
        """The pages and lengths of the rows, in order."""
        return self.kv_cache.allocator.page_table(self._requests)

    def begin_step(self, mask: Tensor, q_len: int) -> PaddedStep:
        """Add `q_len` columns and make room for their tokens.

        Args:
            mask: bool[batch, columns], which columns are tokens, the old ones repeated. From a GPU
                it is read here, which waits for the GPU.
            q_len: Columns that are new.

        Raises:
            OutOfPages: Too few pages are free. Nothing has changed but pages that were copied.
            ValueError: `mask` does not continue the batch.
        """
        mask, past = mask.cpu(), self.num_columns
        if mask.shape[1] != past + q_len or not torch.equal(mask[:, :past], self.mask):
            raise ValueError(
                f"attention_mask must repeat the mask {list(self.mask.shape)} [batch, columns] of "
                f"what is in the cache and add {q_len} columns, got {list(mask.shape)}"
            )
        is_token = mask[:, past:]
        qo_lens = is_token.sum(1)
        self._extend_all(qo_lens.tolist())
        self.mask = mask
        qo_indptr = torch.zeros(self.batch_size + 1, dtype=torch.int32)
        qo_indptr[1:] = qo_lens.cumsum(0)
        table = self.page_table()
        slots = torch.full((is_token.numel(),), -1)
        slots[is_token.flatten()] = write_slots(table, qo_indptr)
        device = self.kv_cache.device
        tokens = None if bool(is_token.all()) else is_token.flatten().nonzero()[:, 0].to(device)
        return PaddedStep(table, qo_indptr, slots.to(device), tokens)

    def crop(self, num_columns: int) -> None:
        """Keep only the first columns."""
        if not 0 <= num_columns <= self.num_columns:
            raise ValueError(f"num_columns must be 0 to {self.num_columns}, got {num_columns}")
        self.mask = self.mask[:, :num_columns]
        self._truncate_all(self.mask.sum(1).tolist())

    def select_rows(self, rows: list[int]) -> None:
        """Let row `i` continue row `rows[i]`; rows that continue the same one share its pages."""
        allocator, old = self.kv_cache.allocator, self._requests
        self._requests = self._new_requests(len(rows))
        for row, request in zip(rows, self._requests, strict=True):
            allocator.fork(old[row], request)
        for request in old:
            allocator.free(request)
        self.mask = self.mask[rows]

    def _new_requests(self, count: int) -> list[int]:
        self._num_requests_made += count
        return list(range(self._num_requests_made - count, self._num_requests_made))

    def _extend_all(self, num_tokens: list[int]) -> None:
        """Extend every row, or none."""
        kv_lens = [self.kv_cache.allocator.kv_len(request) for request in self._requests]
        try:
            for request, count in zip(self._requests, num_tokens, strict=True):
                self.kv_cache.extend(request, count)
        except OutOfPages:
            self._truncate_all(kv_lens)
            raise

    def _truncate_all(self, kv_lens: list[int]) -> None:
        for request, kv_len in zip(self._requests, kv_lens, strict=True):
            self.kv_cache.allocator.truncate(request, kv_len)

"""Page tables: which physical pages hold the keys and values of which request.

`PageTable` is the one form that backends read (compressed sparse rows). Its constructors take what
engines keep: lengths, CSR with last-page lengths, padded block tables, token-to-slot maps. This
module knows nothing of attention; checks of a finished table live in `validation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = Tensor | Sequence[int]
Int32s = NDArray[np.int32]


class HostArrays(NamedTuple):
    """The tensors of a host table as numpy arrays, over the same memory."""

    kv_indptr: Int32s
    kv_indices: Int32s
    kv_lens: Int32s


@dataclass(frozen=True, eq=False)
class PageTable:
    """Who owns which pages, and how many tokens each request has.

    Request `r` owns the pages `kv_indices[kv_indptr[r]:kv_indptr[r + 1]]`, in its tokens' order,
    and exactly `ceil(kv_lens[r] / page_size)` of them. Pages may be shared by requests. All tensors
    are contiguous int32 on one device; on the host is best, since planning reads them there.

    Example:
        >>> table = PageTable.from_lengths([5, 0, 2], page_size=4)
        >>> table.kv_indptr.tolist(), table.kv_indices.tolist(), table.last_page_len.tolist()
        ([0, 2, 2, 3], [0, 1, 2], [1, 0, 2])
    """

    page_size: int
    kv_indptr: Tensor  # i32[batch + 1]  where each request's pages begin in kv_indices
    kv_indices: Tensor  # i32[kv_indptr[-1]]  physical page ids
    kv_lens: Tensor  # i32[batch]  tokens of each request, this step's new ones included

    def __post_init__(self) -> None:
        """Refuse lists here, where it can be said which; what is in the tensors is checked later.

        Raises:
            ValueError: A field is not a tensor.
        """
        parts = (self.kv_indptr, self.kv_indices, self.kv_lens)
        if type(parts[0]) is type(parts[1]) is type(parts[2]) is Tensor:
            return  # the usual case, in every step of a service
        for part, name in zip(parts, ("kv_indptr", "kv_indices", "kv_lens"), strict=True):
            if not isinstance(part, Tensor):
                raise ValueError(f"{name} must be an int32 tensor, got {type(part).__name__}")

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.kv_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.kv_lens.device

    @cached_property
    def arrays(self) -> HostArrays:
        """A host table's tensors for numpy: on arrays this small torch costs five times as much."""
        return HostArrays(self.kv_indptr.numpy(), self.kv_indices.numpy(), self.kv_lens.numpy())

    def __getstate__(self) -> dict[str, object]:
        # without the arrays: a copy's would not be over the memory of its tensors
        return {name: value for name, value in self.__dict__.items() if name != "arrays"}

    @property
    def last_page_len(self) -> Tensor:
        """i32[batch]: tokens in each request's last page, 1 to `page_size`; 0 if it has none."""
        return torch.where(self.kv_lens > 0, (self.kv_lens - 1) % self.page_size + 1, 0).int()

    def to(self, device: torch.device | str) -> PageTable:
        """Return the same table on `device` (from a GPU to the host this waits for the GPU)."""
        if self.device == torch.device(device):
            return self
        return PageTable(
            self.page_size,
            self.kv_indptr.to(device),
            self.kv_indices.to(device),
            self.kv_lens.to(device),
        )

    def pages_of(self, request: int) -> Tensor:
        """i32[pages]: the physical pages of one request."""
        begin, end = self.kv_indptr[request : request + 2].tolist()
        return self.kv_indices[begin:end]

    def _repr_html_(self) -> str:
        # the one import of a higher floor: notebooks ask the table, and only they need pictures
        from pagedattn.draw import page_table_html

        return page_table_html(self)

    def to_block_table(self, fill: int = -1) -> Tensor:
        """i32[batch, most pages of a request]: one row a request, `fill` after its last page."""
        num_pages = self.kv_indptr.diff()
        width = int(num_pages.max()) if self.batch_size else 0
        columns = torch.arange(width, device=self.device)
        owned = columns < num_pages[:, None]
        block_table = torch.full(owned.shape, fill, dtype=torch.int32, device=self.device)
        block_table[owned] = self.kv_indices
        return block_table

    @classmethod
    def from_lengths(
        cls, kv_lens: IntArray, page_size: int, page_ids: IntArray | None = None
    ) -> PageTable:
        """Build a table from lengths, dealing out `page_ids` in order (default 0, 1, 2, ...).

        Args:
            kv_lens: i32[batch], tokens of each request.
            page_size: Tokens in one page.
            page_ids: i32[at least the pages needed], the physical pages to use.

        Raises:
            ValueError: A length is negative, or `page_ids` are too few.
        """
        lens = _as_int32(kv_lens, "kv_lens")
        indptr = _indptr_of_lens(lens, page_size)
        needed = int(indptr[-1])
        if page_ids is None:
            return cls(page_size, indptr, torch.arange(needed, dtype=torch.int32), lens)
        ids = _as_int32(page_ids, "page_ids")
        if ids.shape[0] < needed:
            raise ValueError(f"page_ids has {ids.shape[0]} pages, kv_lens need {needed}")
        return cls(page_size, indptr, ids[:needed].contiguous(), lens)

    @classmethod
    def from_csr(
        cls, kv_indptr: IntArray, kv_indices: IntArray, last_page_len: IntArray, page_size: int
    ) -> PageTable:
        """Build a table from FlashInfer's three arrays.

        Args:
            kv_indptr: i32[batch + 1], where each request's pages begin.
            kv_indices: i32[kv_indptr[-1]], physical page ids.
            last_page_len: i32[batch], 1 to `page_size`, and 0 where a request has no page.
            page_size: Tokens in one page.

        Raises:
            ValueError: Lengths disagree, or a `last_page_len` is out of its range.
        """
        indptr = _as_int32(kv_indptr, "kv_indptr")
        last = _as_int32(last_page_len, "last_page_len")
        if indptr.shape[0] != last.shape[0] + 1:
            raise ValueError(
                f"kv_indptr has {indptr.shape[0]} entries, expected {last.shape[0] + 1}: "
                "one more than last_page_len"
            )
        num_pages = indptr.diff()
        low = (num_pages > 0).int()
        wrong = (last < low) | (last > low * page_size)
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            expected = f"1 to {page_size}" if num_pages[row] > 0 else "0, as it has no page"
            raise ValueError(f"last_page_len[{row}] is {int(last[row])}, expected {expected}")
        lens = (num_pages - low) * page_size + last
        return cls(page_size, indptr, _as_int32(kv_indices, "kv_indices"), lens.int())

    @classmethod
    def from_block_table(
        cls, block_table: Tensor | Sequence[Sequence[int]], kv_lens: IntArray, page_size: int
    ) -> PageTable:
        """Build a table from a padded block table; entries past a request's last page are ignored.

        Args:
            block_table: i32[batch, max pages of a request], physical page ids.
            kv_lens: i32[batch], tokens of each request.
            page_size: Tokens in one page.

        Raises:
            ValueError: A row is too short for its length, or the batch sizes differ.
        """
        lens = _as_int32(kv_lens, "kv_lens")
        blocks = _as_int32(block_table, "block_table", ndim=2)
        if blocks.shape[0] != lens.shape[0]:
            raise ValueError(f"block_table has {blocks.shape[0]} rows, kv_lens {lens.shape[0]}")
        indptr = _indptr_of_lens(lens, page_size)
        num_pages = indptr.diff()
        if (num_pages > blocks.shape[1]).any():
            row = int((num_pages > blocks.shape[1]).nonzero()[0, 0])
            raise ValueError(
                f"block_table has {blocks.shape[1]} columns, request {row} with kv_len "
                f"{int(lens[row])} needs {int(num_pages[row])}"
            )
        owned = torch.arange(blocks.shape[1], device=blocks.device) < num_pages[:, None]
        return cls(page_size, indptr, blocks[owned], lens)

    @classmethod
    def from_token_map(
        cls, token_slots: Tensor | Sequence[Sequence[int]], kv_lens: IntArray, page_size: int
    ) -> PageTable:
        """Build a table from a map of every token to its flat slot, `page * page_size + offset`.

        Args:
            token_slots: i32[batch, max tokens of a request], slots in token order, as engines with
                a token pool keep them. Entries at or past a request's length are ignored.
            kv_lens: i32[batch], tokens of each request.
            page_size: Tokens in one page; token `t` must be at offset `t % page_size` of its page.

        Raises:
            ValueError: Tokens of one page are not in consecutive slots of one page.
        """
        lens = _as_int32(kv_lens, "kv_lens")
        slots = _as_int32(token_slots, "token_slots", ndim=2)
        if slots.shape[0] != lens.shape[0] or (lens > slots.shape[1]).any():
            raise ValueError(
                f"token_slots is {list(slots.shape)}, kv_lens asks for {lens.shape[0]} rows of "
                f"at least {int(lens.max()) if lens.numel() else 0} tokens"
            )
        tokens = torch.arange(slots.shape[1], dtype=torch.int32, device=slots.device)
        first = slots[:, tokens - tokens % page_size]  # slot of the token that opens the page
        used = tokens < lens[:, None]
        wrong = used & ((slots != first + tokens % page_size) | (first % page_size != 0))
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"token_slots[{row}, {token}] is {int(slots[row, token])}: with page_size "
                f"{page_size} the tokens of a page must fill its slots in order"
            )
        blocks = slots[:, ::page_size] // page_size
        return cls.from_block_table(blocks.contiguous(), lens, page_size)


def _as_int32(values: object, name: str, ndim: int = 1) -> Tensor:
    """Make a contiguous int32 tensor; a tensor of another dtype is refused, not reinterpreted."""
    if isinstance(values, Tensor):
        if values.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {values.dtype}")
        tensor = values.contiguous()
    else:
        tensor = torch.tensor(values, dtype=torch.int32)
        if tensor.numel() == 0:
            tensor = tensor.reshape((0,) * ndim)
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {list(tensor.shape)}")
    return tensor


def _indptr_of_lens(kv_lens: Tensor, page_size: int) -> Tensor:
    """i32[batch + 1]: the running sum of `ceil(kv_len / page_size)`."""
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    if kv_lens.numel() and kv_lens.min() < 0:
        raise ValueError(f"kv_lens must not be negative, got {int(kv_lens.min())}")
    indptr = torch.zeros(kv_lens.shape[0] + 1, dtype=torch.int32, device=kv_lens.device)
    indptr[1:] = ((kv_lens + page_size - 1) // page_size).cumsum(0)
    return indptr

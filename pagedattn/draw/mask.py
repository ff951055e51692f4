"""Which query of one request sees which slot, counted in blocks that fit a picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.draw.requests import build_requests, counted
from pagedattn.page_table import PageTable
from pagedattn.validation import check_page_table

MAX_ROWS = 32
MAX_COLUMNS = 54


@dataclass(frozen=True, eq=False)
class Mask:
    """One request's mask. A row of the picture is a block of queries, a column one of slots.

    Columns cover all slots of the request's pages, in its tokens' order, the unused tail included.
    """

    request: int
    page_ids: tuple[int, ...]
    page_size: int
    kv_len: int
    qo_len: int
    causal: bool
    window_left: int
    queries_per_row: int
    slots_per_column: int
    visible: NDArray[np.int64]  # i64[rows, columns], pairs of a query and a key that it sees
    sizes: NDArray[np.int64]  # i64[rows, columns], pairs of a query and a key

    @property
    def first_position(self) -> int:
        """Position of the first query; negative where there are more queries than keys."""
        return self.kv_len - self.qo_len

    @property
    def num_rows(self) -> int:
        """Rows of the picture."""
        return int(self.visible.shape[0])

    @property
    def num_columns(self) -> int:
        """Columns of the picture."""
        return int(self.visible.shape[1])

    @property
    def columns_per_page(self) -> int:
        """Columns of one page; 0 where there is no room to set pages apart."""
        has_room = self.num_columns + len(self.page_ids) < MAX_COLUMNS
        return self.page_size // self.slots_per_column if has_room else 0

    def queries_of(self, row: int) -> tuple[int, int]:
        """First and last query of a row."""
        first = row * self.queries_per_row
        return first, min(first + self.queries_per_row, self.qo_len) - 1

    def sees_nothing(self, row: int) -> bool:
        """Whether no query of a row sees any key."""
        return not self.visible[row].any()

    def heading(self) -> str:
        """What is drawn, in one line of at most 80 characters for lengths below a million."""
        kinds = ["causal" if self.causal else "not causal"]
        if self.window_left >= 0:
            kinds.append(f"window_left={self.window_left}")
        return (
            f"request {self.request}: {counted(self.qo_len, 'query', 'queries')}, "
            f"{counted(self.kv_len, 'key')} in {counted(len(self.page_ids), 'page')} of "
            f"{self.page_size}; {', '.join(kinds)}"
        )

    def alignment(self) -> str:
        """Where the queries sit, in one line."""
        sign, offset = "-" if self.first_position < 0 else "+", abs(self.first_position)
        return f"query i is at position i {sign} {offset}, the last query at the last key"

    def query_label(self, row: int) -> str:
        """The queries of a row; of a single one its position too."""
        first, last = self.queries_of(row)
        return f"{first} at {first + self.first_position}" if first == last else f"{first}-{last}"


def visible_ranges(
    positions: NDArray[np.int64], kv_len: int, causal: bool, window_left: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Half-open range of the keys that the query at each position sees; empty where low >= high.

    Example:
        >>> low, high = visible_ranges(np.array([4, 5]), kv_len=6, causal=True, window_left=1)
        >>> low.tolist(), high.tolist()
        ([3, 4], [5, 6])
    """
    low = np.maximum(positions - window_left, 0) if window_left >= 0 else np.zeros_like(positions)
    high = np.minimum(positions + 1, kv_len) if causal else np.full_like(positions, kv_len)
    return low, high


def build_mask(
    table: PageTable, request: int, qo_indptr: Tensor | None, causal: bool, window_left: int
) -> Mask:
    """Check a host table and count what the queries of one of its requests see.

    Raises:
        ValueError: The table or an argument is wrong; the message names it.
    """
    check_page_table(table, table.page_size)
    build_requests(table, qo_indptr, window_left, None)
    if not 0 <= request < table.batch_size:
        raise ValueError(
            f"request must be 0 to {table.batch_size - 1}, a row of page_table, got {request}"
        )
    kv_len = int(table.kv_lens[request])
    qo_len = 1 if qo_indptr is None else int(qo_indptr.diff()[request])
    page_ids = tuple(table.pages_of(request).tolist())
    queries_per_row = max(1, -(-qo_len // MAX_ROWS))
    slots_per_column = _slots_per_column(len(page_ids), table.page_size)
    visible, sizes = _count_blocks(
        np.arange(kv_len - qo_len, kv_len), kv_len, causal, window_left,
        (queries_per_row, slots_per_column, len(page_ids) * table.page_size),
    )  # fmt: skip
    return Mask(
        request, page_ids, table.page_size, kv_len, qo_len, causal, window_left,
        queries_per_row, slots_per_column, visible, sizes,
    )  # fmt: skip


def _slots_per_column(num_pages: int, page_size: int) -> int:
    """The fewest slots that fit: a part of a page that divides it, or a number of whole pages."""
    for slots in range(1, page_size + 1):
        separators = num_pages + 1
        if page_size % slots == 0 and num_pages * (page_size // slots) + separators <= MAX_COLUMNS:
            return slots
    return page_size * -(-num_pages // MAX_COLUMNS) if num_pages else 1


def _count_blocks(
    positions: NDArray[np.int64],
    kv_len: int,
    causal: bool,
    window_left: int,
    shape: tuple[int, int, int],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Visible pairs and all pairs of each block; `shape`: queries a row, slots a column, slots."""
    queries_per_row, slots_per_column, num_slots = shape
    begins = np.minimum(np.arange(0, num_slots, slots_per_column), kv_len)
    ends = np.minimum(np.arange(0, num_slots, slots_per_column) + slots_per_column, kv_len)
    num_rows = -(-len(positions) // queries_per_row)
    visible = np.zeros((num_rows, len(begins)), dtype=np.int64)
    sizes = np.zeros_like(visible)
    for row in range(num_rows):
        block = positions[row * queries_per_row : (row + 1) * queries_per_row]
        low, high = visible_ranges(block, kv_len, causal, window_left)
        seen = np.minimum(high[:, None], ends) - np.maximum(low[:, None], begins)
        visible[row] = np.maximum(seen, 0).sum(axis=0)
        sizes[row] = len(block) * (ends - begins)
    return visible, sizes

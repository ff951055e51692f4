"""What a picture shows of the requests of a step: names, lengths, what is new and what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.page_table import PageTable
from pagedattn.validation import check_indptr, check_page_table


@dataclass(frozen=True)
class Requests:
    """What is drawn of each request."""

    names: tuple[str, ...]
    kv_lens: NDArray[np.int64]
    first_seen: NDArray[np.int64]  # keys from here on are seen by some query
    first_new: NDArray[np.int64]  # tokens from here on are written in this step
    has_queries: bool  # whether the step's queries are known
    window_left: int


def build_requests(
    table: PageTable, qo_indptr: Tensor | None, window_left: int, names: Sequence[str] | None
) -> Requests:
    """Check a host table and its queries, and say what is seen and what is new.

    Raises:
        ValueError: Something is wrong; the message names it.
    """
    check_page_table(table, table.page_size)
    if window_left < -1:
        raise ValueError(f"window_left must be -1 (unbounded) or at least 0, got {window_left}")
    if names is None:
        names = [f"r{request}" for request in range(table.batch_size)]
    if len(names) != table.batch_size:
        raise ValueError(f"names has {len(names)} entries, page_table {table.batch_size} requests")
    kv_lens = table.kv_lens.numpy().astype(np.int64)
    qo_lens = np.ones_like(kv_lens)
    if qo_indptr is not None:
        check_indptr(qo_indptr, "qo_indptr", table.batch_size)
        qo_lens = np.diff(qo_indptr.numpy()).astype(np.int64)
    first_seen = np.maximum(kv_lens - qo_lens - window_left, 0) if window_left >= 0 else 0 * kv_lens
    first_seen = np.where(qo_lens > 0, first_seen, kv_lens)
    first_new = kv_lens if qo_indptr is None else np.maximum(kv_lens - qo_lens, 0)
    return Requests(
        tuple(names), kv_lens, first_seen, first_new, qo_indptr is not None, window_left
    )


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun.

    Example:
        >>> counted(1, "page"), counted(12, "page"), counted(2, "query", "queries")
        ('1 page', '12 pages', '2 queries')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"

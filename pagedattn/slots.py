"""Where the keys and values of a step's new tokens belong: their slots in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.page_table import Int32s, PageTable

Slots = NDArray[np.signedinteger[Any]]


def write_slots(page_table: PageTable, qo_indptr: Tensor, num_rows: int | None = None) -> Tensor:
    """Flat slot of every new token: where its key and value belong.

    Query `i` of a request with `qo_len` queries and `kv_len` tokens is token `kv_len - qo_len + i`.

    Args:
        page_table: The step's table, lengths after the new tokens.
        qo_indptr: i32[batch + 1], where each request's new tokens begin.
        num_rows: Length of the result, for steps that are padded; `None`: the new tokens.

    Returns:
        i64[tokens or num_rows]: `page * page_size + offset`; -1 for what has no slot and what
        `PagedKVCache.append` skips: padding, and a query before its request's first token
        (`qo_len > kv_len`).

    Example:
        >>> table = PageTable.from_lengths([5, 3], page_size=4, page_ids=[7, 2, 9])
        >>> write_slots(table, torch.tensor([0, 2, 3], dtype=torch.int32)).tolist()
        [31, 8, 38]
    """
    arrays = page_table.to("cpu").arrays
    slots = slots_of_arrays(qo_indptr.cpu().numpy(), *arrays, page_table.page_size)
    if num_rows is not None:
        padding = np.full(num_rows - len(slots), -1, dtype=np.int64)
        slots = np.concatenate([slots, padding])
    return torch.from_numpy(slots).to(page_table.device)


def slots_of_arrays(
    qo_indptr: Int32s,
    kv_indptr: Int32s,
    kv_indices: Int32s,
    kv_lens: Int32s,
    page_size: int,
    *,
    narrow: bool = False,
) -> Slots:
    """`write_slots` of a table's arrays; with `narrow`, all slots are below 2 ** 31.

    They may be i32 then, which takes numpy half the time.
    """
    num_tokens = int(qo_indptr[-1])
    if not num_tokens or not len(kv_indices):
        return np.full(num_tokens, -1, dtype=np.int64)
    qo_ends = qo_indptr[1:]
    qo_lens = qo_ends - qo_indptr[:-1]
    # numpy divides int32 five times as fast as int64
    fits = len(kv_indices) * page_size < 1 << 31
    wide: type[np.signedinteger[Any]] = np.int32 if fits else np.int64
    # With all requests' pages side by side, a request's last query is where its last key is.
    begins = np.multiply(kv_indptr[:-1], page_size, dtype=wide)
    counts = qo_lens.astype(np.intp)
    side_by_side = (begins + kv_lens - qo_ends).repeat(counts)
    side_by_side += np.arange(num_tokens, dtype=wide)
    entry = side_by_side // page_size
    before_first = None  # queries before their request's first token
    if np.minimum.reduce(kv_lens - qo_lens) < 0:
        before_first = side_by_side < begins.repeat(counts)
        entry[before_first] = 0
    page = kv_indices[entry.astype(np.intp, copy=False)]  # far faster than with int32
    slots: Slots
    if narrow and fits:
        slots = (page - entry) * page_size
    else:
        slots = np.multiply(page - entry, page_size, dtype=np.int64)
    slots += side_by_side
    if before_first is not None:
        slots[before_first] = -1
    return slots

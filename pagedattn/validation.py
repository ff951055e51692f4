"""Every check of tables and tensors, in one place, called by the facade alone.

Each function raises a `ValueError` that names the tensor, what was got and what was expected,
before anything is written. Values are read from host tensors only: nothing here waits for a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

KVCache = Tensor | tuple[Tensor, Tensor]


def check_index_tensor(tensor: Tensor, name: str, length: int | None = None) -> None:
    """Require a contiguous one-dimensional int32 tensor, of `length` entries where it is given."""
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.ndim != 1 or (length is not None and tensor.shape[0] != length):
        expected = "[any]" if length is None else f"[{length}]"
        raise ValueError(f"{name} must have shape {expected}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}")


def check_is_tensor(tensor: object, name: str) -> None:
    """Require an int32 tensor and no list: asked before anything else of it is."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be an int32 tensor, got {type(tensor).__name__}")


def check_indptr(tensor: Tensor, name: str, batch_size: int) -> NDArray[np.int32]:
    """Require i32[batch_size + 1] that starts at 0 and never decreases; return its values."""
    check_index_tensor(tensor, name, batch_size + 1)
    values: NDArray[np.int32] = tensor.numpy()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    decreases = values[1:] < values[:-1]
    if np.count_nonzero(decreases):
        row = int(decreases.argmax())
        raise ValueError(
            f"{name} must not decrease, got {values[row]} then {values[row + 1]} at entry {row + 1}"
        )
    return values


def check_page_table(table: PageTable, page_size: int) -> int:
    """Check a host table against its own lengths; return the pages a cache must have for it."""
    if table.page_size != page_size:
        raise ValueError(f"page_table.page_size is {table.page_size}, expected {page_size}")
    batch_size = check_table_shapes(table)
    indptr, ids, lens = table.arrays
    if len(ids) != indptr[-1] or indptr[0] != 0:
        check_indptr(table.kv_indptr, "kv_indptr", batch_size)
        check_index_tensor(table.kv_indices, "kv_indices", int(indptr[-1]))
    if not batch_size:
        return 0
    # In one number, which has a sign if any of these has: a bound, pages or a length below 0, or a
    # last page overfull. What of it is wrong is asked afterwards. Nothing overflows that has no
    # sign already. (Where the least and the greatest are costs a quarter of what they are.)
    ends = indptr[1:]
    owned = ends - indptr[:-1]
    fits = len(ids) * page_size < 1 << 31
    unused = (owned if fits else owned.astype(np.int64)) * page_size - lens
    signs = ends | owned | lens | unused
    if signs[signs.argmin()] < 0 or unused[unused.argmax()] >= page_size:
        _refuse_lengths(table)
    if not len(ids):
        return 0
    # in one pass, as a negative id is a huge one without its sign
    highest = int(ids[ids.view(np.uint32).argmax()])
    if highest < 0:
        raise ValueError(f"kv_indices must not be negative, got page id {ids.min()}")
    return highest + 1


def check_table_shapes(table: PageTable) -> int:
    """Check dtypes, shapes and devices, and no value; return the batch size."""
    lens, indptr, indices = table.kv_lens, table.kv_indptr, table.kv_indices
    if lens.ndim != 1:
        raise ValueError(f"kv_lens must have shape [batch], got {list(lens.shape)}")
    batch_size = lens.shape[0]
    check_index_tensor(lens, "kv_lens")
    check_index_tensor(indptr, "kv_indptr", batch_size + 1)
    check_index_tensor(indices, "kv_indices")
    if not lens.device == indptr.device == indices.device:
        raise ValueError(
            f"page_table must be on one device, got kv_lens on {lens.device}, kv_indptr on "
            f"{indptr.device}, kv_indices on {indices.device}"
        )
    return batch_size


def check_device_table(table: PageTable, page_size: int, device: torch.device) -> int:
    """Check a table on the device without waiting for its values; return the batch size."""
    if table.page_size != page_size:
        raise ValueError(f"page_table.page_size is {table.page_size}, expected {page_size}")
    batch_size = check_table_shapes(table)
    check_device(table.kv_lens, "page_table", device)
    return batch_size


def check_device(tensor: Tensor, name: str, device: torch.device) -> None:
    """Require a tensor on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _refuse_lengths(table: PageTable) -> None:
    """Say what is wrong with a table whose lengths and pages do not fit together."""
    check_indptr(table.kv_indptr, "kv_indptr", table.batch_size)
    indptr, _, lens = table.arrays
    if lens.min() < 0:
        raise ValueError(f"kv_lens must not be negative, got {lens.min()}")
    needed = -(-lens // table.page_size)  # ceil, without overflow near 2 ** 31
    owned = indptr[1:] - indptr[:-1]
    row = int((needed != owned).argmax())
    raise ValueError(
        f"request {row} has kv_len {lens[row]} and {owned[row]} pages of {table.page_size} tokens, "
        f"expected {needed[row]} pages"
    )


def lens_of_last_pages(
    last_page_len: Tensor, name: str, kv_indptr: Tensor, page_size: int
) -> NDArray[np.int32]:
    """Check last-page lengths against a checked `kv_indptr`; return i32[batch], the `kv_lens`.

    Args:
        last_page_len: i32[batch], 1 to `page_size`, 0 where a request has no page (host tensor).
        name: For messages.
        kv_indptr: i32[batch + 1], where each request's pages begin (host tensor).
        page_size: Tokens in one page.
    """
    last, indptr = last_page_len.numpy(), kv_indptr.numpy()
    num_pages = indptr[1:] - indptr[:-1]
    low = np.minimum(num_pages, 1)
    wrong = (last < low) | (last > low * page_size)
    if wrong.any():
        row = int(wrong.argmax())
        expected = f"1 to {page_size}" if num_pages[row] else "0, as it has no page"
        raise ValueError(f"{name}[{row}] is {last[row]}, expected {expected}")
    lens: NDArray[np.int32] = (num_pages - low) * page_size + last
    return lens


def check_query(q: Tensor, name: str, spec: AttentionSpec, rows: int, device: torch.device) -> None:
    """Require `dtype[rows, num_qo_heads, head_dim]` on `device`, dense inside a head."""
    expected = (rows, spec.num_qo_heads, spec.head_dim)
    if tuple(q.shape) != expected:
        raise ValueError(
            f"{name} must have shape {list(expected)} [tokens, num_qo_heads, head_dim], "
            f"got {list(q.shape)}"
        )
    _check_dtype_and_device(q, name, spec.dtype, device)
    _check_dense_heads(q, name)


def check_lse(lse: Tensor, spec: AttentionSpec, rows: int, device: torch.device) -> None:
    """Require a contiguous `f32[rows, num_qo_heads]` on `device`."""
    if tuple(lse.shape) != (rows, spec.num_qo_heads):
        raise ValueError(
            f"lse must have shape {[rows, spec.num_qo_heads]} [tokens, num_qo_heads], "
            f"got {list(lse.shape)}"
        )
    _check_dtype_and_device(lse, "lse", torch.float32, device)
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got stride {lse.stride()}")


def split_kv_cache(
    kv_cache: KVCache, spec: AttentionSpec, page_size: int, num_pages: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Check one layer's cache and return its `(k_pages, v_pages)` views.

    Args:
        kv_cache: `dtype[pages, 2, page_size, num_kv_heads, head_dim]`, or a pair of
            `dtype[pages, page_size, num_kv_heads, head_dim]`.
        spec: The layer's spec.
        page_size: Tokens in one page.
        num_pages: Pages that the planned table reaches: the cache must have at least as many.
        device: Where the cache must be.
    """
    page_shape = [page_size, spec.num_kv_heads, spec.head_dim]
    names = ("k_pages", "v_pages")
    if isinstance(kv_cache, Tensor):
        if list(kv_cache.shape[1:]) != [2, *page_shape]:
            raise ValueError(
                f"kv_cache must have shape [pages, 2, {', '.join(map(str, page_shape))}] "
                f"[pages, 2, page_size, num_kv_heads, head_dim], got {list(kv_cache.shape)}"
            )
        names = ("kv_cache", "kv_cache")
    elif len(kv_cache) != 2:
        raise ValueError(f"kv_cache must be one tensor or two, got {len(kv_cache)}")
    parts = halves_of(kv_cache)
    for pages, name in zip(parts, names, strict=True):
        if list(pages.shape[1:]) != page_shape:
            raise ValueError(
                f"{name} must have shape [pages, {', '.join(map(str, page_shape))}] "
                f"[pages, page_size, num_kv_heads, head_dim], got {list(pages.shape)}"
            )
        _check_dtype_and_device(pages, name, spec.dtype, device)
        _check_dense_heads(pages, name)
        if pages.shape[0] < num_pages:
            raise ValueError(
                f"{name} has {pages.shape[0]} pages, but the planned page table holds page id "
                f"{num_pages - 1}"
            )
    return parts


def halves_of(kv_cache: KVCache) -> tuple[Tensor, Tensor]:
    """The `(k_pages, v_pages)` views of one layer's cache, whose layout has been checked."""
    if isinstance(kv_cache, Tensor):
        k_pages, v_pages = kv_cache.unbind(1)
        return k_pages, v_pages
    return kv_cache


def layout_of(tensor: Tensor | None) -> tuple[object, ...] | None:
    """All that a check may ask of a tensor but its values."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def layout_of_cache(kv_cache: KVCache) -> tuple[object, ...]:
    """`layout_of` of one layer's cache."""
    if isinstance(kv_cache, Tensor):
        return kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.device
    return tuple([layout_of(pages) for pages in kv_cache])


def _check_dtype_and_device(
    tensor: Tensor, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    check_device(tensor, name, device)


def _check_dense_heads(tensor: Tensor, name: str) -> None:
    """Pages and tokens may be strided; the elements of one token's heads may not."""
    head_dim = tensor.shape[-1]
    if tensor.numel() and (
        (head_dim > 1 and tensor.stride(-1) != 1)
        or (tensor.shape[-2] > 1 and tensor.stride(-2) != head_dim)
    ):
        raise ValueError(
            f"{name} must be dense in its last two dimensions (heads, head_dim), "
            f"got stride {tensor.stride()}"
        )

"""What a capsule must be before anything is allocated for it or computed with it.

Each function raises a `ValueError` that names the field, what was got and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pagedattn.checking.capsule_metadata import CapsuleMetadata
from pagedattn.page_table import PageTable
from pagedattn.validation import check_indptr, check_page_table

MAX_FILE_BYTES = 2**31
MAX_HEADER_BYTES = 2**18
MAX_PADDED_KEYS = 2**26
"""Requests, times the slots of the longest: what a padded table holds."""
MAX_KEY_ELEMENTS = 2**28
"""Elements of one request's keys, repeated to query heads."""
MAX_MASK = 2**28
"""Queries times keys of one request."""
MAX_SCORES = 2**32
"""Queries times keys times heads of all requests."""

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of a capsule."""

REQUIRED = (
    "kv_indptr",
    "kv_indices",
    "kv_lens",
    "qo_indptr",
    "page_ids",
    "q",
    "kv_cache",
    "expected_out",
    "expected_lse",
)
GOT = ("got_out", "got_lse")


def check_file(path: Path) -> None:
    """Require an ordinary file of bearable size, with a header of bearable size."""
    if not path.is_file():
        raise ValueError("not an ordinary file")
    size = path.stat().st_size
    check_size(size)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    most = min(size - 8, MAX_HEADER_BYTES)
    if header > most:
        raise ValueError(
            f"not a capsule, or cut short: the header has {header} bytes, expected {most} at most"
        )


def check_size(num_bytes: int) -> None:
    """Require a bearable size of a file."""
    if not 8 <= num_bytes <= MAX_FILE_BYTES:
        raise ValueError(f"the file has {num_bytes} bytes, expected 8 to {MAX_FILE_BYTES}")


def check_layout(metadata: CapsuleMetadata, layout: Layout) -> None:
    """Check names, dtypes and shapes of the tensors against the metadata and one another."""
    # an LSE comes with an output, which may come without one
    names = REQUIRED + (GOT if "got_lse" in layout else GOT[:1] if "got_out" in layout else ())
    for missing in (name for name in names if name not in layout):
        raise ValueError(f"tensor {missing} is missing, expected {', '.join(names)}")
    for unknown in (name for name in layout if name not in names):
        raise ValueError(f"unknown tensor {unknown[:60]!r}, expected {', '.join(names)}")
    spec = metadata.spec
    batch_size, entries, pages, tokens = (
        layout[name][1][0] if layout[name][1] else 0
        for name in ("kv_lens", "kv_indices", "page_ids", "q")
    )
    page_shape = (pages, 2, metadata.page_size, spec.num_kv_heads, spec.head_dim)
    out_shape = (tokens, spec.num_qo_heads, spec.head_dim)
    expected = {
        "kv_indptr": ((torch.int32,), (batch_size + 1,)),
        "kv_indices": ((torch.int32,), (entries,)),
        "kv_lens": ((torch.int32,), (batch_size,)),
        "qo_indptr": ((torch.int32,), (batch_size + 1,)),
        "page_ids": ((torch.int32,), (pages,)),
        "q": ((spec.dtype,), out_shape),
        "kv_cache": ((spec.dtype,), page_shape),
        "expected_out": ((torch.float64,), out_shape),
        "expected_lse": ((torch.float64,), out_shape[:2]),
        "got_out": ((spec.dtype, torch.float32, torch.float64), out_shape),
        "got_lse": ((torch.float32, torch.float64), out_shape[:2]),
    }
    for name in names:
        (dtype, shape), (dtypes, expected_shape) = layout[name], expected[name]
        if dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {dtype}")
        if shape != expected_shape:
            raise ValueError(f"{name} must have shape {list(expected_shape)}, got {list(shape)}")


def check_table(
    metadata: CapsuleMetadata, table: PageTable, qo_indptr: Tensor, page_ids: Tensor, tokens: int
) -> None:
    """Check the values of tables whose dtypes and shapes are right.

    Args:
        metadata: Of the capsule.
        table: Over the kept pages.
        qo_indptr: i32[batch + 1].
        page_ids: i32[pages], the number that each kept page had.
        tokens: Rows of q.
    """
    num_needed = check_page_table(table, metadata.page_size)
    num_pages = page_ids.shape[0]
    if num_needed > num_pages:
        raise ValueError(f"kv_indices holds page {num_needed - 1}, but page_ids has {num_pages}")
    check_indptr(qo_indptr, "qo_indptr", table.batch_size)
    if int(qo_indptr[-1]) != tokens:
        raise ValueError(f"qo_indptr must end at {tokens}, the rows of q, got {qo_indptr[-1]}")
    if num_pages:
        if int(page_ids.min()) < 0 or int(page_ids.max()) >= metadata.num_pages:
            raise ValueError(
                f"page_ids must be 0 to num_pages - 1 = {metadata.num_pages - 1}, "
                f"got {int(page_ids.min())} to {int(page_ids.max())}"
            )
        if not bool((page_ids.diff() > 0).all()):
            raise ValueError("page_ids must increase")
    _check_work(metadata, table, qo_indptr)


def _check_work(metadata: CapsuleMetadata, table: PageTable, qo_indptr: Tensor) -> None:
    """Shared pages let a small file ask for endless work: refuse it."""
    if not table.batch_size:
        return
    spec = metadata.spec
    kv_lens, qo_lens = table.kv_lens.tolist(), qo_indptr.diff().tolist()
    longest = int(table.kv_indptr.diff().max()) * metadata.page_size
    masks = [kv_len * qo_len for kv_len, qo_len in zip(kv_lens, qo_lens, strict=True)]
    for what, amount, most in (
        ("slots of a padded table", longest * table.batch_size, MAX_PADDED_KEYS),
        ("elements of keys", longest * spec.num_qo_heads * spec.head_dim, MAX_KEY_ELEMENTS),
        ("pairs of a query and a key", max(masks), MAX_MASK),
        ("scores", sum(masks) * spec.num_qo_heads, MAX_SCORES),
    ):
        if amount > most:
            raise ValueError(
                f"kv_lens and qo_indptr ask for {amount} {what}, expected {most} at most"
            )

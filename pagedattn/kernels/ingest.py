"""A table that exists on the device alone, made safe there: nobody on the host reads its values.

What the kernels read afterwards is inside its bounds, whatever came: query bounds and page bounds
start at 0, never decrease and stay inside their arrays, a request has no more keys than its pages
hold, and page ids are those of pages that exist. A table that a host would have accepted is left
as it was.
"""

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _copy_bounds(SOURCE, TARGET, num_entries, highest, BLOCK: tl.constexpr):
    """Copy bounds: the first is 0, none is below the one before it or above `highest`."""
    so_far = 0
    for begin in range(0, num_entries, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        bound = tl.load(SOURCE + entry, mask=(entry > 0) & (entry < num_entries), other=0)
        bound = tl.minimum(tl.maximum(bound, so_far), highest)
        tl.store(TARGET + entry, tl.associative_scan(bound, 0, _larger), mask=entry < num_entries)
        so_far = tl.max(bound)
    return so_far


_NUMBERS = "batch_size max_rows num_entries num_pages page_size"


@triton.jit(do_not_specialize=_NUMBERS.split())
def ingest_table(
    QO_INDPTR, KV_INDPTR, KV_LENS, KV_INDICES,  # the table as it is
    SAFE_QO_INDPTR, SAFE_KV_INDPTR, SAFE_KV_LENS, SAFE_KV_INDICES,  # as the kernels read it
    batch_size, max_rows, num_entries, num_pages, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a table, with one request more for the rows past the last token.

    The first program copies bounds and lengths, each of the others `BLOCK` of `num_entries` ids.
    """
    lane = tl.arange(0, BLOCK)
    if tl.program_id(0) > 0:
        entry = (tl.program_id(0) - 1) * BLOCK + lane
        page = tl.load(KV_INDICES + entry, mask=entry < num_entries, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        tl.store(SAFE_KV_INDICES + entry, page, mask=entry < num_entries)
        return
    _copy_bounds(QO_INDPTR, SAFE_QO_INDPTR, batch_size + 1, max_rows, BLOCK)
    last = _copy_bounds(KV_INDPTR, SAFE_KV_INDPTR, batch_size + 1, num_entries, BLOCK)
    tl.store(SAFE_QO_INDPTR + batch_size + 1, max_rows)
    tl.store(SAFE_KV_INDPTR + batch_size + 1, last)
    tl.store(SAFE_KV_LENS + batch_size, 0)
    tl.debug_barrier()  # below, threads read what others stored above
    for begin in range(0, batch_size, BLOCK):
        r = begin + lane
        known = r < batch_size
        owned = tl.load(SAFE_KV_INDPTR + r + 1, mask=known, other=0)
        owned -= tl.load(SAFE_KV_INDPTR + r, mask=known, other=0)
        kv_len = tl.maximum(tl.load(KV_LENS + r, mask=known, other=0), 0)
        # not `owned * page_size`, which may not fit 32 bits
        fits = kv_len // page_size + (kv_len % page_size > 0).to(tl.int32) <= owned
        tl.store(SAFE_KV_LENS + r, tl.where(fits, kv_len, owned * page_size), mask=known)

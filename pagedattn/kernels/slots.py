"""Where the new keys and values of a step belong: a flat slot for every query token."""

import triton
import triton.language as tl


@triton.jit
def find(ENDS, at, batch_size, search_steps):
    """The last request whose entry of `ENDS` is not above `at`; batch_size < 2 ** search_steps."""
    low = tl.zeros_like(at)
    high = low + batch_size
    for _ in range(search_steps):
        middle = (low + high) // 2
        right = tl.load(ENDS + middle) <= at
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def store_slots(
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, SLOTS, token, num_rows, page_size, batch_size,
    search_steps,
):  # fmt: skip
    """Write `SLOTS[token]`: `page * page_size + offset`; -1 for tokens that have no key."""
    known = token < num_rows
    request = find(QO_INDPTR, token, batch_size, search_steps)
    qo_end = tl.load(QO_INDPTR + request + 1, mask=known, other=0)
    position = tl.load(KV_LENS + request, mask=known, other=0) - qo_end + token
    has_slot = known & (position >= 0)
    place = tl.load(KV_INDPTR + request, mask=has_slot, other=0) + position // page_size
    page = tl.load(KV_INDICES + place, mask=has_slot, other=0).to(tl.int64)
    tl.store(SLOTS + token, tl.where(has_slot, page * page_size + position % page_size, -1), known)

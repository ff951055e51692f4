"""The schedule, built on the device by one program: who computes what in this step.

The rows of a request are its queries times the query heads of one KV head, token by token. Few rows go to
the short list, in blocks of `SHORT_ROWS` rows whose keys are split into chunks; many rows go to the long
list, in blocks of `LONG_ROWS` rows. A unit of work is an entry of a list for one KV head.

    header       i32[4]      short entries, long entries, tiles in a chunk, 0
    short_units  i32[n, 4]   request, row block, split, splits of this row block
    long_units   i32[n, 2]   request, row block; last rows first, since they see the most keys

The splits of one row block stand one after another. Chunks are equal over the whole batch, so that
every program has about the same work.
"""

import triton
import triton.language as tl

from pagedattn.kernels.masks import first_key


@triton.jit
def short_tiles(kv_len, qo_len, window_left, SHORT_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Tiles of keys that a short request visits: from its first query's first key to its last key."""
    first = first_key(kv_len - qo_len, window_left, HAS_WINDOW) // SHORT_TILE
    return tl.maximum((kv_len + SHORT_TILE - 1) // SHORT_TILE - first, 0), first


@triton.jit
def _load_requests(
    QO_INDPTR, KV_LENS, begin, batch_size, GROUP: tl.constexpr, MAX_SHORT_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = begin + tl.arange(0, BLOCK)
    known = r < batch_size
    qo_begin = tl.load(QO_INDPTR + r, mask=known, other=0)
    qo_len = tl.load(QO_INDPTR + r + 1, mask=known, other=0) - qo_begin
    kv_len = tl.load(KV_LENS + r, mask=known, other=0)
    is_short = qo_len * GROUP <= MAX_SHORT_ROWS
    return r, known, qo_len, kv_len, is_short


@triton.jit
def _find(CUMULATIVE, entry, batch_size, search_steps):
    """The request that owns `entry`: the last one whose first entry is not after it."""
    low = tl.zeros_like(entry)
    high = low + batch_size
    for _ in range(search_steps):
        middle = (low + high) // 2
        right = tl.load(CUMULATIVE + middle) <= entry
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=["batch_size", "num_kv_heads", "window_left", "target_units", "search_steps"])
def build_schedule(
    QO_INDPTR, KV_LENS,  # i32[batch + 1], i32[batch]
    HEADER, SHORT_UNITS, LONG_UNITS,  # the schedule
    SHORT_FIRST, LONG_FIRST, SPLITS,  # i32[batch] each: first entry of a request, and its splits
    ARRIVED,  # i32[short units]: zeroed for the entries of this step
    batch_size, num_kv_heads, window_left, target_units, search_steps,
    GROUP: tl.constexpr, MAX_SHORT_ROWS: tl.constexpr, SHORT_ROWS: tl.constexpr,
    SHORT_TILE: tl.constexpr, LONG_ROWS: tl.constexpr, MIN_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Build both lists; `target_units` is how many short units fill the machine."""
    cost = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, batch_size, BLOCK):
        _, _, qo_len, kv_len, is_short = _load_requests(
            QO_INDPTR, KV_LENS, begin, batch_size, GROUP, MAX_SHORT_ROWS, BLOCK
        )
        tiles, _ = short_tiles(kv_len, qo_len, window_left, SHORT_TILE, HAS_WINDOW)
        blocks = (qo_len * GROUP + SHORT_ROWS - 1) // SHORT_ROWS
        cost += tl.where(is_short, tiles * blocks, 0).to(tl.int64) * num_kv_heads
    chunk = tl.maximum((tl.sum(cost) + target_units - 1) // target_units, MIN_CHUNK).to(tl.int32)

    num_short = 0
    num_long = 0
    for begin in range(0, batch_size, BLOCK):
        r, known, qo_len, kv_len, is_short = _load_requests(
            QO_INDPTR, KV_LENS, begin, batch_size, GROUP, MAX_SHORT_ROWS, BLOCK
        )
        tiles, _ = short_tiles(kv_len, qo_len, window_left, SHORT_TILE, HAS_WINDOW)
        splits = tl.maximum((tiles + chunk - 1) // chunk, 1)
        short = (qo_len * GROUP + SHORT_ROWS - 1) // SHORT_ROWS * splits
        short = tl.where(is_short, short, 0)
        long = tl.where(is_short, 0, (qo_len * GROUP + LONG_ROWS - 1) // LONG_ROWS)
        tl.store(SPLITS + r, splits, mask=known)
        tl.store(SHORT_FIRST + r, num_short + tl.cumsum(short, 0) - short, mask=known)
        tl.store(LONG_FIRST + r, num_long + tl.cumsum(long, 0) - long, mask=known)
        num_short += tl.sum(short)
        num_long += tl.sum(long)
    tl.store(HEADER, num_short)
    tl.store(HEADER + 1, num_long)
    tl.store(HEADER + 2, chunk)
    tl.debug_barrier()  # the lists below read what other threads stored above

    for begin in range(0, num_short, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        used = entry < num_short
        r = _find(SHORT_FIRST, entry, batch_size, search_steps)
        local = entry - tl.load(SHORT_FIRST + r)
        splits = tl.load(SPLITS + r)
        tl.store(SHORT_UNITS + entry * 4, r, mask=used)
        tl.store(SHORT_UNITS + entry * 4 + 1, local // splits, mask=used)
        tl.store(SHORT_UNITS + entry * 4 + 2, local % splits, mask=used)
        tl.store(SHORT_UNITS + entry * 4 + 3, splits, mask=used)
    for begin in range(0, num_short * num_kv_heads, BLOCK):
        unit = begin + tl.arange(0, BLOCK)
        tl.store(ARRIVED + unit, 0, mask=unit < num_short * num_kv_heads)
    for begin in range(0, num_long, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        used = entry < num_long
        r = _find(LONG_FIRST, entry, batch_size, search_steps)
        local = entry - tl.load(LONG_FIRST + r)
        qo_len = tl.load(QO_INDPTR + r + 1) - tl.load(QO_INDPTR + r)
        blocks = (qo_len * GROUP + LONG_ROWS - 1) // LONG_ROWS
        tl.store(LONG_UNITS + entry * 2, r, mask=used)
        tl.store(LONG_UNITS + entry * 2 + 1, blocks - 1 - local, mask=used)

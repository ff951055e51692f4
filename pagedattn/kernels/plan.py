"""The schedule, built on the device by one program: who computes what in this step.

The rows of a request are its queries times the query heads of one KV head, token by token.

A request of few rows is short: blocks of `short_rows` rows, each over the same tiles of keys. The
work of all short requests is one line of tiles, ordered by request, block, KV head and tile,
which is cut into equal chunks, one for each program of the grid, wherever a chunk happens to end.
So every program has the same work, whatever the lengths are. A (block, head) that a cut goes
through is merged from its pieces: see `merge.py`.
Source of the idea: stream-K, arXiv 2301.03598; for attention LeanAttention, arXiv 2405.10480.

A request of many rows is long: one unit of work a block of `long_rows` rows and KV head.

    header       i32[3]              tiles of a chunk, tiles of the line, long entries
    short_ends   i32[batch + 1]      tiles of the line before each request, for one KV head
    short_first  i32[programs]       request in which each program's chunk begins
    long_units   i32[n, 2]           request, row block; last rows first: they see the most keys
"""

import triton
import triton.language as tl

from pagedattn.kernels.masks import first_key


@triton.jit
def short_tiles(kv_len, qo_len, window_left, tile, HAS_WINDOW: tl.constexpr):
    """How many tiles each block of a short request visits, and the first; without keys still one.

    From the first key that the request's first query sees to the last key.
    """
    first = first_key(kv_len - qo_len, window_left, HAS_WINDOW) // tile
    return tl.maximum((kv_len + tile - 1) // tile - first, 1), first


@triton.jit
def _find(ENDS, at, batch_size, search_steps):
    """The last request whose entry of `ENDS` is not above `at`."""
    low = tl.zeros_like(at)
    high = low + batch_size
    for _ in range(search_steps):
        middle = (low + high) // 2
        right = tl.load(ENDS + middle) <= at
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


_NUMBERS = (
    "batch_size num_kv_heads group window_left num_programs search_steps "
    "max_short_rows short_rows short_tile long_rows min_chunk"
)


@triton.jit(do_not_specialize=_NUMBERS.split())
def build_schedule(
    QO_INDPTR, KV_LENS,  # i32[batch + 1], i32[batch]
    HEADER, SHORT_ENDS, SHORT_FIRST, LONG_UNITS,  # the schedule
    LONG_ENDS,  # i32[batch + 1]: scratch
    ARRIVED,  # i32[programs]: zeroed
    batch_size, num_kv_heads, group, window_left, num_programs, search_steps,
    max_short_rows, short_rows, short_tile, long_rows, min_chunk,  # tile choices
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Build the schedule for a short grid of `num_programs`; one compilation serves every spec."""
    lane = tl.arange(0, BLOCK)
    short_end = 0
    long_end = 0
    tl.store(SHORT_ENDS, 0)
    tl.store(LONG_ENDS, 0)
    for begin in range(0, batch_size, BLOCK):
        r = begin + lane
        known = r < batch_size
        qo_begin = tl.load(QO_INDPTR + r, mask=known, other=0)
        qo_len = tl.load(QO_INDPTR + r + 1, mask=known, other=0) - qo_begin
        kv_len = tl.load(KV_LENS + r, mask=known, other=0)
        is_short = qo_len * group <= max_short_rows
        tiles, _ = short_tiles(kv_len, qo_len, window_left, short_tile, True)
        short = tl.where(is_short, (qo_len * group + short_rows - 1) // short_rows * tiles, 0)
        long = tl.where(is_short, 0, (qo_len * group + long_rows - 1) // long_rows)
        tl.store(SHORT_ENDS + r + 1, short_end + tl.cumsum(short, 0), mask=known)
        tl.store(LONG_ENDS + r + 1, long_end + tl.cumsum(long, 0), mask=known)
        short_end += tl.sum(short)
        long_end += tl.sum(long)
    num_tiles = short_end * num_kv_heads
    chunk = tl.maximum((num_tiles + num_programs - 1) // num_programs, min_chunk)
    tl.store(HEADER, chunk)
    tl.store(HEADER + 1, num_tiles)
    tl.store(HEADER + 2, long_end)
    tl.debug_barrier()  # below, threads read what others stored above

    for begin in range(0, num_programs, BLOCK):
        program = begin + lane
        r = _find(SHORT_ENDS, program * chunk // num_kv_heads, batch_size, search_steps)
        tl.store(SHORT_FIRST + program, r, mask=program < num_programs)
        tl.store(ARRIVED + program, 0, mask=program < num_programs)
    for begin in range(0, long_end, BLOCK):
        entry = begin + lane
        used = entry < long_end
        r = _find(LONG_ENDS, entry, batch_size, search_steps)
        blocks_after = tl.load(LONG_ENDS + r + 1) - 1 - entry
        tl.store(LONG_UNITS + entry * 2, r, mask=used)
        tl.store(LONG_UNITS + entry * 2 + 1, blocks_after, mask=used)

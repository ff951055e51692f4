"""The schedule, built on the device by one program: who computes what in this step.

The rows of a request are its queries times the query heads of one KV head, token by token.

A request of few rows is short: blocks of `short_rows` rows, each over the same tiles of keys. The
work of all short requests is one line of tiles, ordered by request, block and tile, which is cut
into equal chunks, wherever a chunk happens to end; each KV head has a program for each chunk.
So every program has the same work, whatever the lengths are, and the programs of all heads read
the same pages at the same time. A block that a cut goes through is merged from its pieces, for each
head by itself: see `merge.py`.
Source of the idea: stream-K, arXiv 2301.03598; for attention LeanAttention, arXiv 2405.10480.

Where the blocks of all requests with keys have equally many tiles, chunks are rounded up, by a
fortieth at most, where cuts then fall between blocks or divide each into equal pieces: a block
that is whole needs no merge. On an H200 64 x 4k of 28/4 heads gains 2 % by 63 -> 64 tiles, while
256 x 2k would lose 1.6 % by 249 -> 256.

Batch-invariant, a block is always merged from the same pieces, of `piece_tiles` tiles: a
cut moves to the right, to where a piece begins. Chunks are then equal to within one piece.

A request of many rows is long: blocks of `long_rows` rows, each a unit of work for each KV head.
Few heads at a time are computed where L2 would not keep the keys of all for the next block: long
contexts, and short queries beside, whose keys pass through L2. Else all heads of a page are read at
one time, from where it lies. On an H200, bf16, 32/8 heads of 128 (µs; 8 heads at a time and 1):
64 x 4k decode + 2 x 2k prompts 351, 338, 128 x 8k + 4 x 1k at 8k of context 1655, 1549, 1 x 32k
14530, 14180, but 2 x 2k alone 141, 156 and 64 x 512 495, 529. Two at a time take 1 % less than 1.

    header       i32[4]              tiles of a chunk, tiles of the line, long blocks, and how many
                                     KV heads the long blocks are computed for at a time
    short_ends   i32[batch + 1]      tiles of the line before each request
    short_begin  i32[chunks + 1]     tile of the line at which each chunk begins, and its end
    short_first  i32[chunks]         request in which each chunk begins, before its cut moves
    piece_ends   i32[batch + 1]      batch-invariant: pieces of one KV head before each request
    long_units   i32[long blocks, 2] request, row block; last rows first: they see the most keys
"""

import triton
import triton.language as tl

from pagedattn.kernels.masks import first_key
from pagedattn.kernels.slots import find, store_slots

NO_TILES = tl.constexpr(1 << 30)  # more than any block has, and a power of two


@triton.jit
def short_tiles(kv_len, qo_len, window_left, tile, HAS_WINDOW: tl.constexpr):
    """How many tiles each block of a short request visits, and the first; without keys still one.

    From the first key that the request's first query sees to the last key.
    """
    first = first_key(kv_len - qo_len, window_left, HAS_WINDOW) // tile
    return tl.maximum((kv_len + tile - 1) // tile - first, 1), first


@triton.jit
def _even_chunk(chunk, tiles):
    """A chunk, up to a fortieth larger, that blocks of `tiles` tiles are whole in or divide into.

    `chunk` where there is none.
    """
    parts = tl.maximum(tiles // chunk, 1)
    even = tl.where(chunk > tiles, (chunk + tiles - 1) // tiles * tiles, tiles // parts)
    fits = (chunk > tiles) | (tiles % parts == 0)
    return tl.where(fits & (even * 40 <= chunk * 41), even, chunk)


@triton.jit
def piece_tiles(num_tiles, num_blocks, num_chunks, min_piece):
    """Tiles of a piece of a batch-invariant request: as if it were alone, with a piece a chunk."""
    alone = (num_tiles * num_blocks + num_chunks - 1) // num_chunks
    return tl.maximum(alone, min_piece * num_blocks)


@triton.jit
def _next_piece(at, begin, num_tiles, num_blocks, num_chunks, min_piece):
    """The first tile from `at` on at which a piece of the request at `begin` begins or ends."""
    piece = piece_tiles(num_tiles, num_blocks, num_chunks, min_piece)
    in_block = (at - begin) % num_tiles
    return at - in_block + tl.minimum((in_block + piece - 1) // piece * piece, num_tiles)


_NUMBERS = (
    "batch_size num_rows search_steps num_kv_heads group window_left page_size num_chunks "
    "max_short_rows short_rows short_tile long_rows min_chunk min_piece far_keys"
)


@triton.jit(do_not_specialize=_NUMBERS.split())
def build_schedule(
    QO_INDPTR, KV_INDPTR, KV_LENS, KV_INDICES,  # the table
    HEADER, SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, PIECE_ENDS, LONG_UNITS,  # the schedule
    LONG_ENDS,  # i32[batch + 1]: scratch
    SLOTS,  # i64[num_rows]: see `slots.py`
    ARRIVED,  # i32[chunks * heads], batch-invariant i32[pieces * heads]: zeroed
    batch_size, num_rows, search_steps, num_kv_heads, group, window_left, page_size, num_chunks,
    max_short_rows, short_rows, short_tile, long_rows, min_chunk, min_piece, far_keys,
    BATCH_INVARIANT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Build the schedule, in the first program; each other one writes the slots of `BLOCK` tokens.

    All that depends on the spec is a number, so that one compilation serves every spec.
    """
    lane = tl.arange(0, BLOCK)
    if tl.program_id(0) > 0:
        store_slots(
            QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, SLOTS, (tl.program_id(0) - 1) * BLOCK + lane,
            num_rows, page_size, batch_size, search_steps,
        )  # fmt: skip
        return
    short_end = 0
    min_tiles = 0 + NO_TILES  # of blocks with keys
    max_tiles = 1
    piece_end = 0
    long_end = 0
    tl.store(SHORT_ENDS, 0)
    tl.store(PIECE_ENDS, 0)
    tl.store(LONG_ENDS, 0)
    for begin in range(0, batch_size, BLOCK):
        r = begin + lane
        known = r < batch_size
        qo_begin = tl.load(QO_INDPTR + r, mask=known, other=0)
        qo_len = tl.load(QO_INDPTR + r + 1, mask=known, other=0) - qo_begin
        kv_len = tl.load(KV_LENS + r, mask=known, other=0)
        is_short = qo_len * group <= max_short_rows
        tiles, _ = short_tiles(kv_len, qo_len, window_left, short_tile, True)
        blocks = tl.where(is_short, (qo_len * group + short_rows - 1) // short_rows, 0)
        long = tl.where(is_short, 0, (qo_len * group + long_rows - 1) // long_rows)
        tl.store(SHORT_ENDS + r + 1, short_end + tl.cumsum(blocks * tiles, 0), mask=known)
        tl.store(LONG_ENDS + r + 1, long_end + tl.cumsum(long, 0), mask=known)
        short_end += tl.sum(blocks * tiles)
        long_end += tl.sum(long)
        if BATCH_INVARIANT:
            piece = piece_tiles(tiles, blocks, num_chunks, min_piece)
            pieces = (tiles + piece - 1) // tl.maximum(piece, 1)
            pieces = tl.where(pieces > 1, blocks * pieces, 0)  # one piece goes straight to out
            tl.store(PIECE_ENDS + r + 1, piece_end + tl.cumsum(pieces, 0), mask=known)
            piece_end += tl.sum(pieces)
        else:
            with_keys = tl.where(blocks > 0, tiles, NO_TILES)
            with_keys = tl.where(kv_len > 0, with_keys, NO_TILES)  # one `&` more would spill
            min_tiles = tl.minimum(min_tiles, tl.min(with_keys))
            max_tiles = tl.maximum(max_tiles, tl.max(with_keys & (NO_TILES - 1)))  # NO_TILES: 0
    chunk = tl.maximum((short_end + num_chunks - 1) // num_chunks, min_chunk)
    if not BATCH_INVARIANT:
        chunk = tl.where(min_tiles == max_tiles, _even_chunk(chunk, max_tiles), chunk)
    tl.store(HEADER, chunk)
    tl.store(HEADER + 1, short_end)
    tl.store(HEADER + 2, long_end)
    tl.debug_barrier()  # below, threads read what others stored above

    for begin in range(0, num_chunks + 1, BLOCK):
        index = begin + lane
        at = tl.minimum(index * chunk, short_end)
        r = find(SHORT_ENDS, at, batch_size, search_steps)
        if BATCH_INVARIANT:
            qo_len = tl.load(QO_INDPTR + r + 1) - tl.load(QO_INDPTR + r)
            tiles, _ = short_tiles(tl.load(KV_LENS + r), qo_len, window_left, short_tile, True)
            blocks = (qo_len * group + short_rows - 1) // short_rows
            request_begin = tl.load(SHORT_ENDS + r)
            cut = _next_piece(
                at, request_begin, tiles, tl.maximum(blocks, 1), num_chunks, min_piece
            )
            at = tl.where(at < short_end, cut, short_end)
        tl.store(SHORT_BEGIN + index, at, mask=index <= num_chunks)
        tl.store(SHORT_FIRST + index, r, mask=index < num_chunks)
    num_counters = (piece_end if BATCH_INVARIANT else num_chunks) * num_kv_heads
    for begin in range(0, num_counters, BLOCK):
        tl.store(ARRIVED + begin + lane, 0, mask=begin + lane < num_counters)
    max_keys = 0  # of long requests
    for begin in range(0, long_end, BLOCK):
        entry = begin + lane
        used = entry < long_end
        r = find(LONG_ENDS, entry, batch_size, search_steps)
        blocks_after = tl.load(LONG_ENDS + r + 1) - 1 - entry
        tl.store(LONG_UNITS + entry * 2, r, mask=used)
        tl.store(LONG_UNITS + entry * 2 + 1, blocks_after, mask=used)
        max_keys = tl.maximum(max_keys, tl.max(tl.load(KV_LENS + r, mask=used, other=0)))
    are_few = (short_end > 0) | (max_keys > far_keys)
    tl.store(HEADER + 3, tl.where(are_few, 2 - num_kv_heads % 2, num_kv_heads))

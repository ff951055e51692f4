"""The warpgroup of the Gluon kernel that gathers rows, of long queries: see `hopper.py`.

It stands in for the warps of `hopper_producer.py` where pages are no boxes of the copy engine, or
no rows of a matrix: each thread copies pieces of 16 bytes, from wherever they are. Rows that the
request does not own become 0. Units it takes itself: a partition more would be a warpgroup more, of
whose registers the consumers have need.

The copies of a tile are awaited once those of the next are started, so two tiles are on their way
at any time, and the ids of its pages are loaded a tile ahead. Before a buffer is waited for, all
tiles are announced but the one before, which no consumer needs to free it: two buffers suffice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pagedattn.kernels.gluon_names import async_copy, copy_rows, sync_threads
from pagedattn.kernels.hopper_units import (
    hand_over,
    leave,
    locate,
    next_unit,
    tile_bounds,
    wait_for_room,
)
from pagedattn.kernels.masks import first_key

WARPS = gl.constexpr(4)
PIECE = gl.constexpr(8)  # elements of a copy


@gluon.jit
def _load_page_ids(
    page_ids, first, kv_len, tile, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr
):
    """The page of each key of a tile; -1 for keys outside `[first, kv_len)`."""
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
    owned = (key >= first) & (key < kv_len)
    return gl.load(page_ids + key // PAGE_SIZE, mask=owned, other=-1)


@gluon.jit
def _copy_tile(
    cache, pages, tile, kv_head, page_stride, token_stride, empty, freed, buffer,
    PAGE_SIZE: gl.constexpr, TILE: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile, once its buffer is free; rows of no page become 0."""
    mbarrier.wait(empty, freed)
    # after the wait, over which pointers would fill the registers
    place = (tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, ROWS))) % PAGE_SIZE
    pieces = pages.to(gl.int64) * (page_stride // PIECE)
    pieces += place.to(gl.int64) * (token_stride // PIECE)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROWS))
    rows = cache + kv_head * HEAD_DIM + pieces[:, None] * PIECE + dims[None, :]
    copy_rows(buffer, rows, mask=(pages >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _announce(full, LATER: gl.constexpr):
    """Tell the consumers of the copies before the last `LATER`, when they are complete."""
    async_copy.wait_group(LATER)
    # each thread makes its own writes visible to the tensor cores before one tells of all of them
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(full, count=1)


@gluon.jit
def gather(
    k_pages, v_pages, KV_INDICES, window_left, k_page_stride, k_token_stride, v_page_stride,
    v_token_stride, rings, QO_INDPTR, KV_INDPTR, KV_LENS, UNITS, TURNS, total_programs, num_units,
    num_kv_heads, heads_at_once, handover,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Take units until none is left; tell the consumers of each, and fill the rings with it."""
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    # eight threads copy 128 bytes of a row: a line of memory, and all banks of shared memory
    ROWS: gl.constexpr = gl.BlockedLayout([1, PIECE], [4, 8], [WARPS, 1], [1, 0])
    count = 0
    turn = 0
    unit = next_unit(TURNS)
    while unit < num_units:
        block, kv_head, qo_begin, qo_len, kv_len, page_begin = locate(
            unit, QO_INDPTR, KV_INDPTR, KV_LENS, UNITS, num_units, num_kv_heads, heads_at_once
        )
        wait_for_room(handover, turn)
        hand_over(handover, (block, kv_head, qo_begin, qo_len, kv_len, page_begin), WARPS)
        page_ids = KV_INDICES + page_begin
        begin, _left, _right, end = tile_bounds(
            block, qo_len, kv_len, window_left, GROUP, TILE, CAUSAL, HAS_WINDOW
        )
        first = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
        pages = _load_page_ids(page_ids, first, kv_len, end - 1, PAGE_SIZE, TILE, ROWS)
        before = 0
        for back in range(0, end - begin):
            tile = end - 1 - back
            slot = count % STAGES
            freed = ((count // STAGES) & 1) ^ 1
            _copy_tile(
                k_pages, pages, tile, kv_head, k_page_stride, k_token_stride,
                k_empty.index(slot), freed, k_ring.index(slot), PAGE_SIZE, TILE, HEAD_DIM, ROWS,
            )  # fmt: skip
            if back > 0:
                _announce(k_full.index(before), 2)
            # after the last tile its own once more: there may be no page before it
            following = _load_page_ids(
                page_ids, first, kv_len, gl.maximum(tile - 1, begin), PAGE_SIZE, TILE, ROWS
            )
            _copy_tile(
                v_pages, pages, tile, kv_head, v_page_stride, v_token_stride,
                v_empty.index(slot), freed, v_ring.index(slot), PAGE_SIZE, TILE, HEAD_DIM, ROWS,
            )  # fmt: skip
            if back > 0:
                _announce(v_full.index(before), 2)
            pages = following
            before = slot
            count += 1
        _announce(k_full.index(before), 1)
        _announce(v_full.index(before), 0)
        turn += 1
        unit = next_unit(TURNS)
    wait_for_room(handover, turn)
    hand_over(handover, (0, 0, 0, 0, 0, 0), WARPS)
    leave(TURNS, 1, total_programs)

"""Two warps of the Gluon kernel that compute nothing, where queries are long.

One finds blocks for the other partitions, so that none of them waits for the counter and the table.
One brings the blocks' K and V tiles to two rings in shared memory, one box of the copy engine a
page, and the ids of a tile's pages while it waits for room for the tile before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedattn.kernels.gluon_names import copy_box
from pagedattn.kernels.hopper_units import (
    FIELDS,
    hand_over,
    leave,
    locate,
    next_unit,
    receive,
    tile_bounds,
    wait_for_room,
)
from pagedattn.kernels.masks import first_key


@gluon.jit
def hand_out(
    QO_INDPTR, KV_INDPTR, KV_LENS, UNITS, TURNS, total_programs, num_units, num_kv_heads,
    heads_at_once, handover, is_last,
):  # fmt: skip
    """Take units until none is left, and tell the other partitions of each.

    `is_last`: then the program takes nothing more, see `leave`.
    """
    turn = 0
    unit = next_unit(TURNS)
    while unit < num_units:
        block, kv_head, qo_begin, qo_len, kv_len, page_begin = locate(
            unit, QO_INDPTR, KV_INDPTR, KV_LENS, UNITS, num_units, num_kv_heads, heads_at_once
        )
        hand_over(handover, (block, kv_head, qo_begin, qo_len, kv_len, page_begin), 1)
        turn += 1
        # before it takes the next: a unit taken early is missing where another program is free
        wait_for_room(handover, turn)
        unit = next_unit(TURNS)
    hand_over(handover, (0, 0, 0, 0, 0, 0), 1)
    if is_last:
        leave(TURNS, 2, 2 * total_programs)


@gluon.jit
def _load_page_ids(
    page_ids, first, kv_len, tile, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr, BOX: gl.constexpr
):
    """The page of each box of a tile; 0 for pages without a key of `[first, kv_len)`."""
    pages = ()
    for j in gl.static_range(TILE // BOX):
        key = tile * TILE + j * BOX
        owned = (key < kv_len) & (key + BOX > first)
        pages = pages + (gl.load(page_ids + key // PAGE_SIZE, mask=owned, other=0),)  # noqa: RUF005
    return pages


@gluon.jit
def _copy_tile(
    cache, pages, tile, column, rows_per_page, full, empty, freed, buffer,
    PAGE_SIZE: gl.constexpr, FROM: gl.constexpr, TILE: gl.constexpr, BOX: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile, once its buffer is free."""
    mbarrier.wait(empty, freed)
    mbarrier.expect(full, TILE * HEAD_DIM * 2)
    for j in gl.static_range(TILE // BOX):
        row = pages[j] * rows_per_page + (tile * TILE + j * BOX) % PAGE_SIZE
        copy_box(cache, [row, column], full, buffer.slice(FROM + j * BOX, BOX, 0))


@gluon.jit
def bring_tiles(
    k_pages, v_pages, page_ids, begin, end, first, kv_len, column, k_rows_per_page,
    v_rows_per_page, rings, count,
    PAGE_SIZE: gl.constexpr, BOX: gl.constexpr, FROM: gl.constexpr, TILE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the rings with tiles `[begin, end)` of a request, the last first; return the new count.

    Only keys of `[first, kv_len)` are the request's; `count` is of the tiles before these. Tiles
    begin at row `FROM` of their slots.
    """
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    pages = _load_page_ids(page_ids, first, kv_len, end - 1, PAGE_SIZE, TILE, BOX)
    for back in range(0, end - begin):
        tile = end - 1 - back
        slot = count % STAGES
        freed = ((count // STAGES) & 1) ^ 1
        _copy_tile(
            k_pages, pages, tile, column, k_rows_per_page, k_full.index(slot),
            k_empty.index(slot), freed, k_ring.index(slot), PAGE_SIZE, FROM, TILE, BOX, HEAD_DIM,
        )  # fmt: skip
        # after the last tile its own once more: there may be no page before it
        following = _load_page_ids(
            page_ids, first, kv_len, gl.maximum(tile - 1, begin), PAGE_SIZE, TILE, BOX
        )
        _copy_tile(
            v_pages, pages, tile, column, v_rows_per_page, v_full.index(slot),
            v_empty.index(slot), freed, v_ring.index(slot), PAGE_SIZE, FROM, TILE, BOX, HEAD_DIM,
        )  # fmt: skip
        pages = following
        count += 1
    return count


@gluon.jit
def produce(
    k_pages, v_pages, KV_INDICES, window_left, k_page_stride, k_token_stride, v_page_stride,
    v_token_stride, rings, handover,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Fill the rings with the tiles of every block that this program takes."""
    # a token is a row, so these are few, however far pages are apart
    k_rows_per_page = (k_page_stride // k_token_stride).to(gl.int32)
    v_rows_per_page = (v_page_stride // v_token_stride).to(gl.int32)
    count = 0
    turn = 0
    block, kv_head, _qo_begin, qo_len, kv_len, page_begin = receive(handover, turn, FIELDS, 1)
    while qo_len > 0:
        begin, _left, _right, end = tile_bounds(
            block, qo_len, kv_len, window_left, GROUP, TILE, CAUSAL, HAS_WINDOW
        )
        first = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
        count = bring_tiles(
            k_pages, v_pages, KV_INDICES + page_begin, begin, end, first, kv_len,
            kv_head * HEAD_DIM, k_rows_per_page, v_rows_per_page, rings, count,
            PAGE_SIZE, BOX, 0, TILE, HEAD_DIM, STAGES,
        )  # fmt: skip
        turn += 1
        block, kv_head, _qo_begin, qo_len, kv_len, page_begin = receive(handover, turn, FIELDS, 1)

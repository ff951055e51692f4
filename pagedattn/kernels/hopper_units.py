"""Units of the Gluon kernels: who takes which, what of them is where.

One partition of each program tells the others, through a few cells in shared memory, which one
comes next. For long queries a unit is a block of 128 rows of one KV head, taken from a counter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedattn.kernels.masks import end_key, first_key

HALF = gl.constexpr(64)  # rows of a consumer: what one warpgroup's instruction multiplies
FIELDS = gl.constexpr(6)  # numbers that describe a unit


@gluon.jit
def next_unit(TURNS):
    """The unit that no program has taken yet, of this launch or another of the step."""
    return gl.atomic_add(TURNS, 1, sem="relaxed")


@gluon.jit
def leave(TURNS, count, total):
    """Count `count` of those who take no more, `total` in all; the last resets the counters."""
    if gl.atomic_add(TURNS + 1, count) == total - count:
        gl.store(TURNS, 0)
        gl.store(TURNS + 1, 0)
        gl.store(TURNS + 2, 0)


@gluon.jit
def locate(
    unit, QO_INDPTR, KV_INDPTR, KV_LENS, UNITS, num_units, num_kv_heads, heads_at_once
):  # fmt: skip
    """Block, KV head, first query token, query tokens, keys and first page id of a unit.

    The whole list comes for `heads_at_once` heads, and again for the next: each entry's units for
    these follow one another. See `plan.py`.
    """
    units_at_once = num_units // num_kv_heads * heads_at_once
    entry = unit % units_at_once // heads_at_once
    kv_head = unit // units_at_once * heads_at_once + unit % heads_at_once
    request = gl.load(UNITS + entry * 2)
    block = gl.load(UNITS + entry * 2 + 1)
    qo_begin = gl.load(QO_INDPTR + request)
    qo_len = gl.load(QO_INDPTR + request + 1) - qo_begin
    kv_len = gl.load(KV_LENS + request)
    page_begin = gl.load(KV_INDPTR + request)
    return block, kv_head, qo_begin, qo_len, kv_len, page_begin


@gluon.jit
def _put(cell, value, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    cell.store(gl.full([1], value, gl.int32, LAYOUT))


@gluon.jit
def _get(cell, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(cell.load(LAYOUT), 0)


@gluon.jit
def wait_for_room(handover, turn):
    """Wait until all have received the unit before that of this turn."""
    _cells, _full, empty = handover
    mbarrier.wait(empty.index(0), (turn & 1) ^ 1)


@gluon.jit
def hand_over(handover, unit, WARPS: gl.constexpr):
    """Tell the other partitions the numbers of this turn's unit, for which there must be room."""
    cells, full, _empty = handover
    for i in gl.static_range(len(unit)):
        _put(cells.index(i), unit[i], WARPS)
    mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def receive(handover, turn, FIELDS: gl.constexpr, WARPS: gl.constexpr):
    """The numbers of this turn's unit, in a partition of so many warps."""
    cells, full, empty = handover
    mbarrier.wait(full.index(0), turn & 1)
    unit = ()
    for i in gl.static_range(FIELDS):
        unit = unit + (_get(cells.index(i), WARPS),)  # noqa: RUF005
    mbarrier.arrive(empty.index(0), count=1)
    return unit


@gluon.jit
def tile_bounds(
    block, qo_len, kv_len, window_left,
    GROUP: gl.constexpr, TILE: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Tiles `[begin, end)` hold keys that some row sees; every row sees `[left, right)` whole.

    Where no row sees a key there still is one tile, of which nothing is visible.
    """
    top = kv_len - qo_len + block * (2 * HALF) // GROUP
    last_row = block * (2 * HALF) + 2 * HALF - 1
    bottom = kv_len - qo_len + gl.minimum(last_row // GROUP, qo_len - 1)
    begin = first_key(top, window_left, HAS_WINDOW) // TILE
    end = (end_key(bottom, kv_len, CAUSAL) + TILE - 1) // TILE
    end = gl.maximum(end, begin + 1)
    left, right = whole_tiles(
        top, bottom, begin, end, kv_len, window_left, TILE, CAUSAL, HAS_WINDOW
    )
    return begin, left, right, end


@gluon.jit
def whole_tiles(
    top, bottom, begin, end, kv_len, window_left,
    TILE: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Of tiles `[begin, end)` those that rows from position `top` to `bottom` see whole.

    Never the last, where the consumers begin.
    """
    left = (first_key(bottom, window_left, HAS_WINDOW) + TILE - 1) // TILE
    right = end_key(top, kv_len, CAUSAL) // TILE
    right = gl.maximum(gl.minimum(right, end - 1), begin)
    left = gl.minimum(gl.maximum(left, begin), right)
    return left, right


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of shared memory, each of which that many arrivals release."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def cells_of(FIELDS: gl.constexpr):
    """Shared memory through which one partition tells others so many numbers."""
    return gl.allocate_shared_memory(
        gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )

"""Units of the Gluon kernel for long queries: who takes which, what of them is where.

A program's producer takes units from a counter and tells its consumers, through a small ring in
shared memory, which ones it took.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedattn.kernels.masks import end_key, first_key

HALF = gl.constexpr(64)  # rows of a consumer: what one warpgroup's instruction multiplies
UNITS_AHEAD = gl.constexpr(2)  # units that the producer may have told of and consumers not taken
FIELDS = gl.constexpr(5)  # numbers that describe a unit


@gluon.jit
def next_unit(TURNS):
    """The unit that no program has taken yet; the first ones go to the programs in order."""
    return gl.atomic_add(TURNS, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def leave(TURNS):
    """Count the programs that took their last unit; the last of them resets the counters."""
    if gl.atomic_add(TURNS + 1, 1) == gl.num_programs(0) - 1:
        gl.store(TURNS, 0)
        gl.store(TURNS + 1, 0)


@gluon.jit
def _put(cell, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    cell.store(gl.full([1], value, gl.int32, LAYOUT))


@gluon.jit
def _get(cell):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(cell.load(LAYOUT), 0)


@gluon.jit
def hand_over(handover, turn, block, kv_head, qo_begin, qo_len, kv_len):
    """Tell the consumers the unit of this turn."""
    cells, full, empty = handover
    slot = turn % UNITS_AHEAD
    mbarrier.wait(empty.index(slot), ((turn // UNITS_AHEAD) & 1) ^ 1)
    _put(cells.index(slot * FIELDS), block)
    _put(cells.index(slot * FIELDS + 1), kv_head)
    _put(cells.index(slot * FIELDS + 2), qo_begin)
    _put(cells.index(slot * FIELDS + 3), qo_len)
    _put(cells.index(slot * FIELDS + 4), kv_len)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def receive(handover, turn):
    """The unit of this turn; it has no queries where there is none."""
    cells, full, empty = handover
    slot = turn % UNITS_AHEAD
    mbarrier.wait(full.index(slot), (turn // UNITS_AHEAD) & 1)
    block = _get(cells.index(slot * FIELDS))
    kv_head = _get(cells.index(slot * FIELDS + 1))
    qo_begin = _get(cells.index(slot * FIELDS + 2))
    qo_len = _get(cells.index(slot * FIELDS + 3))
    kv_len = _get(cells.index(slot * FIELDS + 4))
    mbarrier.arrive(empty.index(slot), count=1)
    return block, kv_head, qo_begin, qo_len, kv_len


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
    left = (first_key(bottom, window_left, HAS_WINDOW) + TILE - 1) // TILE
    right = end_key(top, kv_len, CAUSAL) // TILE
    right = gl.maximum(gl.minimum(right, end - 1), begin)
    left = gl.minimum(gl.maximum(left, begin), right)
    return begin, left, right, end


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of shared memory, each of which that many arrivals release."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made

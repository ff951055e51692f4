"""Rows of long queries on their way to the Gluon kernel's consumers, in buffers that take turns.

Whoever finds a block copies its rows, 16 bytes at a time, from wherever they are; its consumers
give a buffer back when they have stored through it what they made of the rows. Where there are two
buffers, the next block's first scores are begun before that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pagedattn.kernels.gluon_names import async_copy, copy_rows, sync_threads
from pagedattn.kernels.hopper_units import HALF, barriers

PIECE = gl.constexpr(8)  # elements of a copy


@gluon.jit
def make_queries(HEAD_DIM: gl.constexpr, DTYPE: gl.constexpr, Q_STAGES: gl.constexpr):
    """Buffers for the two consumers' rows, and the barriers of each turn."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], DTYPE)
    buffers = gl.allocate_shared_memory(DTYPE, [2 * Q_STAGES, HALF, HEAD_DIM], LAYOUT)
    return buffers, barriers(Q_STAGES, 1), barriers(Q_STAGES, 2)


@gluon.jit
def bring_queries(
    Q, queries, turn, block, kv_head, qo_begin, qo_len, q_stride,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, Q_STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a block's rows, once there is room; those that are not there are 0."""
    buffers, _full, empty = queries
    mbarrier.wait(empty.index(turn % Q_STAGES), ((turn // Q_STAGES) & 1) ^ 1)
    SOME: gl.constexpr = 16 * WARPS  # rows at once: what the registers hold of pointers
    ROWS: gl.constexpr = gl.BlockedLayout([1, PIECE], [4, 8], [WARPS, 1], [1, 0])
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROWS))
    for part in gl.static_range(2 * HALF // SOME):
        row = block * (2 * HALF) + part * SOME + gl.arange(0, SOME, gl.SliceLayout(1, ROWS))
        token = (qo_begin + row // GROUP).to(gl.int64)
        at_q = token * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
        half = (turn % Q_STAGES) * 2 + part * SOME // HALF
        rows = buffers.index(half).slice(part * SOME % HALF, SOME, 0)
        copy_rows(rows, Q + at_q[:, None] + dims[None, :], mask=(row < qo_len * GROUP)[:, None])
    async_copy.commit_group()


@gluon.jit
def announce(full, LATER: gl.constexpr):
    """Tell of the copies before the last `LATER`, when they are complete."""
    async_copy.wait_group(LATER)
    # each thread makes its own writes visible to the tensor cores before one tells of all of them
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(full, count=1)

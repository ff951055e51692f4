"""Long queries in the Gluon kernel: its two consumers take half of a block's rows each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from pagedattn.kernels.hopper_rows import attend, load_rows, store_rows
from pagedattn.kernels.hopper_units import FIELDS, HALF, receive, tile_bounds
from pagedattn.kernels.masks import first_key


@gluon.jit
def consume_blocks(
    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap,
    q_stride, out_stride, q_buffers, rings, handover,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Compute half of the rows of every block that this program takes."""
    _k_ring, _k_full, _k_empty, _v_ring, _v_full, v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    q_buffer = q_buffers.index(CONSUMER)
    count = 0  # tiles before this one
    turn = 0
    block, kv_head, qo_begin, qo_len, kv_len, _page_begin = receive(handover, turn, FIELDS, 4)
    first_row = block * (2 * HALF) + CONSUMER * HALF
    q = load_rows(Q, first_row, qo_len * GROUP, qo_begin, kv_head, q_stride, GROUP, HEAD_DIM)
    while qo_len > 0:
        q_buffer.store(q)
        fence_async_shared()
        begin, left, right, end = tile_bounds(
            block, qo_len, kv_len, window_left, GROUP, TILE, CAUSAL, HAS_WINDOW
        )
        position = kv_len - qo_len + (first_row + gl.arange(0, HALF, gl.SliceLayout(1, S))) // GROUP
        owned_from = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
        m, l, acc_next, slot, count = attend(
            q_buffer, rings, count, begin, left, right, end, position, owned_from, kv_len,
            window_left, score_scale, cap,
            HEAD_DIM, 0, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP,
        )  # fmt: skip
        this_row, this_head, this_begin, this_len = first_row, kv_head, qo_begin, qo_len
        # the next unit's rows arrive while this one's last product is made and its rows are stored
        turn += 1
        block, kv_head, qo_begin, qo_len, kv_len, _page_begin = receive(handover, turn, FIELDS, 4)
        first_row = block * (2 * HALF) + CONSUMER * HALF
        q = load_rows(Q, first_row, qo_len * GROUP, qo_begin, kv_head, q_stride, GROUP, HEAD_DIM)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(slot), count=1)
        store_rows(
            OUT, LSE, q_buffer, m, l, acc, this_row, this_len * GROUP, this_begin, this_head,
            num_kv_heads, out_stride, GROUP, HEAD_DIM, WITH_LSE,
        )  # fmt: skip

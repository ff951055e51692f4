"""Long queries in the Gluon kernel: its two consumers take half of a block's rows each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from pagedattn.kernels.hopper_rows import attend, begin_scores, end_scores, store_rows
from pagedattn.kernels.hopper_units import FIELDS, HALF, receive, tile_bounds
from pagedattn.kernels.masks import first_key


@gluon.jit
def _begin(
    queries, rings, turn, count, qo_len,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Begin the first scores of this turn's block, if there is one."""
    buffers, full, _empty = queries
    mbarrier.wait(full.index(turn % Q_STAGES), (turn // Q_STAGES) & 1, pred=qo_len > 0)
    q_buffer = buffers.index((turn % Q_STAGES) * 2 + CONSUMER)
    return begin_scores(q_buffer, rings, count, qo_len > 0, 0, TILE, STAGES)


@gluon.jit
def consume_blocks(
    OUT, LSE, num_kv_heads, window_left, score_scale, cap, out_stride, queries, rings, handover,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Compute half of the rows of every block that this program takes."""
    buffers, _q_full, q_empty = queries
    _k_ring, _k_full, _k_empty, _v_ring, _v_full, v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    count = 0  # tiles before this one
    turn = 0
    block, kv_head, qo_begin, qo_len, kv_len, _page_begin = receive(handover, turn, FIELDS, 4)
    s = end_scores(
        _begin(queries, rings, turn, count, qo_len, CONSUMER, TILE, STAGES, Q_STAGES),
        rings, count, qo_len > 0, STAGES,
    )  # fmt: skip
    while qo_len > 0:
        begin, left, right, end = tile_bounds(
            block, qo_len, kv_len, window_left, GROUP, TILE, CAUSAL, HAS_WINDOW
        )
        first_row = block * (2 * HALF) + CONSUMER * HALF
        position = kv_len - qo_len + (first_row + gl.arange(0, HALF, gl.SliceLayout(1, S))) // GROUP
        owned_from = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
        q_buffer = buffers.index((turn % Q_STAGES) * 2 + CONSUMER)
        m, l, acc_next, slot, count = attend(
            s, q_buffer, rings, count, begin, left, right, end, position, owned_from, kv_len,
            window_left, score_scale, cap,
            HEAD_DIM, 0, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP,
        )  # fmt: skip
        this_head, this_begin, this_end = kv_head, qo_begin, qo_len * GROUP
        turn += 1
        block, kv_head, qo_begin, qo_len, kv_len, _page_begin = receive(handover, turn, FIELDS, 4)
        if Q_STAGES > 1:  # the next block's first scores are made while this one's rows are stored
            scores = _begin(queries, rings, turn, count, qo_len, CONSUMER, TILE, STAGES, Q_STAGES)
            acc = warpgroup_mma_wait(1, deps=[acc_next])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(slot), count=1)
        store_rows(
            OUT, LSE, q_buffer, m, l, acc, first_row, this_end, this_begin, this_head,
            num_kv_heads, out_stride, GROUP, HEAD_DIM, WITH_LSE,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index((turn - 1) % Q_STAGES), count=1)
        if Q_STAGES == 1:
            scores = _begin(queries, rings, turn, count, qo_len, CONSUMER, TILE, STAGES, Q_STAGES)
        s = end_scores(scores, rings, count, qo_len > 0, STAGES)

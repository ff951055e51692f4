"""What a warpgroup of the Gluon kernels does with a block of 64 rows: load, attend, store.

It overlaps the products of one tile with the softmax of another. Tiles go from the last to the
first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagedattn.kernels.hopper_units import HALF
from pagedattn.kernels.softmax import scale_scores

LN_2 = gl.constexpr(0.6931471805599453)
CLEANED = gl.constexpr(16)  # rows of V that are zeroed at once


@gluon.jit
def _zero_foreign_rows(buffer, begin, first, kv_len, TILE: gl.constexpr):
    """Zero the rows of a V tile at key `begin` that are outside `[first, kv_len)`.

    Both consumers may do so at once: they write the same bits.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for j in gl.static_range(TILE // CLEANED):
        low = begin + j * CLEANED
        if (low < first) | (low + CLEANED > kv_len):
            rows = buffer.slice(j * CLEANED, CLEANED, 0)
            key = low + gl.arange(0, CLEANED, gl.SliceLayout(1, LAYOUT))
            owned = (key >= first) & (key < kv_len)
            values = rows.load(LAYOUT)
            rows.store(gl.where(owned[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _add_scores(
    s, m, l, position, kv_len, window_left, start, score_scale, cap,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take a tile of raw products into the running maximum and sum; as in `softmax.py`.

    The scale is applied with the maximum's subtraction, in one instruction.
    """
    if SOFT_CAP:
        s = scale_scores(s, score_scale, cap, True)
        score_scale = 1.0
    if MASKED:
        # In two parts: what a thread compares with then is 16 numbers of the instructions. Whole
        # columns are 32 numbers of each thread, for which all loops would keep registers.
        column = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        eighth = (column & -8)[None, :]
        past = (column & 7)[None, :]
        # columns of the last key and of the first; a causal query is not behind the last key
        last = (position - start)[:, None] if CAUSAL else kv_len - 1 - start
        visible = eighth <= last - past
        if HAS_WINDOW:
            visible = visible & (eighth >= (position - start - window_left)[:, None] - past)
        s = gl.where(visible, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * score_scale)
    m_finite = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf would be NaN
    p = gl.exp2(s * score_scale - m_finite[:, None])
    rescale = gl.exp2(m - m_finite)
    return p, rescale, m_new, l * rescale + gl.sum(p, 1)


@gluon.jit
def part_of(ring, slot, FROM: gl.constexpr, TILE: gl.constexpr):
    """The rows of a slot of a ring that hold a tile, from row `FROM` on."""
    if ring.shape[1] == TILE:
        return ring.index(slot)
    else:
        return ring.index(slot).slice(FROM, TILE, 0)


@gluon.jit
def _sweep(
    m, l, acc, weights, count, after, until, position, kv_len, window_left,
    score_scale, cap, q_buffer, rings,
    FROM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take the tiles below `after`, down to `until`, into the running state.

    `weights` are those of tile `count`, whose values are yet to be added: while the tensor cores
    do that, this consumer computes the weights of the next tile.
    """
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    no_scores = gl.zeros([HALF, TILE], gl.float32, S)
    for back in range(0, after - until):
        v_slot = count % STAGES
        v_phase = (count // STAGES) & 1
        count += 1
        slot = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = part_of(k_ring, slot, FROM, TILE).permute((1, 0))
        s = warpgroup_mma(q_buffer, k, no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        v = part_of(v_ring, v_slot, FROM, TILE)
        acc_next = warpgroup_mma(weights, v, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, rescale, m, l = _add_scores(
            s, m, l, position, kv_len, window_left, (after - 1 - back) * TILE, score_scale, cap,
            CAUSAL, HAS_WINDOW, SOFT_CAP, MASKED,
        )  # fmt: skip
        # narrowed first: half as many registers wait with the sums
        next_weights = gl.convert_layout(p.to(weights.dtype), weights.type.layout)
        # Complete since before the product: nothing is waited for. But a wait is a loop, over which
        # ptxas moves nothing; without it, it moves the exponentials below the wait for the product,
        # and the tensor cores idle meanwhile.
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc, weights, m, l, rescale = warpgroup_mma_wait(
            0, deps=[acc_next, next_weights, m, l, rescale]
        )
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return m, l, acc, weights, count


@gluon.jit
def attend(
    q_buffer, rings, count, begin, left, right, end, position, owned_from, kv_len, window_left,
    score_scale, cap,
    HEAD_DIM: gl.constexpr, FROM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """Attention of 64 rows over tiles `[begin, end)`, of which all see `[left, right)` whole.

    `count` is of the tiles in the rings before these; each is from row `FROM` on in its slot.

    Returns:
        m, l, and acc, whose last product is yet to be waited for; the slot of its values; `count`.
    """
    k_ring, k_full, k_empty, v_ring, v_full, _v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    no_scores = gl.zeros([HALF, TILE], gl.float32, S)
    m = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([HALF, HEAD_DIM], gl.float32, ACC)

    slot = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(k_full.index(slot), phase)
    k = part_of(k_ring, slot, FROM, TILE).permute((1, 0))
    s = warpgroup_mma(q_buffer, k, no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(slot), count=1)
    p, _rescale, m, l = _add_scores(
        s, m, l, position, kv_len, window_left, (end - 1) * TILE, score_scale, cap,
        CAUSAL, HAS_WINDOW, SOFT_CAP, True,
    )  # fmt: skip
    weights = gl.convert_layout(p.to(q_buffer.dtype), P)
    if end * TILE > kv_len:
        mbarrier.wait(v_full.index(slot), phase)
        v = part_of(v_ring, slot, FROM, TILE)
        _zero_foreign_rows(v, (end - 1) * TILE, owned_from, kv_len, TILE)

    # edge tiles, whole tiles, and the window's edge tiles
    m, l, acc, weights, count = _sweep(
        m, l, acc, weights, count, end - 1, right, position, kv_len, window_left, score_scale,
        cap, q_buffer, rings, FROM, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP, True,
    )  # fmt: skip
    m, l, acc, weights, count = _sweep(
        m, l, acc, weights, count, right, left, position, kv_len, window_left, score_scale,
        cap, q_buffer, rings, FROM, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP, False,
    )  # fmt: skip
    if HAS_WINDOW:
        m, l, acc, weights, count = _sweep(
            m, l, acc, weights, count, left, begin, position, kv_len, window_left, score_scale,
            cap, q_buffer, rings, FROM, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP, True,
        )  # fmt: skip

    slot = count % STAGES
    phase = (count // STAGES) & 1
    count += 1
    mbarrier.wait(v_full.index(slot), phase)
    v = part_of(v_ring, slot, FROM, TILE)
    if HAS_WINDOW:
        if begin * TILE < owned_from:
            _zero_foreign_rows(v, begin * TILE, owned_from, kv_len, TILE)
    acc_next = warpgroup_mma(weights, v, acc, is_async=True)
    return m, l, acc_next, slot, count


@gluon.jit
def load_rows(
    Q, first_row, end_row, qo_begin, kv_head, q_stride,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Rows of a request, from `first_row` on; those from `end_row` on are 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    token = (qo_begin + row // GROUP).to(gl.int64)
    at_q = token * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    live = row < end_row
    return gl.load(Q + at_q[:, None] + dims[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def store_rows(
    OUT, LSE, buffer, m, l, acc, first_row, end_row, qo_begin, kv_head, num_kv_heads,
    out_stride, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Write finished rows up to `end_row`; 0 and -inf where a row saw no key.

    `buffer` is where the rows' queries were: through it a thread gets 16 bytes of a row, where the
    tensor cores leave it 4 at a time.
    """
    S: gl.constexpr = l.type.layout
    ACC: gl.constexpr = acc.type.layout
    total = gl.where(l == 0, 1.0, l)
    # selected: 0 times the NaN that another row of the block sees is in an empty row's sum too
    empty = gl.convert_layout(l, gl.SliceLayout(1, ACC))[:, None] == 0
    out = gl.where(empty, 0.0, acc / gl.convert_layout(total, gl.SliceLayout(1, ACC))[:, None])
    buffer.store(out.to(OUT.dtype.element_ty))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    token = (qo_begin + row // GROUP).to(gl.int64)
    at_out = token * out_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    live = row < end_row
    gl.store(OUT + at_out[:, None] + dims[None, :], buffer.load(LAYOUT), mask=live[:, None])
    if WITH_LSE:
        row = first_row + gl.arange(0, HALF, S)
        token = (qo_begin + row // GROUP).to(gl.int64)
        qo_head = kv_head * GROUP + row % GROUP
        lse = (m + gl.log2(total)) * LN_2
        live = row < end_row
        gl.store(LSE + token * (num_kv_heads * GROUP) + qo_head, lse, mask=live)

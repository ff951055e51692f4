"""Attention of many query rows on compute capability 9.0, in Gluon; the twin of `long.py`.

One program an SM runs three partitions over the same units. The producer, one warp, takes units
from a counter, whoever is free next, and brings their K and V tiles into two rings, one box of the
copy engine a page. Two consumers, a warpgroup each, take half of a block's rows and overlap the
products of one tile with the softmax of another; they take turns on the tensor cores, so that one
computes exponentials while the other multiplies.
Source of the scheme: Shah et al., FlashAttention-3, arXiv 2407.08608.

Tiles go from the last to the first. The engine copies whole pages, so the first and the last tile
may hold slots that the request does not own. Their scores are not selected; their values, which
could be NaN, are zeroed in shared memory before they meet their zero weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagedattn.kernels.gluon_names import copy_box
from pagedattn.kernels.hopper_units import (
    FIELDS,
    HALF,
    UNITS_AHEAD,
    barriers,
    hand_over,
    leave,
    next_unit,
    receive,
    tile_bounds,
)
from pagedattn.kernels.masks import first_key
from pagedattn.kernels.softmax import scale_scores

LN_2 = gl.constexpr(0.6931471805599453)
CLEANED = gl.constexpr(16)  # rows of V that are zeroed at once
MOST_AHEAD = gl.constexpr(128)  # head_dim up to which the registers hold the next unit's rows


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
    PAGE_SIZE: gl.constexpr, TILE: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile, once its buffer is free."""
    mbarrier.wait(empty, freed)
    mbarrier.expect(full, TILE * HEAD_DIM * 2)
    for j in gl.static_range(TILE // BOX):
        row = pages[j] * rows_per_page + (tile * TILE + j * BOX) % PAGE_SIZE
        copy_box(cache, [row, column], full, buffer.slice(j * BOX, BOX, 0))


@gluon.jit
def _produce(
    k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, UNITS, TURNS,
    num_units, num_kv_heads, window_left, k_rows_per_page, v_rows_per_page, rings, handover,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Fill the rings with the tiles of every unit of this program."""
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    BOX: gl.constexpr = PAGE_SIZE if PAGE_SIZE < TILE else TILE
    count = 0
    turn = 0
    unit = gl.program_id(0)
    while unit < num_units:
        entry = unit // num_kv_heads
        kv_head = unit % num_kv_heads
        request = gl.load(UNITS + entry * 2)
        block = gl.load(UNITS + entry * 2 + 1)
        qo_begin = gl.load(QO_INDPTR + request)
        qo_len = gl.load(QO_INDPTR + request + 1) - qo_begin
        kv_len = gl.load(KV_LENS + request)
        hand_over(handover, turn, block, kv_head, qo_begin, qo_len, kv_len)
        unit = next_unit(TURNS)
        turn += 1

        page_ids = KV_INDICES + gl.load(KV_INDPTR + request)
        begin, _left, _right, end = tile_bounds(
            block, qo_len, kv_len, window_left, GROUP, TILE, CAUSAL, HAS_WINDOW
        )
        first = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
        column = kv_head * HEAD_DIM
        for back in range(0, end - begin):
            tile = end - 1 - back
            slot = count % STAGES
            freed = ((count // STAGES) & 1) ^ 1
            pages = _load_page_ids(page_ids, first, kv_len, tile, PAGE_SIZE, TILE, BOX)
            _copy_tile(
                k_pages, pages, tile, column, k_rows_per_page, k_full.index(slot),
                k_empty.index(slot), freed, k_ring.index(slot), PAGE_SIZE, TILE, BOX, HEAD_DIM,
            )  # fmt: skip
            _copy_tile(
                v_pages, pages, tile, column, v_rows_per_page, v_full.index(slot),
                v_empty.index(slot), freed, v_ring.index(slot), PAGE_SIZE, TILE, BOX, HEAD_DIM,
            )  # fmt: skip
            count += 1
    hand_over(handover, turn, 0, 0, 0, 0, 0)
    leave(TURNS)


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
        column = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        behind = (position - start)[:, None]  # column at which each query itself is
        # a causal query is not behind the last key: `masks.py` without the test for it
        visible = column[None, :] <= behind if CAUSAL else (column < kv_len - start)[None, :]
        if HAS_WINDOW:
            visible = visible & (column[None, :] >= behind - window_left)
        s = gl.where(visible, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * score_scale)
    m_finite = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf would be NaN
    p = gl.exp2(s * score_scale - m_finite[:, None])
    rescale = gl.exp2(m - m_finite)
    return p, rescale, m_new, l * rescale + gl.sum(p, 1)


@gluon.jit
def _sweep(
    m, l, acc, weights, count, taken, after, until, position, kv_len, window_left,
    score_scale, cap, q_buffer, rings, order,
    WARPGROUP: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, TAKE_TURNS: gl.constexpr,
    MASKED: gl.constexpr,
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
        if TAKE_TURNS:
            mbarrier.wait(order.index(WARPGROUP), (taken & 1) ^ (1 - WARPGROUP))
            taken += 1
        k = k_ring.index(slot).permute((1, 0))
        s = warpgroup_mma(q_buffer, k, no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc_next = warpgroup_mma(weights, v_ring.index(v_slot), acc, is_async=True)
        if TAKE_TURNS:
            mbarrier.arrive(order.index(1 - WARPGROUP), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, rescale, m, l = _add_scores(
            s, m, l, position, kv_len, window_left, (after - 1 - back) * TILE, score_scale, cap,
            CAUSAL, HAS_WINDOW, SOFT_CAP, MASKED,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = gl.convert_layout(p, weights.type.layout).to(weights.dtype)
    return m, l, acc, weights, count, taken


@gluon.jit
def _load_rows(
    Q, first_row, qo_begin, qo_len, kv_head, q_stride,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of a block; those past the request's last are 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    token = (qo_begin + row // GROUP).to(gl.int64)
    at_q = token * q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    live = row < qo_len * GROUP
    return gl.load(Q + at_q[:, None] + dims[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def _consume(
    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap,
    q_stride, out_stride, q_buffers, rings, handover, order,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, WITH_LSE: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """Compute half of the rows of every unit of this program."""
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    q_buffer = q_buffers.index(WARPGROUP)
    no_scores = gl.zeros([HALF, TILE], gl.float32, S)
    count = 0  # tiles before this one
    taken = 0  # turns on the tensor cores
    turn = 0
    block, kv_head, qo_begin, qo_len, kv_len = receive(handover, turn)
    first_row = block * (2 * HALF) + WARPGROUP * HALF
    q = _load_rows(Q, first_row, qo_begin, qo_len, kv_head, q_stride, GROUP, HEAD_DIM)
    while qo_len > 0:
        if HEAD_DIM > MOST_AHEAD:
            q = _load_rows(Q, first_row, qo_begin, qo_len, kv_head, q_stride, GROUP, HEAD_DIM)
        q_buffer.store(q)
        fence_async_shared()
        begin, left, right, end = tile_bounds(
            block, qo_len, kv_len, window_left, GROUP, TILE, CAUSAL, HAS_WINDOW
        )
        position = kv_len - qo_len + (first_row + gl.arange(0, HALF, gl.SliceLayout(1, S))) // GROUP
        owned_from = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
        m = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        l = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, ACC)

        slot = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = k_ring.index(slot).permute((1, 0))
        s = warpgroup_mma(q_buffer, k, no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, _rescale, m, l = _add_scores(
            s, m, l, position, kv_len, window_left, (end - 1) * TILE, score_scale, cap,
            CAUSAL, HAS_WINDOW, SOFT_CAP, True,
        )  # fmt: skip
        weights = gl.convert_layout(p, P).to(Q.dtype.element_ty)
        if end * TILE > kv_len:
            mbarrier.wait(v_full.index(slot), phase)
            _zero_foreign_rows(v_ring.index(slot), (end - 1) * TILE, owned_from, kv_len, TILE)

        # edge tiles, whole tiles, and the window's edge tiles
        m, l, acc, weights, count, taken = _sweep(
            m, l, acc, weights, count, taken, end - 1, right, position, kv_len, window_left,
            score_scale, cap, q_buffer, rings, order, WARPGROUP, TILE, STAGES, CAUSAL, HAS_WINDOW,
            SOFT_CAP, TAKE_TURNS, True,
        )  # fmt: skip
        m, l, acc, weights, count, taken = _sweep(
            m, l, acc, weights, count, taken, right, left, position, kv_len, window_left,
            score_scale, cap, q_buffer, rings, order, WARPGROUP, TILE, STAGES, CAUSAL, HAS_WINDOW,
            SOFT_CAP, TAKE_TURNS, False,
        )  # fmt: skip
        if HAS_WINDOW:
            m, l, acc, weights, count, taken = _sweep(
                m, l, acc, weights, count, taken, left, begin, position, kv_len, window_left,
                score_scale, cap, q_buffer, rings, order, WARPGROUP, TILE, STAGES, CAUSAL,
                HAS_WINDOW, SOFT_CAP, TAKE_TURNS, True,
            )  # fmt: skip

        slot = count % STAGES
        phase = (count // STAGES) & 1
        count += 1
        mbarrier.wait(v_full.index(slot), phase)
        if HAS_WINDOW:
            if begin * TILE < owned_from:
                _zero_foreign_rows(v_ring.index(slot), begin * TILE, owned_from, kv_len, TILE)
        acc_next = warpgroup_mma(weights, v_ring.index(slot), acc, is_async=True)
        this_row, this_head, this_begin, this_len = first_row, kv_head, qo_begin, qo_len
        # the next unit's rows arrive while this one's last product is made and its rows are stored
        turn += 1
        block, kv_head, qo_begin, qo_len, kv_len = receive(handover, turn)
        first_row = block * (2 * HALF) + WARPGROUP * HALF
        if HEAD_DIM <= MOST_AHEAD:
            q = _load_rows(Q, first_row, qo_begin, qo_len, kv_head, q_stride, GROUP, HEAD_DIM)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(slot), count=1)
        _store_rows(
            OUT, LSE, m, l, acc, this_row, this_begin, this_len, this_head, num_kv_heads,
            out_stride, GROUP, HEAD_DIM, WITH_LSE,
        )  # fmt: skip


@gluon.jit
def _store_rows(
    OUT, LSE, m, l, acc, first_row, qo_begin, qo_len, kv_head, num_kv_heads, out_stride,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Write finished rows; 0 and -inf where a row saw no key."""
    S: gl.constexpr = l.type.layout
    ACC: gl.constexpr = acc.type.layout
    total = gl.where(l == 0, 1.0, l)
    # selected: 0 times the NaN that another row of the block sees is in an empty row's sum too
    empty = gl.convert_layout(l, gl.SliceLayout(1, ACC))[:, None] == 0
    out = gl.where(empty, 0.0, acc / gl.convert_layout(total, gl.SliceLayout(1, ACC))[:, None])
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ACC))
    token = (qo_begin + row // GROUP).to(gl.int64)
    at_out = token * out_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    live = row < qo_len * GROUP
    gl.store(
        OUT + at_out[:, None] + dims[None, :], out.to(OUT.dtype.element_ty), mask=live[:, None]
    )
    if WITH_LSE:
        row = first_row + gl.arange(0, HALF, S)
        token = (qo_begin + row // GROUP).to(gl.int64)
        qo_head = kv_head * GROUP + row % GROUP
        lse = (m + gl.log2(total)) * LN_2
        live = row < qo_len * GROUP
        gl.store(LSE + token * (num_kv_heads * GROUP) + qo_head, lse, mask=live)


@gluon.jit(do_not_specialize=["num_kv_heads", "window_left", "k_rows_per_page", "v_rows_per_page"])
def long_attention_hopper(
    Q, k_pages, v_pages, OUT, LSE,  # as in the backend's run; pages as [rows, heads * HEAD_DIM]
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, HEADER, UNITS,  # the table and the schedule
    TURNS,  # i32[2]: units taken, programs done; 0 before and after
    num_kv_heads, window_left, score_scale, cap,
    q_stride: gl.int64, out_stride: gl.int64, k_rows_per_page, v_rows_per_page,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    WITH_LSE: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """Compute every unit of the long list, in blocks of 128 rows."""
    num_units = gl.load(HEADER + 2) * num_kv_heads
    DTYPE: gl.constexpr = Q.dtype.element_ty
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], DTYPE)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], DTYPE)
    q_buffers = gl.allocate_shared_memory(DTYPE, [2, HALF, HEAD_DIM], Q_LAYOUT)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], KV_LAYOUT)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], KV_LAYOUT)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_empty = barriers(STAGES, 2)
    order = barriers(2, 1)
    cells = gl.allocate_shared_memory(
        gl.int32, [UNITS_AHEAD * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    rings = (k_ring, k_full, k_empty, v_ring, v_full, v_empty)
    handover = (cells, barriers(UNITS_AHEAD, 1), barriers(UNITS_AHEAD, 2))
    fence_async_shared()  # the engine must find the barriers made
    gl.warp_specialize(
        [
            (_consume, (
                Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                q_buffers, rings, handover, order, 0, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                HAS_WINDOW, SOFT_CAP, WITH_LSE, TAKE_TURNS,
            )),
            (_consume, (
                Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                q_buffers, rings, handover, order, 1, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                HAS_WINDOW, SOFT_CAP, WITH_LSE, TAKE_TURNS,
            )),
            (_produce, (
                k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, UNITS, TURNS,
                num_units, num_kv_heads, window_left, k_rows_per_page, v_rows_per_page, rings,
                handover, GROUP, HEAD_DIM, PAGE_SIZE, TILE, STAGES, CAUSAL, HAS_WINDOW,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip

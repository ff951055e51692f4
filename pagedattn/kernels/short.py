"""Attention of few query rows over many keys: decode, speculative decode, short chunks.

Products are transposed (keys along M, query rows along N), so that a narrow row block still fills
the tensor cores. Each program computes one chunk of the schedule's line of tiles for one KV head;
see `plan.py`.
"""

import triton
import triton.language as tl

from pagedattn.kernels.masks import end_key, first_key
from pagedattn.kernels.merge import (
    FEW,
    arrive,
    load_many_merged,
    load_merged,
    pieces_of_chunks,
    pieces_of_request,
    store_piece,
)
from pagedattn.kernels.pages import places_in_page, tile_page_ids
from pagedattn.kernels.plan import piece_tiles, short_tiles
from pagedattn.kernels.softmax import dot, dot_add, finish, narrow, scale_scores, weigh


@triton.jit
def _write(
    OUT, LSE, m, l, acc, token, qo_head, live, out_stride, num_qo_heads,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, WITH_LSE: tl.constexpr, UPCAST: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Store finished rows; acc: f32[D_PAD, rows], or with `AXIS` 1 f32[rows, D_PAD]."""
    dims = tl.expand_dims(tl.arange(0, D_PAD), 1 - AXIS)
    out, lse = finish(m, l, acc, AXIS)
    at_out = token * out_stride + qo_head * HEAD_DIM
    tl.store(
        OUT + tl.expand_dims(at_out, AXIS) + dims,
        narrow(out, OUT.dtype.element_ty, UPCAST),
        mask=tl.expand_dims(live, AXIS) & (dims < HEAD_DIM),
    )
    if WITH_LSE:
        tl.store(LSE + token * num_qo_heads + qo_head, lse, mask=live)


@triton.jit
def _write_many(
    OUT, LSE, PIECE_ACC, PIECE_ML, first, second, step, num_pieces,
    block, num_rows, qo_begin, kv_head, out_stride, num_kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    WITH_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Merge and store a block that is in many pieces, a token's rows or so at a time."""
    SOME: tl.constexpr = min(ROWS, max(4, triton.next_power_of_2(GROUP)))
    for begin in range(0, tl.minimum(num_rows - block * ROWS, ROWS), SOME):
        in_block = begin + tl.arange(0, SOME)
        row = block * ROWS + in_block
        live = row < num_rows
        m, l, acc = load_many_merged(
            PIECE_ACC, PIECE_ML, first, second, step, num_pieces, in_block, live, ROWS, D_PAD, SOME
        )
        token = (qo_begin + row // GROUP).to(tl.int64)
        qo_head = kv_head * GROUP + row % GROUP
        _write(
            OUT, LSE, m, l, acc, token, qo_head, live, out_stride, num_kv_heads * GROUP,
            HEAD_DIM, D_PAD, WITH_LSE, UPCAST, 1,
        )  # fmt: skip


@triton.jit
def _write_merged(
    OUT, LSE, PIECE_ACC, PIECE_ML, first, second, step, num_pieces, token, qo_head, live,
    block, qo_len, qo_begin, kv_head, out_stride, num_kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    WITH_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Merge and store a block that is in pieces."""
    FITS: tl.constexpr = ROWS * D_PAD <= 4096
    if FITS and num_pieces <= FEW:
        m, l, acc = load_merged(
            PIECE_ACC, PIECE_ML, first, second, step, num_pieces, live, ROWS, D_PAD
        )
        _write(
            OUT, LSE, m, l, acc, token, qo_head, live, out_stride, num_kv_heads * GROUP,
            HEAD_DIM, D_PAD, WITH_LSE, UPCAST, 0,
        )  # fmt: skip
    else:
        _write_many(
            OUT, LSE, PIECE_ACC, PIECE_ML, first, second, step, num_pieces,
            block, qo_len * GROUP, qo_begin, kv_head, out_stride, num_kv_heads,
            GROUP, HEAD_DIM, D_PAD, ROWS, WITH_LSE, UPCAST,
        )  # fmt: skip


@triton.jit
def _empty(TILE: tl.constexpr, ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """The running state before any key: m, l of each lane, acc."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    # summed over keys at the end: a sum in every tile would make the warps wait once more
    l_of_lanes = tl.zeros([TILE, ROWS], tl.float32)
    acc = tl.zeros([D_PAD, ROWS], tl.float32)
    return m, l_of_lanes, acc


@triton.jit(do_not_specialize=["num_kv_heads", "window_left", "min_piece"])
def short_attention(
    Q, K, V, OUT, LSE,  # as in the backend's run
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,  # the table
    HEADER, SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, PIECE_ENDS,  # the schedule
    PIECE_ACC, PIECE_ML, ARRIVED,  # the pieces of shared row blocks
    num_kv_heads, window_left, min_piece, score_scale, cap,
    q_stride, out_stride, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, BATCH_INVARIANT: tl.constexpr, WITH_LSE: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute this program's chunk of the line of tiles, for its KV head."""
    kv_head = tl.program_id(0) % num_kv_heads
    index = tl.program_id(0) // num_kv_heads
    chunk = tl.load(HEADER)
    at = tl.load(SHORT_BEGIN + index)
    chunk_end = tl.load(SHORT_BEGIN + index + 1)
    request = tl.load(SHORT_FIRST + index)
    dims = tl.arange(0, D_PAD)
    in_head = dims < HEAD_DIM
    while (at < chunk_end) & (request >= 0):  # always so; asked for the reason below
        request_begin = tl.load(SHORT_ENDS + request)
        request_end = tl.load(SHORT_ENDS + request + 1)
        qo_begin = tl.load(QO_INDPTR + request)
        qo_end = tl.load(QO_INDPTR + request + 1)
        kv_len = tl.load(KV_LENS + request)
        first_page = tl.load(KV_INDPTR + request)
        # None is negative. Asked, so that the compiler has all loads wait together: it would put
        # those that the branch does not need behind it, at a second latency of memory.
        negative = (request_begin | qo_begin | qo_end | kv_len | first_page) < 0
        if (at >= request_end) | negative:  # long or idle
            request += 1
            at = tl.where(negative, chunk_end, at)
        else:
            qo_len = qo_end - qo_begin
            num_tiles, first_tile = short_tiles(kv_len, qo_len, window_left, TILE, HAS_WINDOW)
            block = (at - request_begin) // num_tiles
            block_begin = request_begin + block * num_tiles
            tile_begin = at - block_begin
            tile_end = tl.minimum(chunk_end - block_begin, num_tiles)
            if BATCH_INVARIANT:
                num_blocks = (request_end - request_begin) // num_tiles
                num_chunks = tl.num_programs(0) // num_kv_heads
                piece = piece_tiles(num_tiles, num_blocks, num_chunks, min_piece)
                pieces_begin = tl.load(PIECE_ENDS + request)
                num_pieces, first, second, step, slot, counter = pieces_of_request(
                    pieces_begin, block, num_tiles, piece, tile_begin, num_kv_heads, kv_head
                )
                num_left = (tile_end - tile_begin + piece - 1) // piece

            row = block * ROWS + tl.arange(0, ROWS)
            live = row < qo_len * GROUP
            token = (qo_begin + row // GROUP).to(tl.int64)
            qo_head = kv_head * GROUP + row % GROUP
            position = kv_len - qo_len + row // GROUP
            at_q = token * q_stride + qo_head * HEAD_DIM
            q = tl.load(  # q: [D_PAD, ROWS]
                Q + at_q[None, :] + dims[:, None], mask=live[None, :] & in_head[:, None], other=0.0
            )
            low = (first_tile + tile_begin) * TILE
            high = tl.minimum((first_tile + tile_end) * TILE, kv_len)
            low_key = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
            k_head = K + kv_head * HEAD_DIM
            v_head = V + kv_head * HEAD_DIM

            first_seen = first_key(position, window_left, HAS_WINDOW)
            end_seen = end_key(position, kv_len, CAUSAL)

            m, l_of_lanes, acc = _empty(TILE, ROWS, D_PAD)
            if BATCH_INVARIANT:
                piece_end = low + piece * TILE
            page = tile_page_ids(KV_INDICES, first_page, low, low_key, high, TILE, PAGE_SIZE)
            for begin in tl.range(low, high, TILE, num_stages=STAGES):
                key = begin + tl.arange(0, TILE)
                owned = key < high
                if HAS_WINDOW:
                    owned = owned & (key >= low_key)
                owned = owned[:, None]
                if HEAD_DIM < D_PAD:
                    owned = owned & in_head[None, :]
                place = places_in_page(begin, TILE, PAGE_SIZE)
                k_places = k_head + (place * k_token_stride)[:, None] + dims[None, :]
                v_places = v_head + (place * v_token_stride)[:, None] + dims[None, :]
                k_pointers = k_places + (page.to(tl.int64) * k_page_stride)[:, None]
                v_pointers = v_places + (page.to(tl.int64) * v_page_stride)[:, None]
                # one tile ahead, no more and no less, or the loads are not pipelined
                page = tile_page_ids(
                    KV_INDICES, first_page, begin + TILE, low_key, high, TILE, PAGE_SIZE
                )
                k = tl.load(k_pointers, mask=owned, other=0.0)
                s = scale_scores(dot(k, q, UPCAST), score_scale, cap, SOFT_CAP)  # s: [TILE, ROWS]
                visible = key[:, None] < end_seen[None, :]
                if HAS_WINDOW:
                    visible = visible & (key[:, None] >= first_seen[None, :])
                p, rescale, m = weigh(tl.where(visible, s, float("-inf")), m, 0)
                l_of_lanes = l_of_lanes * rescale[None, :] + p
                v = tl.load(v_pointers, mask=owned, other=0.0)
                p = narrow(p, v.dtype, UPCAST)
                acc = dot_add(tl.trans(v), p, acc * rescale[None, :], UPCAST)
                if BATCH_INVARIANT:  # in the loop: one for each piece would empty the pipeline
                    if (begin + TILE >= tl.minimum(piece_end, high)) & (num_pieces > 1):
                        l = tl.sum(l_of_lanes, 0)
                        store_piece(PIECE_ACC, PIECE_ML, slot, live, m, l, acc, ROWS, D_PAD)
                        m, l_of_lanes, acc = _empty(TILE, ROWS, D_PAD)
                        piece_end += piece * TILE
                        slot += step

            l = tl.sum(l_of_lanes, 0)
            if not BATCH_INVARIANT:
                num_pieces, first, second, step, slot, counter = pieces_of_chunks(
                    block_begin, num_tiles, chunk, index, num_kv_heads, kv_head
                )
                num_left = 1
            # two calls, not one behind a merged condition: that crashes Triton 3.9's layout pass
            if num_pieces == 1:
                _write(
                    OUT, LSE, m, l, acc, token, qo_head, live, out_stride, num_kv_heads * GROUP,
                    HEAD_DIM, D_PAD, WITH_LSE, UPCAST, 0,
                )  # fmt: skip
            else:
                if not BATCH_INVARIANT:
                    store_piece(PIECE_ACC, PIECE_ML, slot, live, m, l, acc, ROWS, D_PAD)
                if arrive(ARRIVED + counter, num_left, num_pieces):
                    _write_merged(
                        OUT, LSE, PIECE_ACC, PIECE_ML, first, second, step, num_pieces, token,
                        qo_head, live, block, qo_len, qo_begin, kv_head, out_stride,
                        num_kv_heads, GROUP, HEAD_DIM, D_PAD, ROWS, WITH_LSE, UPCAST,
                    )  # fmt: skip
            at = block_begin + tile_end
            request += tl.where(at == request_end, 1, 0)

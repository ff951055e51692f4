"""Attention of few query rows over many keys: decode, speculative decode, short chunks.

Products are transposed (keys along M, query rows along N), so that a narrow row block still fills
the tensor cores. Each program computes one chunk of the schedule's line of tiles; see `plan.py`.
"""

import triton
import triton.language as tl

from pagedattn.kernels.masks import first_key, is_visible
from pagedattn.kernels.merge import arrive, load_merged, store_piece
from pagedattn.kernels.pages import load_page_ids, slot_offsets
from pagedattn.kernels.plan import short_tiles
from pagedattn.kernels.softmax import add_scores, dot, dot_add, finish, narrow, scale_scores


@triton.jit
def _write(
    OUT, LSE, m, l, acc, token, qo_head, live, out_stride, num_qo_heads,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, WITH_LSE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store the finished rows of a block."""
    dims = tl.arange(0, D_PAD)
    out, lse = finish(m, l, acc, 0)  # out: [D_PAD, ROWS]
    at_out = token * out_stride + qo_head * HEAD_DIM
    tl.store(
        OUT + at_out[None, :] + dims[:, None],
        narrow(out, OUT.dtype.element_ty, UPCAST),
        mask=live[None, :] & (dims < HEAD_DIM)[:, None],
    )
    if WITH_LSE:
        tl.store(LSE + token * num_qo_heads + qo_head, lse, mask=live)


@triton.jit(do_not_specialize=["num_kv_heads", "window_left"])
def short_attention(
    Q, K, V, OUT, LSE,  # as in the backend's run
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,  # the table
    HEADER, SHORT_ENDS, SHORT_FIRST,  # the schedule
    PIECE_ACC, PIECE_ML, ARRIVED,  # the pieces of shared row blocks
    num_kv_heads, window_left, score_scale, cap,
    q_stride, out_stride, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, WITH_LSE: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute this program's chunk of the line of tiles."""
    program = tl.program_id(0)
    chunk = tl.load(HEADER)
    at = program * chunk
    chunk_end = tl.minimum(at + chunk, tl.load(HEADER + 1))
    request = tl.load(SHORT_FIRST + program)
    dims = tl.arange(0, D_PAD)
    in_head = dims < HEAD_DIM
    while at < chunk_end:
        request_begin = tl.load(SHORT_ENDS + request) * num_kv_heads
        request_end = tl.load(SHORT_ENDS + request + 1) * num_kv_heads
        if at >= request_end:  # the program's next request, past those that are long or idle
            request += 1
        else:
            qo_begin = tl.load(QO_INDPTR + request)
            qo_len = tl.load(QO_INDPTR + request + 1) - qo_begin
            kv_len = tl.load(KV_LENS + request)
            first_page = tl.load(KV_INDPTR + request)
            num_tiles, first_tile = short_tiles(kv_len, qo_len, window_left, TILE, HAS_WINDOW)
            block = (at - request_begin) // num_tiles  # of all heads
            kv_head = block % num_kv_heads
            block_begin = request_begin + block * num_tiles
            tile_begin = at - block_begin
            tile_end = tl.minimum(chunk_end - block_begin, num_tiles)

            row = block // num_kv_heads * ROWS + tl.arange(0, ROWS)
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
            first = first_key(kv_len - qo_len, window_left, HAS_WINDOW)
            k_head = K + kv_head * HEAD_DIM
            v_head = V + kv_head * HEAD_DIM

            m = tl.full([ROWS], float("-inf"), tl.float32)
            l = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([D_PAD, ROWS], tl.float32)
            key = low + tl.arange(0, TILE)
            page = load_page_ids(KV_INDICES, first_page, key, first, high, PAGE_SIZE)
            for begin in tl.range(low, high, TILE, num_stages=STAGES):
                key = begin + tl.arange(0, TILE)
                owned = ((key >= first) & (key < high))[:, None] & in_head[None, :]
                at_k = slot_offsets(page, key, k_page_stride, k_token_stride, PAGE_SIZE)
                at_v = slot_offsets(page, key, v_page_stride, v_token_stride, PAGE_SIZE)
                # one tile ahead, no more and no less, or the loads are not pipelined
                page = load_page_ids(KV_INDICES, first_page, key + TILE, first, high, PAGE_SIZE)
                k = tl.load(k_head + at_k[:, None] + dims[None, :], mask=owned, other=0.0)
                s = scale_scores(dot(k, q, UPCAST), score_scale, cap, SOFT_CAP)  # s: [TILE, ROWS]
                visible = is_visible(
                    key[:, None], position[None, :], high, window_left, CAUSAL, HAS_WINDOW
                )
                p, rescale, m, l = add_scores(tl.where(visible, s, float("-inf")), m, l, 0)
                v = tl.load(v_head + at_v[:, None] + dims[None, :], mask=owned, other=0.0)
                p = narrow(p, v.dtype, UPCAST)
                acc = dot_add(tl.trans(v), p, acc * rescale[None, :], UPCAST)

            first_program = block_begin // chunk
            num_pieces = (block_begin + num_tiles - 1) // chunk - first_program + 1
            # two calls, not one behind a merged condition: that crashes Triton 3.9's layout pass
            if num_pieces == 1:
                _write(
                    OUT, LSE, m, l, acc, token, qo_head, live, out_stride, num_kv_heads * GROUP,
                    HEAD_DIM, D_PAD, WITH_LSE, UPCAST,
                )  # fmt: skip
            else:
                slot = 2 * program + (program == first_program).to(tl.int32)
                store_piece(PIECE_ACC, PIECE_ML, slot, m, l, acc, ROWS, D_PAD)
                if arrive(ARRIVED, first_program, num_pieces):
                    m, l, acc = load_merged(
                        PIECE_ACC, PIECE_ML, first_program, num_pieces, ROWS, D_PAD
                    )
                    _write(
                        OUT, LSE, m, l, acc, token, qo_head, live, out_stride,
                        num_kv_heads * GROUP, HEAD_DIM, D_PAD, WITH_LSE, UPCAST,
                    )  # fmt: skip
            at = block_begin + tile_end

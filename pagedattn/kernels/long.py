"""Attention of many query rows: prefill and long chunks.

One unit is a block of packed rows (queries times the query heads of one KV head) over all its
keys. Tiles that every row sees whole need no mask; those at the window's and the diagonal's edges
do.
"""

import triton
import triton.language as tl

from pagedattn.kernels.masks import end_key, first_key
from pagedattn.kernels.pages import places_in_page, tile_page_ids
from pagedattn.kernels.softmax import dot, dot_add, finish, narrow, scale_scores, weigh


@triton.jit
def _sweep(
    q, m, l, acc, first_seen, end_seen, k_head, v_head, KV_INDICES, first_page,
    begin, end, low, high, score_scale, cap,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take the tiles of `[begin, end)` into the running state; only `[low, high)` may be read."""
    dims = tl.arange(0, D_PAD)
    in_head = dims < HEAD_DIM
    last = tl.minimum(high, end)
    page = tile_page_ids(KV_INDICES, first_page, begin, low, last, TILE, PAGE_SIZE)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        key = start + tl.arange(0, TILE)
        place = places_in_page(start, TILE, PAGE_SIZE)
        k_places = k_head + (place * k_token_stride)[None, :] + dims[:, None]  # k: [D_PAD, TILE]
        v_places = v_head + (place * v_token_stride)[:, None] + dims[None, :]  # v: [TILE, D_PAD]
        k_pointers = k_places + (page.to(tl.int64) * k_page_stride)[None, :]
        v_pointers = v_places + (page.to(tl.int64) * v_page_stride)[:, None]
        # one tile ahead, no more and no less, or the loads are not pipelined
        page = tile_page_ids(KV_INDICES, first_page, start + TILE, low, last, TILE, PAGE_SIZE)
        owned = (key >= low) & (key < high)
        if MASKED:
            k = tl.load(k_pointers, mask=owned[None, :] & in_head[:, None], other=0.0)
        elif HEAD_DIM == D_PAD:
            k = tl.load(k_pointers)
        else:
            k = tl.load(k_pointers, mask=in_head[:, None], other=0.0)
        s = scale_scores(dot(q, k, UPCAST), score_scale, cap, SOFT_CAP)  # s: [ROWS, TILE]
        if MASKED:
            visible = key[None, :] < end_seen[:, None]
            if HAS_WINDOW:
                visible = visible & (key[None, :] >= first_seen[:, None])
            s = tl.where(visible, s, float("-inf"))
        p, rescale, m = weigh(s, m, 1)
        l = l * rescale + tl.sum(p, 1)
        if MASKED:
            v = tl.load(v_pointers, mask=owned[:, None] & in_head[None, :], other=0.0)
        elif HEAD_DIM == D_PAD:
            v = tl.load(v_pointers)
        else:
            v = tl.load(v_pointers, mask=in_head[None, :], other=0.0)
        acc = dot_add(narrow(p, v.dtype, UPCAST), v, acc * rescale[:, None], UPCAST)
    return m, l, acc


@triton.jit(do_not_specialize=["num_kv_heads", "window_left"])
def long_attention(
    Q, K, V, OUT, LSE,  # as in the backend's run
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, HEADER, UNITS,  # the table and the schedule
    num_kv_heads, window_left, score_scale, cap,
    q_stride, out_stride, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, WITH_LSE: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute every unit of the long list."""
    num_units = tl.load(HEADER + 2) * num_kv_heads
    dims = tl.arange(0, D_PAD)
    in_head = dims < HEAD_DIM
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        entry = unit // num_kv_heads
        kv_head = unit % num_kv_heads
        request = tl.load(UNITS + entry * 2)
        block = tl.load(UNITS + entry * 2 + 1)
        qo_begin = tl.load(QO_INDPTR + request)
        qo_len = tl.load(QO_INDPTR + request + 1) - qo_begin
        kv_len = tl.load(KV_LENS + request)
        first_page = tl.load(KV_INDPTR + request)

        row = block * ROWS + tl.arange(0, ROWS)
        live = row < qo_len * GROUP
        token = (qo_begin + row // GROUP).to(tl.int64)
        qo_head = kv_head * GROUP + row % GROUP
        position = kv_len - qo_len + row // GROUP
        first_seen = first_key(position, window_left, HAS_WINDOW)
        end_seen = end_key(position, kv_len, CAUSAL)
        at_q = token * q_stride + qo_head * HEAD_DIM
        q = tl.load(  # q: [ROWS, D_PAD]
            Q + at_q[:, None] + dims[None, :], mask=live[:, None] & in_head[None, :], other=0.0
        )

        # [low, high): keys that some row sees; [left, right): whole tiles that every row sees
        top = kv_len - qo_len + block * ROWS // GROUP
        bottom = kv_len - qo_len + tl.minimum((block * ROWS + ROWS - 1) // GROUP, qo_len - 1)
        low = first_key(top, window_left, HAS_WINDOW)
        high = end_key(bottom, kv_len, CAUSAL)
        begin = low // TILE * TILE
        left = tl.cdiv(first_key(bottom, window_left, HAS_WINDOW), TILE) * TILE
        right = end_key(top, kv_len, CAUSAL) // TILE * TILE
        left = tl.minimum(left, tl.maximum(high, begin))
        right = tl.maximum(right, left)
        k_head = K + kv_head * HEAD_DIM
        v_head = V + kv_head * HEAD_DIM

        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        if HAS_WINDOW:
            m, l, acc = _sweep(
                q, m, l, acc, first_seen, end_seen, k_head, v_head, KV_INDICES, first_page,
                begin, left, low, high, score_scale, cap,
                k_page_stride, k_token_stride, v_page_stride, v_token_stride,
                HEAD_DIM, D_PAD, PAGE_SIZE, TILE, HAS_WINDOW, SOFT_CAP, True, STAGES,
                UPCAST,
            )  # fmt: skip
        m, l, acc = _sweep(
            q, m, l, acc, first_seen, end_seen, k_head, v_head, KV_INDICES, first_page,
            left, right, low, high, score_scale, cap,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            HEAD_DIM, D_PAD, PAGE_SIZE, TILE, HAS_WINDOW, SOFT_CAP, False, STAGES, UPCAST,
        )  # fmt: skip
        m, l, acc = _sweep(
            q, m, l, acc, first_seen, end_seen, k_head, v_head, KV_INDICES, first_page,
            right, high, low, high, score_scale, cap,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            HEAD_DIM, D_PAD, PAGE_SIZE, TILE, HAS_WINDOW, SOFT_CAP, True, STAGES, UPCAST,
        )  # fmt: skip
        out, lse = finish(m, l, acc, 1)
        at_out = token * out_stride + qo_head * HEAD_DIM
        tl.store(
            OUT + at_out[:, None] + dims[None, :],
            narrow(out, OUT.dtype.element_ty, UPCAST),
            mask=live[:, None] & in_head[None, :],
        )
        if WITH_LSE:
            tl.store(LSE + token * (num_kv_heads * GROUP) + qo_head, lse, mask=live)

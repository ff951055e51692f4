"""Pieces of row blocks in the Gluon kernel for short queries: how they are left and merged.

As in `merge.py`, which says what pieces are and where; memory has the same form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedattn.kernels.gluon_names import sync_threads
from pagedattn.kernels.hopper_units import HALF

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store_part(PIECE_ACC, PIECE_ML, slot, num_rows, m, l, acc, HEAD_DIM: gl.constexpr):
    """Write the state of a piece's rows. Of a row that saw no key acc is 0: it may be NaN."""
    S: gl.constexpr = l.type.layout
    ACC: gl.constexpr = acc.type.layout
    at = slot.to(gl.int64) * HALF
    row = gl.arange(0, HALF, S)
    gl.store(PIECE_ML + at * 2 + row, m, mask=row < num_rows)
    gl.store(PIECE_ML + at * 2 + HALF + row, l, mask=row < num_rows)
    row = gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ACC))
    empty = gl.convert_layout(l, gl.SliceLayout(1, ACC)) == 0
    gl.store(
        PIECE_ACC + at * HEAD_DIM + row[:, None] * HEAD_DIM + dims[None, :],
        gl.where(empty[:, None], 0.0, acc),
        mask=(row < num_rows)[:, None],
    )


@gluon.jit
def arrive(COUNTER, num_pieces):
    """Count this piece; true where it completes the block's. Then the counter is 0 again."""
    sync_threads()  # all threads' stores come before the one thread's release
    is_last = gl.atomic_add(COUNTER, 1, sem="acq_rel") == num_pieces - 1
    if is_last:
        gl.store(COUNTER, 0)
    return is_last


@gluon.jit
def write_merged(
    OUT, LSE, PIECE_ACC, PIECE_ML, first_slot, second_slot, num_pieces,
    first_row, end_row, qo_begin, kv_head, num_kv_heads, out_stride,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Merge and store a block that is in pieces: a row a warp, in the order of the keys.

    Of as many pieces as a thread's registers hold, all loads are in flight together.
    """
    EACH: gl.constexpr = HEAD_DIM // 32  # elements of a row that a thread has
    AT_ONCE: gl.constexpr = 64 // EACH
    step = 2 * num_kv_heads  # from a piece's slot to the next
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, AT_ONCE, EACH], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    WEIGHTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)  # [rows, pieces]
    VALUES: gl.constexpr = gl.SliceLayout(1, LAYOUT)  # [rows, dims]
    lane = gl.arange(0, AT_ONCE, gl.SliceLayout(0, WEIGHTS))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, VALUES))
    for begin in range(first_row, end_row, 4):
        row = begin + gl.arange(0, 4, gl.SliceLayout(1, WEIGHTS))
        live = row < end_row
        m = gl.full([4], float("-inf"), gl.float32, gl.SliceLayout(1, WEIGHTS))
        l = gl.zeros([4], gl.float32, gl.SliceLayout(1, WEIGHTS))
        acc = gl.zeros([4, HEAD_DIM], gl.float32, VALUES)
        for i in range(0, num_pieces, AT_ONCE):
            piece = i + lane
            slot = gl.where(piece == 0, first_slot, second_slot + (piece - 1) * step).to(gl.int64)
            known = (piece < num_pieces)[None, :] & live[:, None]
            at = slot[None, :] * HALF + (row - first_row)[:, None]
            ml = PIECE_ML + (slot * HALF)[None, :] + at
            m_i = gl.load(ml, mask=known, other=float("-inf"), cache_modifier=".cg")
            l_i = gl.load(ml + HALF, mask=known, other=0.0, cache_modifier=".cg")
            acc_i = gl.load(
                PIECE_ACC + (at * HEAD_DIM)[:, :, None] + dims[None, :][:, None, :],
                mask=known[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            m_new = gl.maximum(m, gl.max(m_i, 1))
            m_finite = gl.where(m_new == float("-inf"), 0.0, m_new)
            weights = gl.exp2(m_i - m_finite[:, None])
            rescale = gl.exp2(m - m_finite)
            l = l * rescale + gl.sum(l_i * weights, 1)
            rescale = gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))
            acc = acc * rescale[:, None] + gl.sum(acc_i * weights[:, :, None], 1)
            m = m_new
        total = gl.where(l == 0, 1.0, l)  # acc is 0 where l is
        token = (qo_begin + row // GROUP).to(gl.int64)
        qo_head = kv_head * GROUP + row % GROUP
        if WITH_LSE:
            at = token * (num_kv_heads * GROUP) + qo_head
            gl.store(LSE + at, (m + gl.log2(total)) * LN_2, mask=live)
        at = gl.convert_layout(token * out_stride + qo_head * HEAD_DIM, gl.SliceLayout(1, VALUES))
        gl.store(
            OUT + at[:, None] + dims[None, :],
            (acc / gl.convert_layout(total, gl.SliceLayout(1, VALUES))[:, None]).to(
                OUT.dtype.element_ty
            ),
            mask=gl.convert_layout(live, gl.SliceLayout(1, VALUES))[:, None],
        )

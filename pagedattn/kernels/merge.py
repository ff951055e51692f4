"""Split-KV: pieces of one row block are written aside, and the last to arrive merges them, in order.

Nobody waits for anybody, so programs need not be resident together. The order of merging is that of the
keys, whoever merges, so the result does not depend on who arrives last.
"""

import triton
import triton.language as tl


@triton.jit
def store_piece(PIECE_ACC, PIECE_ML, piece, m, l, acc, ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """Write one piece's state: acc f32[D_PAD, ROWS], m and l f32[ROWS]."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    at = tl.cast(piece, tl.int64) * ROWS
    tl.store(PIECE_ML + 2 * at + rows, m)
    tl.store(PIECE_ML + 2 * at + ROWS + rows, l)
    tl.store(PIECE_ACC + (at + rows[None, :]) * D_PAD + dims[:, None], acc)


@triton.jit
def arrive(ARRIVED, group, num_pieces):
    """Count this program in; true for the last one, which also resets the counter for the next run."""
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    is_last = tl.atomic_add(ARRIVED + group, 1, sem="acq_rel", scope="gpu") == num_pieces - 1
    tl.store(ARRIVED + group, 0, mask=is_last)
    return is_last


@triton.jit
def load_merged(
    PIECE_ACC, PIECE_ML, first_piece, num_pieces, stride, ROWS: tl.constexpr, D_PAD: tl.constexpr
):
    """The merged state of pieces `first_piece + i * stride`; empty pieces change nothing."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([D_PAD, ROWS], tl.float32)
    for i in range(num_pieces):
        at = tl.cast(first_piece + i * stride, tl.int64) * ROWS
        m_i = tl.load(PIECE_ML + 2 * at + rows, cache_modifier=".cg")
        l_i = tl.load(PIECE_ML + 2 * at + ROWS + rows, cache_modifier=".cg")
        acc_i = tl.load(
            PIECE_ACC + (at + rows[None, :]) * D_PAD + dims[:, None], cache_modifier=".cg"
        )
        m_new = tl.maximum(m, m_i)
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        old = tl.exp2(m - m_finite)
        new = tl.exp2(m_i - m_finite)
        l = l * old + l_i * new
        acc = acc * old[None, :] + acc_i * new[None, :]
        m = m_new
    return m, l, acc

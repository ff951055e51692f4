"""Rows whose keys several programs share: the last program to arrive merges the pieces.

A program's chunk of the line (see `plan.py`) can begin inside one row block and end inside
another, so it leaves at most two pieces, in slots `2 * program` (continued from the program
before) and `2 * program + 1` (to be continued). Pieces of one row block come from consecutive
programs. Batch-invariant, every piece has a slot of its own, in the order of the line.

Nobody waits for anybody, so programs need not be resident together; and the order of merging is
that of the keys, whoever merges, so bits do not depend on who arrives last.
"""

import triton
import triton.language as tl


@triton.jit
def store_piece(
    PIECE_ACC, PIECE_ML, slot, live, m, l, acc, ROWS: tl.constexpr, D_PAD: tl.constexpr
):
    """Write one piece's state, rows in use alone: acc f32[D_PAD, ROWS], m and l f32[ROWS]."""
    rows = tl.arange(0, ROWS)
    at = slot.to(tl.int64) * ROWS
    tl.store(PIECE_ML + at * 2 + rows, m, mask=live)
    tl.store(PIECE_ML + at * 2 + ROWS + rows, l, mask=live)
    at_acc = at * D_PAD + rows[None, :] * D_PAD + tl.arange(0, D_PAD)[:, None]
    tl.store(PIECE_ACC + at_acc, acc, mask=live[None, :])


@triton.jit
def arrive(COUNTER, num_pieces):
    """Count this program in; true for the last one, which also resets the counter."""
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    before = tl.atomic_add(COUNTER, 1, sem="acq_rel", scope="gpu")
    is_last = before == num_pieces - 1
    tl.store(COUNTER, 0, mask=is_last)
    return is_last


@triton.jit
def load_merged(
    PIECE_ACC, PIECE_ML, first, second, step, num_pieces, live,
    ROWS: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """The merged state of pieces in slots `first`, `second`, `second + step`, ...

    An empty piece changes nothing.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([D_PAD, ROWS], tl.float32)
    slot = first
    for i in range(num_pieces):
        at = slot.to(tl.int64) * ROWS
        m_i = tl.load(
            PIECE_ML + at * 2 + rows, mask=live, other=float("-inf"), cache_modifier=".cg"
        )
        l_i = tl.load(PIECE_ML + at * 2 + ROWS + rows, mask=live, other=0.0, cache_modifier=".cg")
        acc_i = tl.load(
            PIECE_ACC + at * D_PAD + rows[None, :] * D_PAD + dims[:, None],
            mask=live[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, m_i)
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        old = tl.exp2(m - m_finite)
        new = tl.exp2(m_i - m_finite)
        l = l * old + l_i * new
        acc = acc * old[None, :] + acc_i * new[None, :]
        m = m_new
        slot = second + i * step
    return m, l, acc

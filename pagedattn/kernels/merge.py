"""Rows whose keys several programs share: the last program to arrive merges the pieces.

A chunk of the line (see `plan.py`) can begin inside one row block and end inside another, so it
leaves at most two pieces for each KV head: number `2 * chunk`, continued from the chunk before, and
number `2 * chunk + 1`, which begins a block. Those of one block come from consecutive chunks.
Batch-invariant, pieces are numbered in the order of the line, and a chunk leaves as many as it has.
Either way, piece `n` of a KV head is in slot `n * num_kv_heads + kv_head`.

Nobody waits for anybody, so programs need not be resident together; and the order of merging is
that of the keys, whoever merges, so bits do not depend on who arrives last.
"""

import triton
import triton.language as tl

FEW = tl.constexpr(4)  # pieces that `load_merged` merges in a round or two


@triton.jit
def pieces_of_chunks(block_begin, num_tiles, chunk, index, num_kv_heads, kv_head):
    """The pieces of the block that begins at a tile of the line, one for each chunk it is in.

    Returns:
        How many; the slots of the first and the second, and from there on the step to the next;
        the slot of the piece in chunk `index`; and the counter of pieces that are there.
    """
    first_chunk = block_begin // chunk
    num_pieces = (block_begin + num_tiles - 1) // chunk - first_chunk + 1
    step = 2 * num_kv_heads
    first = (2 * first_chunk + 1) * num_kv_heads + kv_head
    slot = index * step + tl.where(index == first_chunk, num_kv_heads, 0) + kv_head
    second = first + num_kv_heads
    counter = first_chunk * num_kv_heads + kv_head
    return num_pieces, first, second, step, slot, counter


@triton.jit
def pieces_of_request(begin, block, num_tiles, piece, tile, num_kv_heads, kv_head):
    """As `pieces_of_chunks`, batch-invariant: of `piece` tiles, numbered from `begin` in a request.

    The slot is that of the piece which begins at `tile` of the block.
    """
    num_pieces = (num_tiles + piece - 1) // piece
    step = num_kv_heads
    first = (begin + block * num_pieces) * step + kv_head
    slot = first + tile // piece * step
    return num_pieces, first, first + step, step, slot, first


@triton.jit
def store_piece(
    PIECE_ACC, PIECE_ML, slot, live, m, l, acc, ROWS: tl.constexpr, D_PAD: tl.constexpr
):
    """Write one piece's state, rows in use alone: acc f32[D_PAD, ROWS], m and l f32[ROWS].

    Of a row that saw no key, acc is written as 0: it may be NaN, see `finish`.
    """
    rows = tl.arange(0, ROWS)
    at = slot.to(tl.int64) * ROWS
    tl.store(PIECE_ML + at * 2 + rows, m, mask=live)
    tl.store(PIECE_ML + at * 2 + ROWS + rows, l, mask=live)
    at_acc = at * D_PAD + rows[None, :] * D_PAD + tl.arange(0, D_PAD)[:, None]
    tl.store(PIECE_ACC + at_acc, tl.where((l == 0)[None, :], 0.0, acc), mask=live[None, :])


@triton.jit
def arrive(COUNTER, num_left, num_pieces):
    """Count the pieces that this program left in; true where they complete the block's.

    The last program resets the counter for the next layer.
    """
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    before = tl.atomic_add(COUNTER, num_left, sem="acq_rel", scope="gpu")
    is_last = before == num_pieces - num_left
    tl.store(COUNTER, 0, mask=is_last)
    return is_last


@triton.jit
def _load_piece(
    PIECE_ACC, PIECE_ML, i, first, second, step, num_pieces, live,
    ROWS: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """The state of the i-th piece of a block, slots as for `load_merged`; empty past the last."""
    rows = tl.arange(0, ROWS)
    at = tl.where(i == 0, first, second + (i - 1) * step).to(tl.int64) * ROWS
    known = live & (rows * 0 + i < num_pieces)
    m = tl.load(PIECE_ML + at * 2 + rows, mask=known, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(PIECE_ML + at * 2 + ROWS + rows, mask=known, other=0.0, cache_modifier=".cg")
    acc = tl.load(
        PIECE_ACC + at * D_PAD + rows[None, :] * D_PAD + tl.arange(0, D_PAD)[:, None],
        mask=known[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return m, l, acc


@triton.jit
def load_merged(
    PIECE_ACC, PIECE_ML, first, second, step, num_pieces, live,
    ROWS: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """The merged state of pieces in slots `first`, `second`, `second + step`, ...

    An empty piece changes nothing. A few pieces are loaded at a time, as many as the registers
    hold: one after the other, their latencies would be most of a short step.
    """
    AT_ONCE: tl.constexpr = 4 if ROWS * D_PAD <= 2048 else 2
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([D_PAD, ROWS], tl.float32)
    for i in range(0, num_pieces, AT_ONCE):
        m0, l0, acc0 = _load_piece(
            PIECE_ACC, PIECE_ML, i, first, second, step, num_pieces, live, ROWS, D_PAD
        )
        m1, l1, acc1 = _load_piece(
            PIECE_ACC, PIECE_ML, i + 1, first, second, step, num_pieces, live, ROWS, D_PAD
        )
        m_new = tl.maximum(m, tl.maximum(m0, m1))
        if AT_ONCE == 4:
            m2, l2, acc2 = _load_piece(
                PIECE_ACC, PIECE_ML, i + 2, first, second, step, num_pieces, live, ROWS, D_PAD
            )
            m3, l3, acc3 = _load_piece(
                PIECE_ACC, PIECE_ML, i + 3, first, second, step, num_pieces, live, ROWS, D_PAD
            )
            m_new = tl.maximum(m_new, tl.maximum(m2, m3))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        old = tl.exp2(m - m_finite)
        w0 = tl.exp2(m0 - m_finite)
        w1 = tl.exp2(m1 - m_finite)
        l = l * old + (l0 * w0 + l1 * w1)
        acc = acc * old[None, :] + (acc0 * w0[None, :] + acc1 * w1[None, :])
        if AT_ONCE == 4:
            w2 = tl.exp2(m2 - m_finite)
            w3 = tl.exp2(m3 - m_finite)
            l += l2 * w2 + l3 * w3
            acc += acc2 * w2[None, :] + acc3 * w3[None, :]
        m = m_new
    return m, l, acc


@triton.jit
def _slots(i, first, second, step, num_pieces, live, COUNT: tl.constexpr):
    """i64[1, COUNT]: slots from the i-th piece on; i1[SOME, COUNT]: whether there is that row."""
    piece = i + tl.arange(0, COUNT)[None, :]
    slot = tl.where(piece == 0, first, second + (piece - 1) * step).to(tl.int64)
    return slot, (piece < num_pieces) & live[:, None]


@triton.jit
def load_many_merged(
    PIECE_ACC, PIECE_ML, first, second, step, num_pieces, row, live,
    ROWS: tl.constexpr, D_PAD: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """As `load_merged`, for more pieces, of the rows `row` of a block: acc is f32[SOME, D_PAD].

    First all weights, then all values: so each thread sums its part of many pieces, whose loads
    are in flight together, and asks no other thread meanwhile.
    """
    # weights by the handful, or Triton computes each in one thread and passes it on
    AT_ONCE: tl.constexpr = min(64 // SOME, 8192 // (SOME * D_PAD))
    m = tl.full([SOME], float("-inf"), tl.float32)
    l = tl.zeros([SOME], tl.float32)
    for i in range(0, num_pieces, 32):
        slot, known = _slots(i, first, second, step, num_pieces, live, 32)
        ml = PIECE_ML + slot * (2 * ROWS) + row[:, None]
        m_i = tl.load(ml, mask=known, other=float("-inf"), cache_modifier=".cg")
        l_i = tl.load(ml + ROWS, mask=known, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_i, 1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - m_finite) + tl.sum(l_i * tl.exp2(m_i - m_finite[:, None]), 1)
        m = m_new
    m_finite = tl.where(m == float("-inf"), 0.0, m)
    acc = tl.zeros([SOME, D_PAD], tl.float32)
    for i in range(0, num_pieces, AT_ONCE):
        slot, known = _slots(i, first, second, step, num_pieces, live, AT_ONCE)
        at_acc = (slot * ROWS + row[:, None]) * D_PAD
        acc_i = tl.load(  # [SOME, AT_ONCE, D_PAD]
            PIECE_ACC + at_acc[:, :, None] + tl.arange(0, D_PAD)[None, None, :],
            mask=known[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        ml = PIECE_ML + slot * (2 * ROWS) + row[:, None]
        m_i = tl.load(ml, mask=known, other=float("-inf"), cache_modifier=".cg")
        acc += tl.sum(acc_i * tl.exp2(m_i - m_finite[:, None])[:, :, None], 1)
    return m, l, acc

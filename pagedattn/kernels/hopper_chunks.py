"""Short queries in the Gluon kernel: its two consumers compute a chunk of the line of tiles each.

A chunk is of one KV head. A warp walks along it, brings K and V tiles to the consumer's halves of
the rings' slots and tells it which part of which block they are: so the next block's are on their
way while this one's are computed. A block of up to 64 rows, what one instruction multiplies at
least, is computed as one of long queries; parts of a block that chunks share are merged by the last
of their consumers, see `merge.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from pagedattn.kernels.hopper_parts import arrive, store_part, write_merged
from pagedattn.kernels.hopper_producer import bring_tiles
from pagedattn.kernels.hopper_rows import attend, load_rows, store_rows
from pagedattn.kernels.hopper_units import (
    HALF,
    hand_over,
    leave,
    receive,
    wait_for_room,
    whole_tiles,
)
from pagedattn.kernels.masks import first_key
from pagedattn.kernels.merge import pieces_of_chunks
from pagedattn.kernels.plan import short_tiles

PART_FIELDS = gl.constexpr(12)  # numbers that describe a part of a block


@gluon.jit
def walk(
    k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,
    HEADER, SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, TURNS, total_programs,
    first_program, goes_first, num_chunks, num_kv_heads, window_left,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride, rings, handover, is_last,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Take chunks until none is left; tell the consumer of each part, and fill the rings with it.

    Programs from `first_program` on `goes_first`: each of their consumers has a chunk of its own,
    and what is left is taken from a counter. `is_last`: then the program takes nothing more.
    """
    # a token is a row, so these are few, however far pages are apart
    k_rows_per_page = (k_page_stride // k_token_stride).to(gl.int32)
    v_rows_per_page = (v_page_stride // v_token_stride).to(gl.int32)
    chunk = gl.load(HEADER)
    num_given = 2 * (total_programs - first_program)
    count = 0
    turn = 0
    if goes_first:
        number = 2 * (gl.program_id(0) - first_program) + CONSUMER
    else:
        number = num_given + gl.atomic_add(TURNS + 2, 1, sem="relaxed")
    while number < num_chunks * num_kv_heads:
        kv_head = number % num_kv_heads
        index = number // num_kv_heads
        at = gl.load(SHORT_BEGIN + index)
        chunk_end = gl.load(SHORT_BEGIN + index + 1)
        request = gl.load(SHORT_FIRST + index)
        while at < chunk_end:
            request_begin = gl.load(SHORT_ENDS + request)
            request_end = gl.load(SHORT_ENDS + request + 1)
            qo_begin = gl.load(QO_INDPTR + request)
            qo_len = gl.load(QO_INDPTR + request + 1) - qo_begin
            kv_len = gl.load(KV_LENS + request)
            page_begin = gl.load(KV_INDPTR + request)
            if at >= request_end:  # long or idle
                request += 1
            else:
                num_tiles, first_tile = short_tiles(kv_len, qo_len, window_left, TILE, HAS_WINDOW)
                block = (at - request_begin) // num_tiles
                block_begin = request_begin + block * num_tiles
                begin = at - block_begin
                end = gl.minimum(chunk_end - block_begin, num_tiles)
                num_pieces, first_slot, second_slot, _step, slot, counter = pieces_of_chunks(
                    block_begin, num_tiles, chunk, index, num_kv_heads, kv_head
                )
                wait_for_room(handover, turn)
                hand_over(handover, (
                    block, kv_head, qo_begin, qo_len, kv_len, first_tile + begin, first_tile + end,
                    num_pieces, first_slot, second_slot, slot, counter,
                ), 1)  # fmt: skip
                turn += 1
                count = bring_tiles(
                    k_pages, v_pages, KV_INDICES + page_begin, first_tile + begin,
                    first_tile + end, first_key(kv_len - qo_len, window_left, HAS_WINDOW), kv_len,
                    kv_head * HEAD_DIM, k_rows_per_page, v_rows_per_page, rings, count,
                    PAGE_SIZE, BOX, CONSUMER * TILE, TILE, HEAD_DIM, STAGES,
                )  # fmt: skip
                at = block_begin + end
                request += gl.where(at == request_end, 1, 0)
        number = num_given + gl.atomic_add(TURNS + 2, 1, sem="relaxed")
    wait_for_room(handover, turn)
    hand_over(handover, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    if is_last:
        leave(TURNS, 1, 2 * total_programs)


@gluon.jit
def consume_chunks(
    Q, OUT, LSE, PIECE_ACC, PIECE_ML, ARRIVED,
    num_kv_heads, window_left, score_scale, cap, q_stride, out_stride, q_buffers, rings, handover,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Compute every part of a block that this consumer is told of."""
    _k_ring, _k_full, _k_empty, _v_ring, _v_full, v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    q_buffer = q_buffers.index(CONSUMER)
    count = 0  # tiles before this one
    turn = 0
    (
        block, kv_head, qo_begin, qo_len, kv_len, begin, end, num_pieces, first_slot, second_slot,
        slot, counter,
    ) = receive(handover, turn, PART_FIELDS, 4)  # fmt: skip
    while qo_len > 0:
        first_row = block * HALF
        end_row = gl.minimum(first_row + HALF, qo_len * GROUP)
        q_buffer.store(
            load_rows(Q, first_row, end_row, qo_begin, kv_head, q_stride, GROUP, HEAD_DIM)
        )
        fence_async_shared()
        top = kv_len - qo_len + first_row // GROUP
        bottom = kv_len - qo_len + (end_row - 1) // GROUP
        left, right = whole_tiles(
            top, bottom, begin, end, kv_len, window_left, TILE, CAUSAL, HAS_WINDOW
        )
        position = kv_len - qo_len + (first_row + gl.arange(0, HALF, gl.SliceLayout(1, S))) // GROUP
        m, l, acc_next, v_slot, count = attend(
            q_buffer, rings, count, begin, left, right, end, position,
            first_key(kv_len - qo_len, window_left, HAS_WINDOW), kv_len, window_left, score_scale,
            cap, HEAD_DIM, CONSUMER * TILE, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        if num_pieces == 1:
            store_rows(
                OUT, LSE, q_buffer, m, l, acc, first_row, end_row, qo_begin, kv_head, num_kv_heads,
                out_stride, GROUP, HEAD_DIM, WITH_LSE,
            )  # fmt: skip
        else:
            store_part(PIECE_ACC, PIECE_ML, slot, end_row - first_row, m, l, acc, HEAD_DIM)
            if arrive(ARRIVED + counter, num_pieces):
                write_merged(
                    OUT, LSE, PIECE_ACC, PIECE_ML, first_slot, second_slot, num_pieces,
                    first_row, end_row, qo_begin, kv_head, num_kv_heads, out_stride,
                    GROUP, HEAD_DIM, WITH_LSE,
                )  # fmt: skip
        turn += 1
        (
            block, kv_head, qo_begin, qo_len, kv_len, begin, end, num_pieces, first_slot,
            second_slot, slot, counter,
        ) = receive(handover, turn, PART_FIELDS, 4)  # fmt: skip

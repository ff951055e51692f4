"""Attention of few query rows on compute capability 9.0, in Gluon; the twin of `short.py`.

A program computes one chunk of the schedule's line of tiles for one KV head. A warp walks along the
line, brings K and V tiles to two rings in shared memory and tells a warpgroup which part of which
block they are: so the next block's are on their way while this one's are computed. A block of up to
64 rows, what one instruction multiplies at least, is computed as in the kernel for long queries;
parts of a block that programs share are merged by the last of them, see `merge.py`.
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
    barriers,
    hand_over,
    receive,
    wait_for_room,
    whole_tiles,
)
from pagedattn.kernels.masks import first_key
from pagedattn.kernels.merge import pieces_of_chunks, pieces_of_request
from pagedattn.kernels.plan import piece_tiles, short_tiles

FIELDS = gl.constexpr(11)  # numbers that describe a part of a block


@gluon.jit
def _walk(
    k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,
    HEADER, SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, PIECE_ENDS,
    num_kv_heads, window_left, min_piece,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride, rings, handover,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, BATCH_INVARIANT: gl.constexpr,
):  # fmt: skip
    """Hand over each part of a block in this program's chunk, and fill the rings with its tiles."""
    # a token is a row, so these are few, however far pages are apart
    k_rows_per_page = (k_page_stride // k_token_stride).to(gl.int32)
    v_rows_per_page = (v_page_stride // v_token_stride).to(gl.int32)
    kv_head = gl.program_id(0) % num_kv_heads
    index = gl.program_id(0) // num_kv_heads
    chunk = gl.load(HEADER)
    at = gl.load(SHORT_BEGIN + index)
    chunk_end = gl.load(SHORT_BEGIN + index + 1)
    request = gl.load(SHORT_FIRST + index)
    count = 0
    turn = 0
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
            if BATCH_INVARIANT:
                num_blocks = (request_end - request_begin) // num_tiles
                num_chunks = gl.num_programs(0) // num_kv_heads
                piece = piece_tiles(num_tiles, num_blocks, num_chunks, min_piece)
                end = gl.minimum(end, begin + piece)  # it begins where a piece does
                num_pieces, first_slot, second_slot, _step, slot, counter = pieces_of_request(
                    gl.load(PIECE_ENDS + request), block, num_tiles, piece, begin, num_kv_heads,
                    kv_head,
                )  # fmt: skip
            else:
                num_pieces, first_slot, second_slot, _step, slot, counter = pieces_of_chunks(
                    block_begin, num_tiles, chunk, index, num_kv_heads, kv_head
                )
            wait_for_room(handover, turn)
            hand_over(handover, (
                block, qo_begin, qo_len, kv_len, first_tile + begin, first_tile + end,
                num_pieces, first_slot, second_slot, slot, counter,
            ), 1)  # fmt: skip
            turn += 1
            count = bring_tiles(
                k_pages, v_pages, KV_INDICES + page_begin, first_tile + begin, first_tile + end,
                first_key(kv_len - qo_len, window_left, HAS_WINDOW), kv_len, kv_head * HEAD_DIM,
                k_rows_per_page, v_rows_per_page, rings, count, PAGE_SIZE, TILE, HEAD_DIM, STAGES,
            )  # fmt: skip
            at = block_begin + end
            request += gl.where(at == request_end, 1, 0)
    wait_for_room(handover, turn)
    hand_over(handover, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 1)


@gluon.jit
def _consume(
    Q, OUT, LSE, PIECE_ACC, PIECE_ML, ARRIVED,
    num_kv_heads, window_left, score_scale, cap, q_stride, out_stride, q_buffer, rings, handover,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    BATCH_INVARIANT: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Compute every part of a block of this program."""
    _k_ring, _k_full, _k_empty, _v_ring, _v_full, v_empty = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    kv_head = gl.program_id(0) % num_kv_heads
    step = num_kv_heads if BATCH_INVARIANT else 2 * num_kv_heads  # from a piece's slot to the next
    count = 0  # tiles before this one
    turn = 0
    (
        block, qo_begin, qo_len, kv_len, begin, end, num_pieces, first_slot, second_slot, slot,
        counter,
    ) = receive(handover, turn, FIELDS, 4)  # fmt: skip
    while qo_len > 0:
        first_row = block * ROWS
        end_row = gl.minimum(first_row + ROWS, qo_len * GROUP)
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
            cap, HEAD_DIM, TILE, STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        if num_pieces == 1:
            store_rows(
                OUT, LSE, q_buffer, m, l, acc, first_row, end_row, qo_begin, kv_head, num_kv_heads,
                out_stride, GROUP, HEAD_DIM, WITH_LSE,
            )  # fmt: skip
        else:
            store_part(PIECE_ACC, PIECE_ML, slot, end_row - first_row, m, l, acc, HEAD_DIM, ROWS)
            if arrive(ARRIVED + counter, num_pieces):
                write_merged(
                    OUT, LSE, PIECE_ACC, PIECE_ML, first_slot, second_slot, step, num_pieces,
                    first_row, end_row, qo_begin, kv_head, num_kv_heads, out_stride,
                    GROUP, HEAD_DIM, ROWS, WITH_LSE,
                )  # fmt: skip
        turn += 1
        (
            block, qo_begin, qo_len, kv_len, begin, end, num_pieces, first_slot, second_slot, slot,
            counter,
        ) = receive(handover, turn, FIELDS, 4)  # fmt: skip


@gluon.jit(do_not_specialize=["num_kv_heads", "window_left", "min_piece"])
def short_attention_hopper(
    k_pages, v_pages, Q, OUT, LSE,  # as in the backend's run; pages as [rows, heads * HEAD_DIM]
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,  # the table
    HEADER, SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, PIECE_ENDS,  # the schedule
    PIECE_ACC, PIECE_ML, ARRIVED,  # the pieces of shared row blocks
    num_kv_heads, window_left, min_piece, score_scale, cap,
    q_stride: gl.int64, out_stride: gl.int64,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride,  # in elements
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, BATCH_INVARIANT: gl.constexpr, WITH_LSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute this program's chunk of the line of tiles, for its KV head."""
    DTYPE: gl.constexpr = Q.dtype.element_ty
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], DTYPE)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], DTYPE)
    q_buffer = gl.allocate_shared_memory(DTYPE, [HALF, HEAD_DIM], Q_LAYOUT)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], KV_LAYOUT)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], KV_LAYOUT)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 1)
    v_empty = barriers(STAGES, 1)
    cells = gl.allocate_shared_memory(
        gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    rings = (k_ring, k_full, k_empty, v_ring, v_full, v_empty)
    handover = (cells, barriers(1, 1), barriers(1, 1))
    fence_async_shared()  # the engine must find the barriers made
    gl.warp_specialize(
        [
            (_consume, (
                Q, OUT, LSE, PIECE_ACC, PIECE_ML, ARRIVED, num_kv_heads, window_left, score_scale,
                cap, q_stride, out_stride, q_buffer, rings, handover, GROUP, HEAD_DIM, ROWS, TILE,
                STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP, BATCH_INVARIANT, WITH_LSE,
            )),
            (_walk, (
                k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, HEADER, SHORT_ENDS,
                SHORT_BEGIN, SHORT_FIRST, PIECE_ENDS, num_kv_heads, window_left, min_piece,
                k_page_stride, k_token_stride, v_page_stride, v_token_stride, rings, handover,
                HEAD_DIM, PAGE_SIZE, TILE, STAGES, HAS_WINDOW, BATCH_INVARIANT,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip

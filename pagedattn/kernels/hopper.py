"""Attention on compute capability 9.0, in Gluon: one launch for short and long queries.

The twin of `short.py` and `long.py`. A program has an SM to itself, and partitions: two consumers,
a warpgroup each, and two warps that find work for them and bring them tiles through rings in shared
memory. There are two kinds of work, and every program does both, one after the other. Long queries
compute: the consumers share a block, see `hopper_blocks.py`, and one warp finds blocks while the
other brings tiles, see `hopper_producer.py`. Short queries read memory: each consumer has a warp
and its halves of the rings to itself, see `hopper_chunks.py`. Where a step has both, some programs
begin with the one and the others with the other, so that memory and tensor cores are busy at one
time; and whoever is done takes what is left of the other.
Source of the scheme: Shah et al., FlashAttention-3, arXiv 2407.08608; but the consumers take no
turns on the tensor cores, which was slower.

Where pages are no boxes of the copy engine, one warpgroup gathers the rows of long queries and
finds blocks: see `hopper_gather.py`. Short queries are then left to `short.py`, and so are those of
batch-invariant objects, whose bits must not depend on whether a step has long queries.

Tiles go from the last to the first. The engine copies whole pages, so the first and the last tile
may hold slots that the request does not own. Their scores are not selected; their values, which
could be NaN, are zeroed in shared memory before they meet their zero weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from pagedattn.kernels.hopper_blocks import consume_blocks
from pagedattn.kernels.hopper_chunks import PART_FIELDS, consume_chunks, walk
from pagedattn.kernels.hopper_gather import gather
from pagedattn.kernels.hopper_producer import hand_out, produce
from pagedattn.kernels.hopper_units import FIELDS, HALF, barriers, cells_of

_NUMBERS = (
    "num_kv_heads", "window_left", "k_page_stride", "k_token_stride", "v_page_stride",
    "v_token_stride", "num_chunks", "long_share", "total_programs",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper(
    k_pages, v_pages, Q, OUT, LSE,  # as in the backend's run; pages as `GATHER` says
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS,  # the table
    HEADER, SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, LONG_UNITS,  # the schedule
    PIECE_ACC, PIECE_ML, ARRIVED,  # the pieces of shared row blocks
    TURNS,  # i32[3]: blocks taken, who is done, chunks taken; 0 before and after
    num_kv_heads, window_left, score_scale, cap,
    q_stride: gl.int64, out_stride: gl.int64,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride,  # in elements
    num_chunks,  # of the line of short work; 0: that is left to `short.py`
    long_share,  # programs that begin with long queries, where there are any
    total_programs,  # of all launches that share `TURNS`
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr, TILE: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, WITH_LSE: gl.constexpr, STAGES: gl.constexpr,
    GATHER: gl.constexpr,  # pages are pointers; else maps of [rows, heads * HEAD_DIM]
):  # fmt: skip
    """Compute short queries in blocks of 64 rows, long ones in blocks of 128."""
    num_units = gl.load(HEADER + 2) * num_kv_heads
    heads_at_once = gl.load(HEADER + 3)
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
    rings = (k_ring, k_full, k_empty, v_ring, v_full, v_empty)
    handover = (cells_of(FIELDS), barriers(1, 1), barriers(1, 2 if GATHER else 3))
    # partitions; warps of each but the first, which has those of the launch; registers of threads
    if GATHER:
        fence_async_shared()  # the engine must find the barriers made
        gl.warp_specialize(
            [
                (consume_blocks, (
                    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                    q_buffers, rings, handover, 0, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                    HAS_WINDOW, SOFT_CAP, WITH_LSE,
                )),
                (consume_blocks, (
                    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                    q_buffers, rings, handover, 1, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                    HAS_WINDOW, SOFT_CAP, WITH_LSE,
                )),
                (gather, (
                    k_pages, v_pages, KV_INDICES, window_left, k_page_stride, k_token_stride,
                    v_page_stride, v_token_stride, rings, QO_INDPTR, KV_INDPTR, KV_LENS,
                    LONG_UNITS, TURNS, total_programs, num_units, num_kv_heads, heads_at_once,
                    handover, GROUP, HEAD_DIM, PAGE_SIZE, TILE, STAGES, CAUSAL, HAS_WINDOW,
                )),
            ],
            [4, 4],
            [224, 56],
        )  # fmt: skip
    else:
        has_short = (gl.load(HEADER + 1) > 0) & (num_chunks > 0)
        has_long = num_units > 0
        first_short = gl.where(has_long, long_share, 0)
        begins_long = gl.where(gl.program_id(0) < first_short, 1, 0)
        # each consumer's own, on its halves of the same rings
        rings_0 = (
            k_ring, barriers(STAGES, 1), barriers(STAGES, 1),
            v_ring, barriers(STAGES, 1), barriers(STAGES, 1),
        )  # fmt: skip
        rings_1 = (
            k_ring, barriers(STAGES, 1), barriers(STAGES, 1),
            v_ring, barriers(STAGES, 1), barriers(STAGES, 1),
        )  # fmt: skip
        handover_0 = (cells_of(PART_FIELDS), barriers(1, 1), barriers(1, 1))
        handover_1 = (cells_of(PART_FIELDS), barriers(1, 1), barriers(1, 1))
        fence_async_shared()
        for turn in range(0, 2):
            is_last = (turn == 1) | (has_long != has_short)
            if turn + begins_long == 1:
                if has_long:
                    gl.warp_specialize(
                        [
                            (consume_blocks, (
                                Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride,
                                out_stride, q_buffers, rings, handover, 0, GROUP, HEAD_DIM, TILE,
                                STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP, WITH_LSE,
                            )),
                            (consume_blocks, (
                                Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride,
                                out_stride, q_buffers, rings, handover, 1, GROUP, HEAD_DIM, TILE,
                                STAGES, CAUSAL, HAS_WINDOW, SOFT_CAP, WITH_LSE,
                            )),
                            (produce, (
                                k_pages, v_pages, KV_INDICES, window_left, k_page_stride,
                                k_token_stride, v_page_stride, v_token_stride, rings, handover,
                                GROUP, HEAD_DIM, PAGE_SIZE, BOX, TILE, STAGES, CAUSAL, HAS_WINDOW,
                            )),
                            (hand_out, (
                                QO_INDPTR, KV_INDPTR, KV_LENS, LONG_UNITS, TURNS, total_programs,
                                num_units, num_kv_heads, heads_at_once, handover, is_last,
                            )),
                        ],
                        [4, 1, 1],
                        [232, 40, 40],
                    )  # fmt: skip
            else:
                if has_short:
                    gl.warp_specialize(
                        [
                            (consume_chunks, (
                                Q, OUT, LSE, PIECE_ACC, PIECE_ML, ARRIVED, num_kv_heads,
                                window_left, score_scale, cap, q_stride, out_stride, q_buffers,
                                rings_0, handover_0, 0, GROUP, HEAD_DIM, TILE // 2, STAGES,
                                CAUSAL, HAS_WINDOW, SOFT_CAP, WITH_LSE,
                            )),
                            (consume_chunks, (
                                Q, OUT, LSE, PIECE_ACC, PIECE_ML, ARRIVED, num_kv_heads,
                                window_left, score_scale, cap, q_stride, out_stride, q_buffers,
                                rings_1, handover_1, 1, GROUP, HEAD_DIM, TILE // 2, STAGES,
                                CAUSAL, HAS_WINDOW, SOFT_CAP, WITH_LSE,
                            )),
                            (walk, (
                                k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, HEADER,
                                SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, TURNS, total_programs,
                                first_short, begins_long == 0, num_chunks, num_kv_heads,
                                window_left, k_page_stride, k_token_stride,
                                v_page_stride, v_token_stride, rings_0, handover_0, is_last, 0,
                                HEAD_DIM, PAGE_SIZE, BOX, TILE // 2, STAGES, HAS_WINDOW,
                            )),
                            (walk, (
                                k_pages, v_pages, QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, HEADER,
                                SHORT_ENDS, SHORT_BEGIN, SHORT_FIRST, TURNS, total_programs,
                                first_short, begins_long == 0, num_chunks, num_kv_heads,
                                window_left, k_page_stride, k_token_stride,
                                v_page_stride, v_token_stride, rings_1, handover_1, is_last, 1,
                                HEAD_DIM, PAGE_SIZE, BOX, TILE // 2, STAGES, HAS_WINDOW,
                            )),
                        ],
                        [4, 1, 1],
                        [232, 40, 40],
                    )  # fmt: skip

"""Attention of many query rows on compute capability 9.0, in Gluon; the twin of `long.py`.

A program has an SM to itself, and partitions which run over the same units of work. Two consumers,
a warpgroup each, take half of a block's rows and overlap the products of one tile with the softmax
of another: see `hopper_consumer.py`. A warp brings them K and V tiles, and another takes units from
a counter, whoever is free next: see `hopper_producer.py`. Where pages are no boxes of the copy
engine, one warpgroup gathers their rows and takes units: see `hopper_gather.py`.
Source of the scheme: Shah et al., FlashAttention-3, arXiv 2407.08608; but the consumers take no
turns on the tensor cores, which was slower.

Tiles go from the last to the first. The engine copies whole pages, so the first and the last tile
may hold slots that the request does not own. Their scores are not selected; their values, which
could be NaN, are zeroed in shared memory before they meet their zero weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from pagedattn.kernels.hopper_consumer import consume
from pagedattn.kernels.hopper_gather import gather
from pagedattn.kernels.hopper_producer import hand_out, produce
from pagedattn.kernels.hopper_units import FIELDS, HALF, barriers

_NUMBERS = (
    "num_kv_heads", "window_left", "k_page_stride", "k_token_stride", "v_page_stride",
    "v_token_stride", "total_programs",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def long_attention_hopper(
    k_pages, v_pages, Q, OUT, LSE,  # as in the backend's run; pages as `GATHER` says
    QO_INDPTR, KV_INDPTR, KV_INDICES, KV_LENS, HEADER, UNITS,  # the table and the schedule
    TURNS,  # i32[2]: units taken, programs done; 0 before and after
    num_kv_heads, window_left, score_scale, cap,
    q_stride: gl.int64, out_stride: gl.int64,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride,  # in elements
    total_programs,  # of all launches that share `TURNS`, which take the units between them
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, TILE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    WITH_LSE: gl.constexpr, STAGES: gl.constexpr,
    GATHER: gl.constexpr,  # pages are pointers; else maps of [rows, heads * HEAD_DIM]
):  # fmt: skip
    """Compute units of the long list, in blocks of 128 rows, until none is left."""
    num_units = gl.load(HEADER + 2) * num_kv_heads
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
    cells = gl.allocate_shared_memory(
        gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    rings = (k_ring, k_full, k_empty, v_ring, v_full, v_empty)
    handover = (cells, barriers(1, 1), barriers(1, 2 if GATHER else 3))
    fence_async_shared()  # the engine must find the barriers made
    # partitions; warps of each but the first, which has those of the launch; registers of threads
    if GATHER:
        gl.warp_specialize(
            [
                (consume, (
                    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                    q_buffers, rings, handover, 0, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                    HAS_WINDOW, SOFT_CAP, WITH_LSE,
                )),
                (consume, (
                    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                    q_buffers, rings, handover, 1, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                    HAS_WINDOW, SOFT_CAP, WITH_LSE,
                )),
                (gather, (
                    k_pages, v_pages, KV_INDICES, window_left, k_page_stride, k_token_stride,
                    v_page_stride, v_token_stride, rings, QO_INDPTR, KV_INDPTR, KV_LENS, UNITS,
                    TURNS, num_units, num_kv_heads, total_programs, handover, GROUP, HEAD_DIM,
                    PAGE_SIZE, TILE, STAGES, CAUSAL, HAS_WINDOW,
                )),
            ],
            [4, 4],
            [224, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                    q_buffers, rings, handover, 0, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                    HAS_WINDOW, SOFT_CAP, WITH_LSE,
                )),
                (consume, (
                    Q, OUT, LSE, num_kv_heads, window_left, score_scale, cap, q_stride, out_stride,
                    q_buffers, rings, handover, 1, GROUP, HEAD_DIM, TILE, STAGES, CAUSAL,
                    HAS_WINDOW, SOFT_CAP, WITH_LSE,
                )),
                (produce, (
                    k_pages, v_pages, KV_INDICES, window_left, k_page_stride, k_token_stride,
                    v_page_stride, v_token_stride, rings, handover, GROUP, HEAD_DIM, PAGE_SIZE,
                    TILE, STAGES, CAUSAL, HAS_WINDOW,
                )),
                (hand_out, (
                    QO_INDPTR, KV_INDPTR, KV_LENS, UNITS, TURNS, num_units, num_kv_heads,
                    total_programs, handover,
                )),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )  # fmt: skip

"""Device code that writes new keys and values into their slots of a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024  # elements of a token's row that one program writes


@triton.jit
def _append_kernel(
    k,  # dtype[tokens, heads, HEAD_DIM]
    v,  # dtype[tokens, heads, HEAD_DIM]
    slots,  # i64[tokens]
    pages,  # dtype[pages, 2, page_size, heads, HEAD_DIM], contiguous
    num_refused,  # i32[1]
    num_slots,
    page_size,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,  # heads * HEAD_DIM
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if tl.program_id(1) == 0:
        tl.atomic_add(num_refused, 1, mask=(slot < -1) | (slot >= num_slots))
    if (slot >= 0) & (slot < num_slots):
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = element < ROW
        head = (element // HEAD_DIM).to(tl.int64)
        dim = element % HEAD_DIM
        k_row = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        v_row = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        # K of a page is page_size rows, and V the page_size rows after them
        row = (slot // page_size) * (2 * page_size) + slot % page_size
        tl.store(pages + row * ROW + element, k_row, mask=mask)
        tl.store(pages + (row + page_size) * ROW + element, v_row, mask=mask)


def launch_append(k: Tensor, v: Tensor, slots: Tensor, pages: Tensor, num_refused: Tensor) -> None:
    """Write each token's row; count the slots that are neither in `pages` nor -1.

    Args:
        k: dtype[tokens, heads, head_dim], dense in its last dimension; at least one token.
        v: As `k`.
        slots: i64[tokens], contiguous.
        pages: dtype[pages, 2, page_size, heads, head_dim], contiguous.
        num_refused: i32[1], added to.
    """
    num_pages, _, page_size, num_heads, head_dim = pages.shape
    row = num_heads * head_dim
    block = min(triton.next_power_of_2(row), MAX_BLOCK)
    _append_kernel[(k.shape[0], triton.cdiv(row, block))](
        k,
        v,
        slots,
        pages,
        num_refused,
        num_pages * page_size,
        page_size,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEAD_DIM=head_dim,
        ROW=row,
        BLOCK=block,
    )

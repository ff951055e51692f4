"""Device code that writes new keys and values into their slots of a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 8  # tokens that one program writes
MAX_BLOCK = 512  # elements of a token's row that one program writes


@triton.jit
def _append_kernel(
    k,  # dtype[tokens, heads, HEAD_DIM]
    v,  # dtype[tokens, heads, HEAD_DIM]
    slots,  # i64[tokens]
    pages,  # dtype[pages, 2, page_size, heads, HEAD_DIM], contiguous
    num_refused,  # i32[1]
    num_tokens,
    num_slots,
    page_size,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,  # heads * HEAD_DIM
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)  # [TOKENS]
    refused = tl.sum(((slot < -1) | (slot >= num_slots)).to(tl.int32), 0)
    if (tl.program_id(1) == 0) & (refused > 0):
        tl.atomic_add(num_refused, refused)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = (element // HEAD_DIM).to(tl.int64)
    dim = element % HEAD_DIM
    inside = (slot >= 0) & (slot < num_slots)
    mask = inside[:, None] & (element < ROW)[None, :]  # [TOKENS, BLOCK]
    k_from = token[:, None] * k_token_stride + (head * k_head_stride + dim)[None, :]
    v_from = token[:, None] * v_token_stride + (head * v_head_stride + dim)[None, :]
    # K of a page is page_size rows, and V the page_size rows after them
    row = (slot // page_size) * (2 * page_size) + slot % page_size
    k_to = row[:, None] * ROW + element[None, :]
    v_to = (row + page_size)[:, None] * ROW + element[None, :]
    tl.store(pages + k_to, tl.load(k + k_from, mask=mask), mask=mask)
    tl.store(pages + v_to, tl.load(v + v_from, mask=mask), mask=mask)


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
    with torch.cuda.device_of(pages):  # a kernel launches on the current device
        _append_kernel[(triton.cdiv(k.shape[0], TOKENS), triton.cdiv(row, block))](
            k,
            v,
            slots,
            pages,
            num_refused,
            k.shape[0],
            num_pages * page_size,
            page_size,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            HEAD_DIM=head_dim,
            ROW=row,
            TOKENS=TOKENS,
            BLOCK=block,
        )

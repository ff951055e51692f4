"""Where keys, values and queries are in memory. Every product with a stride is made in 64 bits."""

import triton
import triton.language as tl


@triton.jit
def load_page_ids(KV_INDICES, first_page, key, low, high, PAGE_SIZE: tl.constexpr):
    """i32: the physical page of each key of a request; 0 outside `[low, high)`: none is read."""
    inside = (key >= low) & (key < high)
    return tl.load(KV_INDICES + first_page + key // PAGE_SIZE, mask=inside, other=0)


@triton.jit
def slot_offsets(page, key, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """i64: element offset of each key's slot in a K or V cache."""
    return page.to(tl.int64) * page_stride + (key % PAGE_SIZE).to(tl.int64) * token_stride

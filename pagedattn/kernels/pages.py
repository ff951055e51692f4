"""Where the keys and values of a tile are in memory, for products with strides in 64 bits.

Keys come in tiles of `TILE`, each of which begins at a multiple of it.
"""

import triton
import triton.language as tl


@triton.jit
def tile_page_ids(
    KV_INDICES, first_page, begin, low, high, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """i32[TILE]: the physical page of each key of a tile; 0 outside `[low, high)`: none is read."""
    key = begin + tl.arange(0, TILE)
    inside = (key >= low) & (key < high)
    if TILE % PAGE_SIZE == 0:  # so that what does not change from tile to tile is computed once
        at = begin // PAGE_SIZE + tl.arange(0, TILE) // PAGE_SIZE
    else:
        at = key // PAGE_SIZE
    return tl.load(KV_INDICES + first_page + at, mask=inside, other=0)


@triton.jit
def places_in_page(begin, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """i64[TILE]: the slot of each key of a tile inside its page."""
    if TILE % PAGE_SIZE == 0:
        place = tl.arange(0, TILE) % PAGE_SIZE
    else:
        place = (begin + tl.arange(0, TILE)) % PAGE_SIZE
    return place.to(tl.int64)

"""Which keys a query sees. The schedule and every kernel take their bounds from here."""

import triton
import triton.language as tl


@triton.jit
def first_key(position, window_left, HAS_WINDOW: tl.constexpr):
    """First key that the query at `position` sees."""
    if HAS_WINDOW:
        return tl.maximum(position - window_left, 0)
    else:
        return position * 0


@triton.jit
def end_key(position, kv_len, CAUSAL: tl.constexpr):
    """One past the last key that the query at `position` sees."""
    if CAUSAL:
        return tl.maximum(tl.minimum(position + 1, kv_len), 0)
    else:
        return kv_len + position * 0


@triton.jit
def is_visible(key, position, kv_len, window_left, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Whether the query at `position` sees `key`; the two broadcast against each other."""
    visible = key < kv_len
    if CAUSAL:
        visible = visible & (key <= position)
    if HAS_WINDOW:
        visible = visible & (key >= position - window_left)
    return visible

"""Which keys a query sees: `[first_key, end_key)`. Schedule and kernels take their bounds here."""

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

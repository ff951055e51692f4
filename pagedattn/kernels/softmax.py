"""The arithmetic that every attention kernel shares: products, scores, and the running softmax.

A running state is `(m, l, acc)`: the largest score so far, the sum of exponentials relative to
it, and the weighted sum of values relative to it. Scores are in base 2: natural scores times
log2(e). Empty is `(-inf, 0, 0)`; real minus infinity, so that no score is too low to count.
Source: Dao et al., FlashAttention, arXiv 2205.14135, algorithm 1.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Product with float32 sums. `UPCAST`: the interpreter would multiply bfloat16 wrongly."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc, UPCAST: tl.constexpr):
    """`acc` plus the product."""
    if UPCAST:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """float32 to `dtype`, to nearest even. The interpreter would truncate to bfloat16."""
    if UPCAST:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # it maps denormals to junk
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def scale_scores(s, score_scale, cap, SOFT_CAP: tl.constexpr):
    """Raw products to base-2 scores: `s * score_scale`, or `cap * tanh(s * score_scale)`.

    The caller folds log2(e) into `score_scale`, or into `cap` where there is one.
    """
    s = s * score_scale
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)): exact at both ends, and there is no tanh in the language
        s = cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * 2.8853900817779268)))
    return s


@triton.jit
def weigh(s, m, AXIS: tl.constexpr):
    """Take a tile of scores into the running maximum.

    Args:
        s: Base-2 scores, keys along `AXIS`; -inf where a key is not visible.
        m: Running maximum of each query.

    Returns:
        p, the tile's weights relative to the new maximum; the factor that old sums must be
        multiplied by; and the new m.
    """
    m_new = tl.maximum(m, tl.max(s, AXIS))
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf would be NaN
    p = tl.exp2(s - tl.expand_dims(m_finite, AXIS))
    rescale = tl.exp2(m - m_finite)
    return p, rescale, m_new


@triton.jit
def finish(m, l, acc, AXIS: tl.constexpr):
    """The output and the natural-log LSE of a finished state; 0 and -inf where it is empty."""
    total = tl.where(l == 0, 1.0, l)
    # selected: 0 times the NaN that another row of the block sees is in an empty row's sum too
    out = tl.where(tl.expand_dims(l == 0, AXIS), 0.0, acc / tl.expand_dims(total, AXIS))
    lse = (m + tl.log2(total)) * LN_2
    return out, lse

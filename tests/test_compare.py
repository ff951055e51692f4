"""The tolerance is derived and sharp; the comparison lets nothing slip."""

import math
from dataclasses import replace

import pytest
import torch
from attention_steps import batch_of
from hypothesis import given

from pagedattn import AttentionSpec
from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Bound, allowed_error
from pagedattn.checking.compare import check_step, compare
from pagedattn.checking.dense import dense_attention
from pagedattn.checking.step import attend_with, oracle
from pagedattn.testing import batches

right = attend_with("reference")


def float32_kernel(step, tile: int) -> AttentionOutput:
    """FlashAttention's loop in torch: float32 scores and sums, weights rounded to the dtype."""
    spec, table = step.spec, step.page_table
    out = torch.zeros(step.q.shape, dtype=torch.float32)
    lse = torch.full(step.q.shape[:2], -torch.inf)
    keys = step.kv_cache.transpose(1, 2).flatten(0, 1).float()
    row = 0
    for request, (qo_len, kv_len) in enumerate(zip(step.qo_lens, step.kv_lens, strict=True)):
        slots = table.pages_of(request).long()[:, None] * step.page_size
        slots = (slots + torch.arange(step.page_size)).flatten()[:kv_len]
        for position in range(kv_len - qo_len, kv_len):
            low = max(0, position - spec.window_left) if spec.window_left >= 0 else 0
            high = min(position + 1, kv_len) if spec.causal else kv_len
            m = torch.full((spec.num_qo_heads,), -torch.inf)
            total, acc = torch.zeros_like(m), torch.zeros(spec.num_qo_heads, spec.head_dim)
            for begin in range(low, high, tile):
                k, v = keys[slots[begin : min(begin + tile, high)]].unbind(1)
                k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
                s = (step.q[row].float() * k).sum(-1) * spec.scale
                if spec.logits_soft_cap:
                    s = spec.logits_soft_cap * torch.tanh(s / spec.logits_soft_cap)
                m_new = torch.maximum(m, s.amax(0))
                p = torch.exp(s - m_new)
                total = total * torch.exp(m - m_new) + p.sum(0)
                rounded = p.to(spec.dtype).float()
                acc = acc * torch.exp(m - m_new)[:, None] + (rounded[..., None] * v).sum(0)
                m = m_new
            if low < high:
                out[row], lse[row] = acc / total[:, None], m + torch.log(total)
            row += 1
    return AttentionOutput(out.to(spec.dtype), lse)


@pytest.mark.parametrize("tile", [1, 16, 64])
@given(batch=batches(max_kv_len=200, max_work=1))
def test_an_honest_kernel_passes_whatever_its_tiles(batch, tile):
    comparison = check_step(lambda step: float32_kernel(step, tile), batch.materialise())
    assert comparison.ok, comparison.worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window_left", [1, 4, 15, 33, 64])
def test_a_window_one_key_short_is_caught(dtype, window_left):
    spec = AttentionSpec(4, 2, 64, dtype, window_left=window_left)
    step = batch_of(spec, 16, (80,), (1,)).materialise()
    short = replace(spec, window_left=window_left - 1)
    assert check_step(right, step).ok
    assert not check_step(lambda step: right(replace(step, spec=short)), step).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_wrong_key_of_4096_is_caught_where_it_is_loud(dtype):
    spec = AttentionSpec(4, 2, 64, dtype, window_left=4095)
    short = replace(spec, window_left=4094)
    batches = [batch_of(spec, 16, (5000,), (1,), values="loud_key", seed=s) for s in range(8)]
    caught = [
        not check_step(lambda step: right(replace(step, spec=short)), b.materialise()).ok
        for b in batches
    ]
    assert any(caught)


def test_the_bound_is_a_few_roundings_of_the_output():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        spec = AttentionSpec(4, 2, 64, dtype)
        step = batch_of(spec, 16, (100, 7), (1, 7)).materialise()
        bound = allowed_error(step, oracle(step))
        eps = torch.finfo(dtype).eps
        low, high = (0.1, 20) if dtype != torch.float32 else (1, 200)
        assert (bound.out > low * eps * 0.1).all()
        assert bound.out.median() < high * eps
        assert (bound.lse < 1e-4).all()


def test_the_bound_of_an_empty_row_is_nothing():
    spec = AttentionSpec(4, 2, 64, torch.float16)
    step = batch_of(spec, 4, (3, 0), (5, 2)).materialise()
    bound = allowed_error(step, oracle(step))
    empty = [0, 1, 5, 6]
    assert (bound.out[empty] == 0).all()
    assert (bound.lse[empty] == 0).all()
    assert (bound.out[2:5] > 0).all()
    assert torch.isfinite(bound.out).all()
    assert torch.isfinite(bound.lse).all()


def test_low_precision_rounds_what_kernels_round():
    spec = AttentionSpec(4, 2, 64, torch.bfloat16)
    step = batch_of(spec, 4, (50,), (5,)).materialise()
    rough, exact = dense_attention(step), oracle(step)
    assert torch.equal(rough.out, rough.out.bfloat16().float())
    error = (rough.out - exact.out).abs().max()
    assert 2**-10 < error < 2**-6
    assert (rough.lse - exact.lse).abs().max() < 1e-5


SHAPE = (3, 2, 4)
EXPECTED = AttentionOutput(torch.ones(SHAPE).double(), torch.ones(SHAPE[:2]).double())
ALLOWED = Bound(torch.full(SHAPE, 0.5).double(), torch.full(SHAPE[:2], 0.5).double())


def changed(tensor: str, place: tuple[int, ...], value: float) -> AttentionOutput:
    got = AttentionOutput(torch.ones(SHAPE), torch.ones(SHAPE[:2]))
    getattr(got, tensor)[place] = value
    return got


@pytest.mark.parametrize(("tensor", "place"), [("out", (2, 1, 3)), ("lse", (1, 0))])
@pytest.mark.parametrize("value", [1.6, 0.4, math.nan, math.inf, -math.inf])
def test_one_wrong_element_is_found_at_its_place(tensor, place, value):
    comparison = compare(changed(tensor, place, value), EXPECTED, ALLOWED)
    worst = comparison.worst
    assert not comparison.ok
    assert (worst.tensor, worst.row, worst.head) == (tensor, *place[:2])
    assert worst.element == (place[2] if tensor == "out" else None)
    assert worst.got == pytest.approx(value, nan_ok=True)
    assert (worst.expected, worst.allowed) == (1.0, 0.5)
    assert worst.error == pytest.approx(abs(value - 1) if math.isfinite(value) else math.inf)
    text = str(worst)
    assert text.startswith(f"{tensor}[{', '.join(map(str, place))}] is ")
    assert "expected 1" in text
    assert "allowed 0.5" in text


def test_an_error_of_just_what_is_allowed_passes():
    assert compare(changed("out", (0, 0, 0), 1.5), EXPECTED, ALLOWED).ok
    assert compare(changed("lse", (0, 0), 0.5), EXPECTED, ALLOWED).ok


def test_the_worst_is_relative_to_what_is_allowed():
    tight = Bound(ALLOWED.out.clone(), ALLOWED.lse)
    tight.out[0, 1, 2] = 0.01
    got = changed("out", (2, 1, 3), 1.4)
    got.out[0, 1, 2] = 1.1
    worst = compare(got, EXPECTED, tight).worst
    assert (worst.row, worst.head, worst.element) == (0, 1, 2)
    assert worst.excess == pytest.approx(10)


def test_minus_infinity_must_match_exactly():
    expected = AttentionOutput(EXPECTED.out, EXPECTED.lse.clone())
    expected.lse[1, 1] = -math.inf
    allowed = Bound(ALLOWED.out, torch.full(SHAPE[:2], 1e30).double())
    assert compare(changed("lse", (1, 1), -math.inf), expected, allowed).ok
    assert not compare(changed("lse", (1, 1), -1e30), expected, allowed).ok
    assert not compare(changed("lse", (1, 1), math.inf), expected, allowed).ok
    assert not compare(changed("lse", (0, 0), -math.inf), expected, allowed).ok


def test_where_nothing_is_allowed_nothing_passes():
    nothing = Bound(torch.zeros(SHAPE).double(), ALLOWED.lse)
    assert compare(changed("out", (0, 0, 0), 1.0), EXPECTED, nothing).ok
    assert not compare(changed("out", (0, 0, 0), 1.0000001), EXPECTED, nothing).ok


def test_nothing_compared_is_nothing_wrong():
    empty = AttentionOutput(torch.empty(0, 2, 4).double(), torch.empty(0, 2).double())
    comparison = compare(empty, empty, Bound(*empty))
    assert comparison.ok
    assert comparison.worst is None


def test_another_shape_is_refused():
    short = AttentionOutput(torch.ones(2, 2, 4), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"out has shape \[2, 2, 4\], expected \[3, 2, 4\]"):
        compare(short, EXPECTED, ALLOWED)

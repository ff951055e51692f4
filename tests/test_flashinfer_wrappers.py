"""The prefill and decode wrappers compute what the reference does."""

import math

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    HEADS,
    PAGE_SIZE,
    assert_right,
    flashinfer,
    make_step,
    plan,
)
from flashinfer_cases import eager_decode as decode
from flashinfer_cases import eager_prefill as prefill


@pytest.mark.parametrize("window_left", [-1, 0, 3])
@pytest.mark.parametrize(
    ("kv_lens", "qo_lens"),
    [
        ([5, 9, 17], [5, 2, 1]),
        ([0, 8, 1], [0, 8, 1]),
        ([4, 0, 7], [0, 3, 7]),
        ([2, 6], [5, 6]),
    ],
)
def test_prefill_is_right(device, kv_lens, qo_lens, window_left):
    step = make_step(device, kv_lens, qo_lens)
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays, window_left=window_left)
    out, lse = wrapper.run_return_lse(step.q, step.kv_cache)
    assert_right(out, lse, step, window_left=window_left)
    assert torch.equal(wrapper.run(step.q, step.kv_cache), out)


def test_prefill_without_a_mask_is_right(device):
    step = make_step(device, [5, 9], [3, 2])
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays, causal=False)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step, causal=False)


@pytest.mark.parametrize("window_left", [-1, 0, 3])
def test_decode_is_right(device, window_left):
    step = make_step(device, [1, 9, 0, 4, 17])
    wrapper = decode(device)
    wrapper.plan(*step.kv_arrays, window_left=window_left)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step, window_left=window_left)


def test_options_reach_flashinfer_and_change_the_output(device):
    step = make_step(device, [9, 5])
    plain, capped = decode(device), decode(device)
    plain.plan(*step.kv_arrays)
    capped.plan(*step.kv_arrays, logits_soft_cap=1.0, sm_scale=0.5)
    out, lse = capped.run_return_lse(step.q, step.kv_cache)
    assert_right(out, lse, step, logits_soft_cap=1.0, sm_scale=0.5)
    assert not torch.equal(out, plain.run(step.q, step.kv_cache))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soft_cap": 1.0}, "unknown option 'soft_cap', expected some of .*'logits_soft_cap'"),
        ({"q_data_type": torch.float16}, "'q_data_type', which the wrapper sets itself"),
    ],
)
def test_unknown_options_and_those_of_the_wrapper_raise(device, options, message):
    step = make_step(device, [9, 5])
    for wrapper in (decode(device), prefill(device)):
        with pytest.raises(TypeError, match=message):
            plan(wrapper, step, **options)
        with pytest.raises(RuntimeError, match="no plan"):
            wrapper.run(step.q, step.kv_cache)


def test_float16_is_right(device):
    step = make_step(device, [9, 5], [4, 5], dtype=torch.float16)
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays, dtype=torch.float16)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step)


def test_an_empty_batch_gives_an_empty_output(device):
    step = make_step(device, [], [])
    for wrapper in (decode(device), prefill(device)):
        plan(wrapper, step)
        out, lse = wrapper.run_return_lse(step.q, step.kv_cache)
        assert out.shape == step.q.shape
        assert lse.shape == (0, 4)


def test_a_batch_without_queries_gives_an_empty_output(device):
    step = make_step(device, [5, 3], [0, 0])
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    assert wrapper.run(step.q, step.kv_cache).shape == step.q.shape


def test_new_tokens_are_written_where_attention_reads_them(device):
    step = make_step(device, [5, 9, 4], [5, 2, 1])
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    positions = [0, 1, 2, 3, 4, 7, 8, 3]
    requests = [0, 0, 0, 0, 0, 1, 1, 2]
    for token, (request, position) in enumerate(zip(requests, positions, strict=True)):
        page = step.table.pages_of(request)[position // PAGE_SIZE]
        assert int(wrapper.token_to_page[token]) == int(page)
        assert int(wrapper.token_to_cache[token]) == position % PAGE_SIZE


def test_pairs_of_caches_and_strided_queries_are_right(device):
    step = make_step(device, [9, 5], [4, 5])
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    packed = torch.randn(9, 7, HEADS["head_dim"], device=device, dtype=step.q.dtype)
    packed[:, 2:6] = step.q
    pair = (step.kv_cache[:, 0].clone(), step.kv_cache[:, 1].clone())
    assert_right(wrapper.run(packed[:, 2:6], pair), None, step)


def test_device_tables_are_right(device):
    step = make_step(device, [9, 5], [4, 5])
    wrapper = prefill(device)
    wrapper.plan(step.qo_indptr.to(device), *(a.to(device) for a in step.kv_arrays))
    assert_right(wrapper.run(step.q, step.kv_cache), None, step)


def test_the_lse_is_natural_and_never_converted_twice(device):
    step = make_step(device, [1, 1])
    for wrapper in (decode(device), prefill(device)):
        plan(wrapper, step)
        _, lse = wrapper.run_return_lse(step.q, step.kv_cache)
        keys = step.kv_cache[step.table.kv_indices.long(), 0, 0].double().repeat_interleave(2, 1)
        score = (step.q.double() * keys).sum(-1) / math.sqrt(
            HEADS["head_dim"]
        )  # one key: its score is the LSE
        torch.testing.assert_close(lse.double(), score, rtol=0, atol=1e-3)

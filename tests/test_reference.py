"""The oracle is right: worked by hand, and against dense attention that shares no code with it."""

import math

import pytest
import torch
from attention_steps import batch_of
from hypothesis import given

from pagedattn import AttentionSpec, PageTable
from pagedattn.backends.reference import visible_range
from pagedattn.checking.dense import dense_attention, visible_mask
from pagedattn.checking.step import Step, attend_with, oracle
from pagedattn.testing import batches, specs


def tiny_step(keys, values, queries, *, page_size=2, pages=(1, 0), **options) -> Step:
    """One request, one head; keys, values and queries are numbers, in element 0 of 16."""
    spec = AttentionSpec(1, 1, 16, torch.float32, sm_scale=1.0, **options)
    cache = torch.full((len(pages), 2, page_size, 1, 16), torch.nan)
    for token, pair in enumerate(zip(keys, values, strict=True)):
        for which, number in enumerate(pair):
            slot = cache[pages[token // page_size], which, token % page_size, 0]
            slot[:] = 0
            slot[0] = number
    q = torch.zeros(len(queries), 1, 16)
    q[:, 0, 0] = torch.tensor(queries)
    table = PageTable.from_lengths([len(keys)], page_size, pages)
    return Step(spec, table, torch.tensor([0, len(queries)], dtype=torch.int32), q, cache)


def answer(step: Step) -> tuple[list[float], list[float]]:
    out, lse = oracle(step)
    return out[:, 0, 0].tolist(), lse[:, 0].tolist()


def test_one_query_over_three_keys():
    # scores ln 1, ln 2, ln 5: weights 1/8, 2/8, 5/8
    step = tiny_step([0.0, math.log(2), math.log(5)], [8.0, 80.0, 800.0], [1.0])
    out, lse = answer(step)
    assert out == pytest.approx([1 + 20 + 500], rel=1e-6)
    assert lse == pytest.approx([math.log(8)], rel=1e-6)


def test_causal_queries_see_up_to_themselves():
    # equal scores: means of values, over the first two and over all three
    out, lse = answer(tiny_step([0.0] * 3, [1.0, 2.0, 6.0], [1.0, 1.0]))
    assert out == pytest.approx([1.5, 3.0])
    assert lse == pytest.approx([math.log(2), math.log(3)])


def test_without_a_causal_mask_all_queries_see_all_keys():
    out, _ = answer(tiny_step([0.0] * 3, [1.0, 2.0, 6.0], [1.0, 1.0], causal=False))
    assert out == pytest.approx([3.0, 3.0])


def test_a_window_of_one_sees_two_keys():
    out, lse = answer(tiny_step([0.0] * 4, [1.0, 2.0, 6.0, 8.0], [1.0] * 4, window_left=1))
    assert out == pytest.approx([1.0, 1.5, 4.0, 7.0])
    assert lse == pytest.approx([0.0, math.log(2), math.log(2), math.log(2)])


def test_a_window_without_a_causal_mask_is_open_to_the_right():
    step = tiny_step([0.0] * 4, [1.0, 2.0, 6.0, 9.0], [1.0] * 4, window_left=1, causal=False)
    out, _ = answer(step)
    assert out == pytest.approx([18 / 4, 18 / 4, 17 / 3, 15 / 2])


def test_queries_before_the_first_key_see_nothing():
    out, lse = answer(tiny_step([0.0], [5.0], [1.0, 1.0, 1.0]))
    assert out == [0.0, 0.0, 5.0]
    assert lse == [-math.inf, -math.inf, 0.0]


def test_a_request_without_keys_gives_zero():
    out, lse = answer(tiny_step([], [], [1.0, 1.0]))
    assert out == [0.0, 0.0]
    assert lse == [-math.inf, -math.inf]


def test_the_cap_comes_after_the_scale_and_before_the_mask():
    # a cap of 1: scores tanh(100) = 1 and tanh(-100) = -1; masked keys would have weight exp(-1)
    step = tiny_step([100.0, -100.0, 7.0], [1.0, 0.0, 0.0], [1.0, 1.0], logits_soft_cap=1.0)
    out, lse = answer(step)
    e = math.e
    assert out[0] == pytest.approx(e / (e + 1 / e))
    assert lse[0] == pytest.approx(math.log(e + 1 / e))


def test_query_heads_share_kv_heads_in_runs():
    spec = AttentionSpec(6, 2, 16, torch.float32)
    step = batch_of(spec, 2, (1,), (1,)).materialise()
    out, _ = oracle(step)
    page = int(step.page_table.kv_indices[0])
    v = step.kv_cache[page, 1, 0].double()
    assert torch.equal(out[0], v[[0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 3, 4, 20])
def test_each_row_sees_as_many_keys_as_the_definition_says(causal, window_left):
    spec = AttentionSpec(1, 1, 16, causal=causal, window_left=window_left)
    for kv_len, qo_len in [(16, 16), (16, 1), (5, 9), (0, 3), (16, 4)]:
        mask = visible_mask(spec, qo_len, kv_len)
        for i in range(qo_len):
            position = kv_len - qo_len + i
            keys = [
                j
                for j in range(kv_len)
                if (not causal or j <= position)
                and (window_left < 0 or j >= position - window_left)
            ]
            low, high = visible_range(spec, kv_len, position)
            assert list(range(low, high)) == keys
            assert mask[i].nonzero().flatten().tolist() == keys
            if causal and window_left >= 0:
                assert len(keys) <= window_left + 1


@given(batch=batches(specs=specs(max_qo_heads=12)))
def test_it_is_dense_softmax_attention(batch):
    step = batch.materialise()
    got, expected = oracle(step), dense_attention(step, torch.float64)
    # two float64 computations: a few roundings of scores, which `low_scores` has up to 8e4
    torch.testing.assert_close(got.out, expected.out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-12, atol=1e-12)


def test_the_answer_is_rounded_once():
    spec = AttentionSpec(2, 1, 64, torch.bfloat16)
    step = batch_of(spec, 4, (30,), (5,)).materialise()
    out, lse = attend_with("reference")(step)
    exact = oracle(step)
    assert torch.equal(out, exact.out.to(torch.bfloat16))
    assert torch.equal(lse, exact.lse.float())

"""Two answers to the same rows: what counts as agreement, and who is wrong where there is none."""

from dataclasses import replace

import pytest
import torch
from attention_steps import batch_of
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn.checking.arbitration import (
    PAGES_AT_ONCE,
    Answer,
    compare_with_float64,
    disagreement,
    host_step,
)
from pagedattn.checking.bound import allowed_error
from pagedattn.checking.dense import dense_attention
from pagedattn.checking.row_sample import RowStep
from pagedattn.checking.step import attend_with, oracle
from pagedattn.testing import batches

SPEC = AttentionSpec(8, 2, 64, dtype=torch.bfloat16)
right = attend_with("reference")


def answer(step, output, backend="triton"):
    return Answer(backend, output.out.to(step.spec.dtype), output.lse.float())


def low_precision(step):
    """What a kernel with the roundings of one answers: the second right side of a comparison."""
    return answer(step, dense_attention(step))


def changed(step, **changes):
    return answer(step, right(replace(step, spec=replace(step.spec, **changes))))


@given(batch=batches(max_kv_len=60, max_work=2).filter(lambda batch: sum(batch.qo_lens)))
def test_an_answer_agrees_with_itself_whatever_it_is(batch):
    step = batch.materialise()
    mine = answer(step, right(step))
    assert disagreement(step.spec, mine, mine).tolist() == [0] * step.q.shape[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_len", [1, 2, 17, 300, 3000])
@pytest.mark.parametrize("values", ["normal", "large_logits", "loud_key", "constant_values"])
def test_rounding_of_half_precision_is_no_doubt(dtype, kv_len, values):
    spec = replace(SPEC, dtype=dtype)
    step = batch_of(spec, 16, [kv_len] * 4, [1] * 4, values=values, seed=kv_len).materialise()
    apart = disagreement(spec, low_precision(step), answer(step, right(step)))
    assert float(apart.max()) < 0.7


def test_what_float64_calls_wrong_is_in_doubt():
    spec = replace(SPEC, window_left=40, logits_soft_cap=30.0)
    step = batch_of(spec, 16, [300, 60, 45], [4, 2, 1], seed=3).materialise()
    expected = oracle(step)
    bound = allowed_error(step, expected)
    rightly = answer(step, right(step))
    faults = ({"window_left": 39}, {"window_left": 41}, {"sm_scale": 0.1}, {"logits_soft_cap": 5.0})
    for fault in faults:
        wrongly = changed(step, **fault)
        out = ((wrongly.out.double() - expected.out).abs() > bound.out).flatten(1).any(1)
        rows = out | ((wrongly.lse - expected.lse).abs() > bound.lse).any(1)
        assert rows.any(), fault
        assert (disagreement(spec, wrongly, rightly)[rows] > 1).all(), fault


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_on_one_side_is_in_doubt(value):
    step = batch_of(SPEC, 4, [5, 5], [1, 1]).materialise()
    rightly, wrongly = answer(step, right(step)), answer(step, right(step))
    wrongly.out[1, 3, 5] = value
    assert disagreement(SPEC, wrongly, rightly).tolist() == [0, torch.inf]
    assert disagreement(SPEC, rightly, wrongly).tolist() == [0, torch.inf]
    wrongly = answer(step, right(step))
    wrongly.lse[0, 2] = value
    assert disagreement(SPEC, wrongly, rightly).tolist() == [torch.inf, 0]


def test_a_row_without_keys_agrees_with_zero_and_minus_infinity_alone():
    step = batch_of(SPEC, 4, [0], [1]).materialise()
    rightly, wrongly = answer(step, right(step)), answer(step, right(step))
    assert disagreement(SPEC, wrongly, rightly).tolist() == [0]
    wrongly.out[0, 0, 0] = 1e-30
    assert disagreement(SPEC, wrongly, rightly).tolist() == [torch.inf]


def test_flashinfers_rounded_weights_may_move_the_lse_by_a_rounding():
    step = batch_of(SPEC, 4, [9], [1]).materialise()
    ours = answer(step, right(step))
    moved = ours.lse + 2.0**-9
    for backend, agrees in (("triton", False), ("reference", False), ("flashinfer", True)):
        theirs = Answer(backend, ours.out, moved)
        assert (float(disagreement(SPEC, theirs, ours)) <= 1) is agrees
        assert (float(disagreement(SPEC, ours, theirs)) <= 1) is agrees


def test_an_lse_that_was_not_asked_for_is_not_judged():
    step = batch_of(SPEC, 4, [9], [1]).materialise()
    ours = answer(step, right(step))
    silent = Answer("triton", ours.out, None)
    wrong = Answer("triton", ours.out, ours.lse + 1)
    assert disagreement(SPEC, silent, wrong).tolist() == [0]
    assert compare_with_float64(silent, step).ok
    assert not compare_with_float64(wrong, step).ok


@given(
    batch=batches(max_kv_len=60, max_work=2).filter(lambda b: sum(b.qo_lens)), pair=st.booleans()
)
def test_a_step_on_the_host_has_the_same_answer_and_remembers_its_pages(batch, pair):
    step = batch.materialise()
    k_pages, v_pages = step.kv_cache[:, 0], step.kv_cache[:, 1]
    if pair:
        k_pages, v_pages = k_pages.clone(), v_pages.clone()
    rows = RowStep(step.page_table, step.qo_indptr, torch.arange(step.q.shape[0]))
    small, page_ids = host_step(step.spec, rows, step.q, k_pages, v_pages)
    assert page_ids.tolist() == step.page_table.kv_indices.unique().tolist()
    assert small.kv_cache.shape[0] == len(page_ids)
    got, expected = oracle(small), oracle(step)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def test_more_pages_than_are_gathered_at_once_come_in_order():
    spec = AttentionSpec(1, 1, 1, dtype=torch.float32)
    step = batch_of(spec, 1, [PAGES_AT_ONCE + 3], [1]).materialise()
    rows = RowStep(step.page_table, step.qo_indptr, torch.arange(1))
    small, _ = host_step(spec, rows, step.q, step.kv_cache[:, 0], step.kv_cache[:, 1])
    assert torch.equal(oracle(small).out, oracle(step).out)

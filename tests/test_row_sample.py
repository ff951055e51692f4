"""Sampled rows: a small step of rows of a step has the same answers."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from attention_steps import batch_of
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn.checking.row_sample import draw_rows, step_of_rows
from pagedattn.checking.step import oracle
from pagedattn.testing import batches

SPEC = AttentionSpec(2, 1, 16, dtype=torch.float32)


def drawn(step, num_rows, seed=0):
    return draw_rows(step.spec, step.page_table, step.qo_indptr, num_rows, Random(seed))


@given(
    batch=batches(max_kv_len=40, max_work=2).filter(lambda batch: sum(batch.qo_lens)),
    num_rows=st.integers(1, 9),
    max_before=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_rows_have_the_answers_that_they_have_in_their_step(batch, num_rows, max_before, seed):
    step = batch.materialise()
    picked = step_of_rows(drawn(step, num_rows, seed), step.page_size, max_before)
    small = replace(
        step, page_table=picked.page_table, qo_indptr=picked.qo_indptr, q=step.q[picked.rows]
    )
    whole = oracle(step)
    got = oracle(small)
    assert torch.equal(got.out, whole.out[picked.rows])
    assert torch.equal(got.lse, whole.lse[picked.rows])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 3])
def test_a_sampled_row_is_computed_alone_unless_its_window_hangs_on_later_queries(
    causal, window_left
):
    spec = replace(SPEC, causal=causal, window_left=window_left)
    step = batch_of(spec, 4, [20], [10]).materialise()
    for row in drawn(step, 10):
        picked = step_of_rows([row], 4)
        later = 9 - row.query if not causal and window_left >= 0 else 0
        assert picked.rows.tolist() == list(range(row.row, row.row + later + 1))


def test_a_causal_row_takes_no_page_that_it_cannot_see():
    step = batch_of(SPEC, 4, [20], [20]).materialise()
    for row in drawn(step, 20):
        assert row.kv_len == row.query + 1
        assert row.pages.tolist() == step.page_table.kv_indices[: row.query // 4 + 1].tolist()


def test_every_row_is_drawn_once_where_there_are_no_more():
    step = batch_of(SPEC, 4, [5, 0, 9, 3], [2, 1, 4, 0]).materialise()
    rows = sorted(row.row for row in drawn(step, 16))
    assert rows == list(range(7))


@given(
    qo_lens=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    num_rows=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_rows_are_spread_over_requests(qo_lens, num_rows, seed):
    step = batch_of(SPEC, 4, [max(n, 1) for n in qo_lens], qo_lens).materialise()
    rows = drawn(step, num_rows, seed)
    assert len({row.row for row in rows}) == len(rows) <= num_rows
    asking = sum(qo_len > 0 for qo_len in qo_lens)
    counts = Counter(row.request for row in rows)
    assert len(counts) == min(asking, num_rows)
    for request, number in counts.items():
        share = num_rows // len(counts)
        assert min(qo_lens[request], share) <= number <= share + 1


def test_over_many_draws_every_row_has_its_turn():
    step = batch_of(SPEC, 4, [40, 5, 5], [40, 1, 1]).materialise()
    random = Random(0)
    seen = Counter()
    for _ in range(400):
        seen.update(row.row for row in draw_rows(SPEC, step.page_table, step.qo_indptr, 2, random))
    assert len(seen) == 42
    assert min(seen[40], seen[41]) > 200  # two rows of three requests: each is drawn in two thirds


def test_nothing_of_the_callers_table_is_kept():
    step = batch_of(SPEC, 4, [9, 5], [3, 1]).materialise()
    rows = drawn(step, 4)
    before = [row.pages.tolist() for row in rows]
    step.page_table.kv_indices.zero_()
    assert [row.pages.tolist() for row in rows] == before
    assert any(any(pages) for pages in before)

"""Transformed steps are the steps that they claim to be, and impossible ones are refused."""

import pytest
import torch
from attention_steps import batch_of
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn.checking.step import Step, oracle
from pagedattn.checking.transforms import (
    last_queries,
    last_rows,
    rename_pages,
    repack,
    rows_of,
    select_requests,
    split_keys,
)
from pagedattn.testing import batches

SPEC = AttentionSpec(2, 1, 16, torch.float32)


def step_of(*lens, page_size: int = 4, spec: AttentionSpec = SPEC) -> Step:
    return batch_of(spec, page_size, *lens).materialise()


def keys_of(step: Step, request: int) -> torch.Tensor:
    """[kv_len, 2, heads, head_dim]: a request's keys and values in order."""
    pages = step.kv_cache[step.page_table.pages_of(request).long()]
    return pages.transpose(1, 2).flatten(0, 1)[: step.kv_lens[request]]


def same_keys(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@given(batch=batches(), page_size=st.integers(1, 40))
def test_repacking_keeps_every_requests_keys(batch, page_size):
    step = batch.materialise()
    other = repack(step, page_size)
    assert other.page_size == page_size
    assert all(same_keys(keys_of(step, r), keys_of(other, r)) for r in range(len(step.kv_lens)))


@given(batch=batches())
def test_renaming_keeps_every_requests_keys(batch):
    step = batch.materialise()
    num_pages = batch.num_pages
    other = rename_pages(step, range(2 * num_pages - 1, num_pages - 1, -1), 2 * num_pages)
    assert all(same_keys(keys_of(step, r), keys_of(other, r)) for r in range(len(step.kv_lens)))
    assert other.kv_cache[:num_pages].isnan().all()


def test_selected_requests_keep_their_rows_and_keys():
    step = step_of((9, 3, 5), (2, 0, 4))
    other = select_requests(step, [2, 0, 2])
    assert (other.kv_lens, other.qo_lens) == ([5, 9, 5], [4, 2, 4])
    assert rows_of(step, [2, 0, 2]).tolist() == [2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert torch.equal(other.q, step.q[rows_of(step, [2, 0, 2])])
    assert same_keys(keys_of(other, 1), keys_of(step, 0))
    assert select_requests(step, []).q.shape[0] == 0


def test_last_queries_are_the_last_rows():
    step = step_of((9, 3, 5), (2, 0, 4))
    assert last_rows(step, 1).tolist() == [1, 5]
    assert last_rows(step, 3).tolist() == [0, 1, 3, 4, 5]
    other = last_queries(step, 3)
    assert other.qo_lens == [2, 0, 3]
    assert torch.equal(oracle(other).out, oracle(step).out[last_rows(step, 3)])


def test_split_keys_are_all_keys_once():
    step = step_of((9, 3, 6), (2, 1, 0))
    first, rest = split_keys(step, [2, 0, 1])
    assert (first.kv_lens, rest.kv_lens) == ([8, 0, 4], [1, 3, 2])
    for request in range(3):
        parts = torch.cat([keys_of(first, request), keys_of(rest, request)])
        assert same_keys(parts, keys_of(step, request))
    assert not first.spec.causal
    assert rest.spec == step.spec


def test_keys_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match=r"first 8 of 9 keys .* the first of 3 queries"):
        split_keys(step_of((9,), (3,)), [2])
    with pytest.raises(ValueError, match="keys under a window cannot be split"):
        split_keys(step_of((9,), (1,), spec=AttentionSpec(2, 1, 16, window_left=3)), [1])

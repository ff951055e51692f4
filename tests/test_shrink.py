"""Shrinking: what comes out still fails, is no larger, and what does not matter is gone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn.attention import AttentionOutput
from pagedattn.checking.batch import Batch
from pagedattn.checking.compare import check_step
from pagedattn.checking.dense import dense_attention
from pagedattn.checking.shrink import MAX_TRIES, shrink_batch
from pagedattn.testing import batches

SPEC = AttentionSpec(
    6, 2, 64, torch.bfloat16, causal=False, window_left=40, sm_scale=0.3, logits_soft_cap=30.0
)
BATCH = Batch(
    SPEC,
    4,
    30,
    (9, 33, 0),
    (3, 7, 1),
    ((8, 2, 9), tuple(range(29, 20, -1)), ()),
    "loud_key",
    "junk",
    7,
)


def size(batch):
    return (len(batch.kv_lens), sum(batch.kv_lens), sum(batch.qo_lens), batch.num_pages)


def test_what_does_not_matter_goes():
    assert shrink_batch(BATCH, lambda _: True) == Batch(
        AttentionSpec(1, 1, 16, torch.float32), 4, 1, (1,), (1,), ((0,),), garbage="zeros"
    )


@pytest.mark.parametrize(
    ("still_fails", "expected"),
    [
        (lambda b: len(b.kv_lens) >= 2, {"kv_lens": (1, 0), "qo_lens": (1, 1)}),
        (lambda b: max(b.kv_lens) >= 18, {"kv_lens": (18,), "pages": (tuple(range(5)),)}),
        (lambda b: max(b.qo_lens) >= 4, {"qo_lens": (4,), "kv_lens": (1,)}),
        (lambda b: 0 in b.kv_lens, {"kv_lens": (0,), "pages": ((),), "num_pages": 1}),
        (lambda b: any(29 in row for row in b.pages), {"pages": ((29,),), "num_pages": 30}),
        (lambda b: b.values == "loud_key", {"values": "loud_key", "garbage": "zeros"}),
    ],
)
def test_what_matters_stays(still_fails, expected):
    small = shrink_batch(BATCH, still_fails)
    assert still_fails(small)
    assert {name: getattr(small, name) for name in expected} == expected


def test_each_option_stays_where_it_matters():
    plain = AttentionSpec(1, 1, 16, torch.float32)
    for changes in (
        {"logits_soft_cap": 30.0},
        {"sm_scale": 0.3},
        {"causal": False},
        {"dtype": torch.bfloat16},
        {"head_dim": 64},
    ):
        (name, value) = next(iter(changes.items()))
        small = shrink_batch(BATCH, lambda b, n=name, v=value: getattr(b.spec, n) == v)
        assert small.spec == replace(plain, **changes)
    grouped = shrink_batch(BATCH, lambda b: b.spec.group_size == 3)
    assert (grouped.spec.num_qo_heads, grouped.spec.num_kv_heads) == (3, 1)
    windowed = shrink_batch(BATCH, lambda b: b.spec.window_left >= 0)
    assert windowed.spec.window_left == 1


@given(batch=batches(), max_len=st.integers(1, 40))
def test_a_shrunk_batch_fails_is_legal_and_no_larger(batch, max_len):
    def still_fails(candidate):
        candidate.materialise()  # raises where it is not legal
        return max(candidate.kv_lens) >= min(max_len, max(batch.kv_lens))

    small = shrink_batch(batch, still_fails)
    assert still_fails(small)
    assert all(left <= right for left, right in zip(size(small), size(batch), strict=True))


@pytest.mark.parametrize("max_tries", [0, 1, 5, MAX_TRIES])
def test_tries_are_bounded(max_tries):
    tried = []

    def never(batch):
        tried.append(batch)
        return False

    assert shrink_batch(BATCH, never, max_tries) == BATCH
    assert len(tried) <= max_tries
    tried.clear()
    shrink_batch(BATCH, lambda b: tried.append(b) or True, max_tries)
    assert len(tried) <= max_tries


def test_a_planted_window_fault_shrinks_to_one_request_one_key_past_its_window():
    def short_window(step):
        """An answer whose window is one key short."""
        window_left = step.spec.window_left
        if window_left > 0:
            step = replace(step, spec=replace(step.spec, window_left=window_left - 1))
        answer = dense_attention(step)
        return AttentionOutput(answer.out.to(step.spec.dtype), answer.lse.float())

    def still_fails(batch):
        return not check_step(short_window, batch.materialise()).ok

    batch = replace(BATCH, spec=replace(SPEC, window_left=9), values="normal")
    assert still_fails(batch)
    small = shrink_batch(batch, still_fails)
    assert still_fails(small)
    assert (small.kv_lens, small.qo_lens, small.spec.window_left) == ((2,), (1,), 1)

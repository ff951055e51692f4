"""The float64 answer in few launches is the oracle's, and allows what the oracle's bound allows."""

import pytest
import torch
from attention_steps import batch_of, supported_batches
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn.checking import truth
from pagedattn.checking.bound import FLASHINFER, FLOAT32_SUMS
from pagedattn.checking.truth import truth_of, truth_on_device

ARITHMETIC = pytest.mark.parametrize("arithmetic", [FLASHINFER, FLOAT32_SUMS], ids=["fi", "f32"])


def assert_same_truth(step, arithmetic):
    one_by_one, together = truth_of(step, arithmetic), truth_on_device(step, arithmetic)
    for tensor in (*together.expected, *together.bound):
        assert tensor.device == step.q.device
    for got, expected in zip(together.expected, one_by_one.expected, strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-9, atol=1e-11)
    for got, expected in zip(together.bound, one_by_one.bound, strict=True):
        # the error of a float32 computation is part of it, and sums may go in another order
        torch.testing.assert_close(got.cpu(), expected, rtol=0.5, atol=1e-7)


@ARITHMETIC
@given(data=st.data())
def test_it_is_the_oracles(device, arithmetic, data):
    batch = data.draw(supported_batches("reference", device, small=True))
    assert_same_truth(batch.materialise(device), arithmetic)


@pytest.mark.parametrize("lens", [((), ()), ((0, 0), (3, 1)), ((20, 30), (0, 0)), ((3, 0), (5, 1))])
def test_empty_rows_and_empty_requests(device, lens):
    step = batch_of(AttentionSpec(4, 2, 16, torch.float16), 4, *lens).materialise(device)
    assert_same_truth(step, FLOAT32_SUMS)
    seen = truth_on_device(step, FLOAT32_SUMS)
    unseen = seen.expected.lse == -torch.inf
    assert (seen.expected.out[unseen] == 0).all()
    assert (seen.bound.out[unseen] == 0).all()


def test_requests_that_are_too_many_to_pad_are_computed_in_groups(device, monkeypatch):
    monkeypatch.setattr(truth, "MAX_PADDED_SCORES", 400)
    batch = batch_of(AttentionSpec(4, 2, 16), 4, (37, 5, 8, 1, 60), (2, 5, 1, 1, 30))
    step = batch.materialise(device)
    assert len(list(truth._groups(step))) > 2
    assert_same_truth(step, FLOAT32_SUMS)

"""The float64 answer in few launches is the oracle's, and allows what the oracle's bound allows."""

import pytest
import torch
from attention_steps import batch_of, supported_batches
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn.checking import bound, truth
from pagedattn.checking.bound import FLASHINFER, FLOAT32_SUMS
from pagedattn.checking.truth import truth_of, truth_on_device

ARITHMETIC = pytest.mark.parametrize("arithmetic", [FLASHINFER, FLOAT32_SUMS], ids=["fi", "f32"])


def assert_same_truth(step, arithmetic):
    """The answers, and the bounds but for the error of a float32 computation, which is no number
    that two orders of summing share."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (bound, truth):
            patch.setattr(module, "distance", lambda got, expected: torch.zeros_like(expected))
        one_by_one, together = truth_of(step, arithmetic), truth_on_device(step, arithmetic)
    # both are float64, whose rounding grows with the scores and the length of their sums
    largest = one_by_one.expected.lse.abs().nan_to_num(posinf=0).max() if len(step.q) else 0.0
    rounding = 1e-11 + 2.0**-51 * step.spec.head_dim * float(largest)
    pairs = (
        *zip(together.expected, one_by_one.expected, strict=True),
        *zip(together.bound, one_by_one.bound, strict=True),
    )
    for got, expected in pairs:
        assert got.device == step.q.device
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-8, atol=rounding)


def test_the_error_of_a_float32_computation_is_part_of_the_bound(device, monkeypatch):
    spec = AttentionSpec(4, 2, 16, torch.bfloat16)
    step = batch_of(spec, 4, (37, 5), (2, 5)).materialise(device)
    with_error = truth_on_device(step, FLOAT32_SUMS).bound
    one_by_one = truth_of(step, FLOAT32_SUMS).bound
    torch.testing.assert_close(with_error.out.cpu(), one_by_one.out, rtol=0.1, atol=1e-6)
    monkeypatch.setattr(truth, "distance", lambda got, expected: torch.zeros_like(expected))
    without = truth_on_device(step, FLOAT32_SUMS).bound
    assert (without.out <= with_error.out).all()
    assert (without.out < with_error.out).any()


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

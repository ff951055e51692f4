"""`AttentionSpec`: defaults, and every argument that is refused."""

import dataclasses

import pytest
import torch

from pagedattn import AttentionSpec


def test_the_default_scale_is_one_over_the_root_of_head_dim():
    assert AttentionSpec(4, 2, 64).scale == 0.125
    assert AttentionSpec(4, 2, 64, sm_scale=0.5).scale == 0.5


def test_group_size_is_query_heads_a_kv_head():
    assert AttentionSpec(48, 2, 64).group_size == 24


def test_defaults_are_a_causal_bfloat16_layer_without_options():
    spec = AttentionSpec(4, 2, 64)
    assert (spec.dtype, spec.causal, spec.window_left) == (torch.bfloat16, True, -1)
    assert (spec.sm_scale, spec.logits_soft_cap) == (None, 0.0)


def test_a_spec_is_a_value():
    assert AttentionSpec(4, 2, 64) == AttentionSpec(4, 2, 64)
    assert len({AttentionSpec(4, 2, 64), AttentionSpec(4, 2, 64)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionSpec(4, 2, 64).head_dim = 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_qo_heads": 0}, "num_qo_heads must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_qo_heads=4 must be divisible by num_kv_heads=3"),
        ({"num_kv_heads": 8}, "num_qo_heads=4 must be divisible by num_kv_heads=8"),
        ({"dtype": torch.float64}, "dtype must be one of .* got torch.float64"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be one of .* got torch.float8_e4m3fn"),
        ({"dtype": torch.int32}, "dtype must be one of .* got torch.int32"),
        ({"window_left": -2}, r"window_left must be -1 \(unbounded\) or at least 0, got -2"),
        ({"sm_scale": 0.0}, "sm_scale must be finite and above 0, got 0.0"),
        ({"sm_scale": float("nan")}, "sm_scale must be finite and above 0, got nan"),
        ({"sm_scale": float("inf")}, "sm_scale must be finite and above 0, got inf"),
        ({"logits_soft_cap": -1.0}, r"logits_soft_cap must be 0 \(off\) .* got -1.0"),
        ({"logits_soft_cap": float("nan")}, r"logits_soft_cap must be 0 \(off\) .* got nan"),
    ],
)
def test_an_argument_out_of_its_range_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**({"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64} | changes))


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="sinks"):
        AttentionSpec(4, 2, 64, sinks=None)

"""Devices: what is not there is said to be missing, before anything else fails."""

import pytest
import torch

from pagedattn import AttentionSpec, PagedAttention
from pagedattn.device import resolve_device


@pytest.mark.parametrize("name", [f"cuda:{torch.cuda.device_count()}", "cuda:63"])
def test_a_gpu_that_is_not_there_is_said_to_be_missing(name):
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match=f"device '{name}': torch sees .* GPUs here"):
        PagedAttention(spec, 16, backend="reference", device=name)


def test_cuda_alone_is_the_current_gpu():
    if torch.cuda.is_available():
        assert resolve_device("cuda").index == torch.cuda.current_device()
    else:
        with pytest.raises(ValueError, match="torch sees 0 GPUs here"):
            resolve_device("cuda")


def test_without_a_name_it_is_the_gpu_or_the_cpu():
    assert resolve_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")

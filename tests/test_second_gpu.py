"""Tensors on a GPU that is not the current one."""

import pytest
import torch
from attention_steps import batch_of, half, require_support

from pagedattn import AttentionSpec, PagedKVCache
from pagedattn.checking.compare import check_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def other() -> torch.device:
    return torch.device("cuda", 1 - torch.cuda.current_device())


def test_attention_is_right_on_the_other_gpu(backend, other):
    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 16, other)
    step = batch_of(spec, 16, (300, 17, 40), (1, 5, 40)).materialise(other)
    comparison = check_backend(backend, step)
    assert comparison.ok, comparison.worst
    assert torch.cuda.current_device() != other.index


def test_appends_go_to_the_other_gpu(other):
    spec = AttentionSpec(2, 2, 64, torch.bfloat16)
    cache = PagedKVCache(2, 3, 4, spec, other)
    rows = torch.ones(2, 2, 64, dtype=torch.bfloat16, device=other)
    cache.append(1, rows, rows, torch.tensor([5, 11], device=other))
    cache.raise_if_refused()
    expected = torch.zeros_like(cache.pages)
    expected[1, 1, :, 1] = expected[1, 2, :, 3] = 1
    assert torch.equal(cache.pages, expected)
    assert torch.cuda.current_device() != other.index

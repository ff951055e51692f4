"""Offsets beyond 32 bits: pages, query rows and slots that only 64-bit arithmetic reaches.

And batches of more requests than anybody had in mind.
"""

import pytest
import torch
from attention_steps import half, require_support

from pagedattn import AttentionSpec, PagedAttention, PagedKVCache, PageTable
from pagedattn.checking.batch import Batch
from pagedattn.checking.compare import check_backend

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def free_memory(device):
    yield
    torch.cuda.empty_cache()


def require_memory(num_bytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


@pytest.mark.parametrize("qo_len", [1, 70])
def test_pages_on_both_sides_of_2_to_the_31_and_32_elements(backend, device, qo_len):
    """A page of 16 tokens, 8 heads, 128 elements has 2 ** 15: page 65536 begins at 2 ** 31."""
    spec = AttentionSpec(16, 8, 128, half(backend))
    require_support(backend, spec, 16, device)
    num_pages = 131072 + 8
    require_memory(num_pages * 2**16 + 2**32)
    pages = (65535, 65536, 65537, 131071, 131072, 131073, 0, 65534)
    batch = Batch(spec, 16, num_pages, (128, 40), (qo_len, 1), (pages, (131075, 1, 65540)))
    comparison = check_backend(backend, batch.materialise(device))
    assert comparison.ok, comparison.worst


def test_single_token_pages_beyond_2_to_the_32_elements(backend, device):
    """Page size 1 is what makes large page ids common."""
    spec = AttentionSpec(8, 8, 64, half(backend))
    require_support(backend, spec, 1, device)
    num_pages = 2**32 // (2 * 8 * 64) + 64
    require_memory(num_pages * 2 * 8 * 64 * 2 + 2**32)
    pages = (*range(num_pages - 1, num_pages - 1851, -37), 0, 1, 2**21 - 1, 2**21, 2**21 + 1)
    batch = Batch(spec, 1, num_pages, (55,), (1,), (pages,))
    comparison = check_backend(backend, batch.materialise(device))
    assert comparison.ok, comparison.worst


def test_query_rows_beyond_2_to_the_31_elements(backend, device):
    """More tokens than 2 ** 31 over the row stride: rows, outputs and LSE at their own places."""
    if backend == "reference":
        pytest.skip("reference: a Python loop over 263 thousand queries")
    spec = AttentionSpec(128, 16, 64, half(backend), window_left=0)
    require_support(backend, spec, 16, device)
    num_tokens = 2**31 // (128 * 64) + 1000
    require_memory(2 * num_tokens * 128 * 64 * 2 + 2**34)
    table = PageTable.from_lengths([num_tokens], 16)
    num_pages = table.kv_indices.numel()
    generator = torch.Generator(device).manual_seed(0)
    kv_cache = torch.randn(
        num_pages, 2, 16, 16, 64, dtype=spec.dtype, device=device, generator=generator
    )
    q = torch.randn(num_tokens, 128, 64, dtype=spec.dtype, device=device, generator=generator)
    attn = PagedAttention(spec, 16, backend=backend, device=device)
    attn.plan(table, torch.tensor([0, num_tokens], dtype=torch.int32))
    out, lse = attn.run_return_lse(q, kv_cache)
    # each query sees its own key alone, so its output is that key's value, exactly
    v = kv_cache[:, 1].flatten(0, 1)[:num_tokens]
    k = kv_cache[:, 0].flatten(0, 1)[:num_tokens]
    for rows in (slice(0, 500), slice(num_tokens // 2, num_tokens // 2 + 500), slice(-1500, None)):
        assert torch.equal(out[rows], v[rows].repeat_interleave(8, dim=1))
        scores = (q[rows].double() * k[rows].repeat_interleave(8, dim=1).double()).sum(-1)
        torch.testing.assert_close(lse[rows].double(), scores * spec.scale, rtol=0, atol=1e-4)


def test_appends_on_both_sides_of_2_to_the_31_and_32_elements(device):
    spec = AttentionSpec(8, 8, 128, torch.bfloat16)
    num_pages = 131072 + 8  # of 2 ** 15 elements
    require_memory(num_pages * 2**16 + 2**30)
    cache = PagedKVCache(1, num_pages, 16, spec, device)
    slots = [16 * page + offset for page in (65535, 65536, 131071, 131072) for offset in (0, 15)]
    rows = torch.arange(1, len(slots) + 1, device=device, dtype=torch.bfloat16)
    k = rows[:, None, None].expand(-1, 8, 128).contiguous()
    cache.append(0, k, -k, torch.tensor(slots, device=device))
    cache.raise_if_refused()
    for row, slot in zip(rows.tolist(), slots, strict=True):
        page, offset = divmod(slot, 16)
        assert (cache[0][page, 0, offset] == row).all()
        assert (cache[0][page, 1, offset] == -row).all()
    written = sum(int(part.count_nonzero()) for part in cache[0].split(8192))
    assert written == len(slots) * 2 * 8 * 128  # and nowhere else


@pytest.mark.parametrize("batch_size", [16384, 16385, 16600])
def test_batches_beyond_16384_requests(backend, device, batch_size):
    """A work list of a fixed length would be written past its end."""
    if backend == "reference":
        pytest.skip("reference: a Python loop over 16 thousand requests")
    spec = AttentionSpec(4, 1, 64, half(backend))
    require_support(backend, spec, 16, device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch_size, 2, 16, 1, 64)
    kv_cache = torch.randn(shape, generator=generator, device=device).to(spec.dtype)
    q = torch.randn(batch_size, 4, 64, generator=generator, device=device).to(spec.dtype)
    attn = PagedAttention(spec, 16, backend=backend, device=device)
    attn.plan(PageTable.from_lengths([1] * batch_size, 16))
    # each query sees one key, so its output is that key's value, exactly
    assert torch.equal(attn.run(q, kv_cache), kv_cache[:, 1, 0].expand(-1, 4, -1))

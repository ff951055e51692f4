"""A model that calls `append` and `run` compiles whole, and follows every later plan."""

import pytest
import torch
from attention_steps import half
from torch._dynamo.testing import CompileCounterWithBackend

from pagedattn import AttentionSpec, PagedAttention, PagedKVCache, PageTable
from pagedattn.kv_cache import append_into
from pagedattn.operators import run_into

PAGE_SIZE, NUM_LAYERS, NUM_PAGES = 4, 2, 32
STEPS = ({"a": 3, "b": 2}, {"a": 1, "b": 1}, {"a": 1, "c": 2})


class TwoLayers:
    """Layers with attention over a cache; keys and values are what a projection gives."""

    def __init__(self, backend, device):
        self.spec = AttentionSpec(4, 2, 64, dtype=half(backend))
        self.cache = PagedKVCache(NUM_LAYERS, NUM_PAGES, PAGE_SIZE, self.spec, device)
        self.attn = PagedAttention(self.spec, PAGE_SIZE, backend=backend, device=device)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(NUM_LAYERS, 256, 512, generator=generator) / 16
        self.weights = weights.to(device, self.spec.dtype)

    def plan(self, new_tokens, seed):
        """Plan a step, `{request: new tokens}`; return its activations."""
        for request, num_tokens in new_tokens.items():
            self.cache.extend(request, num_tokens)
        lens = torch.tensor([0, *new_tokens.values()], dtype=torch.int32)
        self.attn.plan(self.cache.allocator.page_table(list(new_tokens)), lens.cumsum(0).int())
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(sum(new_tokens.values()), 256, generator=generator)
        return x.to(self.cache.device, self.spec.dtype)

    def forward(self, x, write_slots):
        for layer in range(NUM_LAYERS):
            q, k, v = (x @ self.weights[layer]).split([256, 128, 128], dim=-1)
            k, v = (y.unflatten(-1, (2, 64)) for y in (k, v))
            self.cache.append(layer, k, v, write_slots)
            x = x + self.attn.run(q.unflatten(-1, (4, 64)), self.cache[layer]).flatten(1)
        return x


def test_a_model_compiles_whole_and_follows_later_plans_without_being_compiled_again(
    backend, device
):
    torch.compiler.reset()
    plain, compiled = TwoLayers(backend, device), TwoLayers(backend, device)
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(compiled.forward, fullgraph=True, backend=counter)
    for seed, new_tokens in enumerate(STEPS):
        expected = plain.forward(plain.plan(new_tokens, seed), plain.attn.write_slots)
        got = forward(compiled.plan(new_tokens, seed), compiled.attn.write_slots)
        assert torch.equal(got, expected)
        assert torch.equal(compiled.cache.pages, plain.cache.pages)
    assert counter.frame_count <= 2  # for the first number of tokens, and for any


def test_given_outputs_are_written_by_a_compiled_model_too(backend, device):
    torch.compiler.reset()
    attn, q, kv_cache = planned(backend, device)
    expected = attn.run_return_lse(q, kv_cache)

    def model(out, lse):
        return attn.run_return_lse(q, (kv_cache[:, 0], kv_cache[:, 1]), out=out, lse=lse)

    out, lse = torch.zeros_like(expected.out), torch.zeros_like(expected.lse)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(out, lse)
    for written, returned, right in ((out, got.out, expected.out), (lse, got.lse, expected.lse)):
        assert torch.equal(written, right)
        assert torch.equal(returned, right)


def test_errors_reach_the_caller_of_a_compiled_model(backend, device):
    torch.compiler.reset()
    attn, q, kv_cache = planned(backend, device)
    run = torch.compile(attn.run, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="q must have shape"):
        run(q[:3], kv_cache)
    with pytest.raises(ValueError, match="expected 3 pages"):
        attn.plan(PageTable(PAGE_SIZE, *(torch.tensor(x).int() for x in ([0, 2], [1, 2], [12]))))
    with pytest.raises(RuntimeError, match="there is no plan"):
        run(q, kv_cache)


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_passes_for_run(backend, device, with_lse):
    attn, q, kv_cache = planned(backend, device)
    lse = torch.empty(q.shape[:2], device=device) if with_lse else None
    for layer in ([kv_cache], [kv_cache[:, 0].clone(), kv_cache[:, 1].clone()]):
        torch.library.opcheck(run_into, (q, layer, torch.empty_like(q), lse, attn.number))


def test_opcheck_passes_for_append(device):
    k, v = torch.randn(2, 3, 2, 64, device=device)
    pages = torch.zeros(5, 2, PAGE_SIZE, 2, 64, device=device)
    num_refused = torch.zeros(1, dtype=torch.int32, device=device)
    slots = torch.tensor([17, -1, 4], device=device)
    torch.library.opcheck(append_into, (k, v, slots, pages, num_refused))


def planned(backend, device):
    spec = AttentionSpec(4, 2, 64, dtype=half(backend))
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device)
    qo_indptr = torch.tensor([0, 4, 9], dtype=torch.int32)
    attn.plan(PageTable.from_lengths([9, 5], PAGE_SIZE), qo_indptr)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 4, 64, generator=generator).to(device, spec.dtype)
    kv_cache = torch.randn(5, 2, PAGE_SIZE, 2, 64, generator=generator)
    return attn, q, kv_cache.to(device, spec.dtype)

"""With a capacity: padded steps, fixed addresses, and one captured run for every later plan."""

import pytest
import torch
from attention_steps import (
    assert_padded_answer,
    batch_of,
    half,
    padded,
    require_support,
    scratch_of,
)

from pagedattn import AttentionSpec, Capacity, PagedAttention, write_slots

PAGE_SIZE = 16
CAPACITY = Capacity(max_batch_size=6, max_tokens=40, max_pages=80)
STEPS = {  # kv_lens and qo_lens: longer, shorter, smaller and larger than the one before
    "decode": ((100, 33, 1), (1, 1, 1)),
    "longer decode": ((800, 33, 64), (1, 1, 1)),
    "one request": ((17,), (1,)),
    "full": ((100, 33, 16, 5, 40, 1), (20, 1, 16, 1, 1, 1)),
    "prompt": ((40,), (40,)),
    "without keys": ((0, 9), (3, 2)),
    "nothing": ((), ()),
    "decode again": ((101, 34, 2), (1, 1, 1)),
}


def small_spec(backend: str, **options) -> AttentionSpec:
    return AttentionSpec(4, 2, 64, half(backend), **options)


@pytest.mark.parametrize("window_left", [-1, 20])
def test_padded_steps_of_every_shape_in_turn_are_right(backend, device, window_left):
    spec = small_spec(backend, window_left=window_left)
    require_support(backend, spec, PAGE_SIZE, device)
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device, capacity=CAPACITY)
    for seed, (kv_lens, qo_lens) in enumerate(STEPS.values()):
        step = batch_of(spec, PAGE_SIZE, kv_lens, qo_lens, seed=seed).materialise(device)
        attn.plan(step.page_table, step.qo_indptr)
        assert_padded_answer(
            backend, step, attn.run_return_lse(padded(step.q, CAPACITY.max_tokens), step.kv_cache)
        )


@pytest.mark.parametrize("window_left", [-1, 20])
def test_a_capacity_for_decoding_serves_prompts_too(backend, device, window_left):
    """Few tokens a request: where that is another way through a backend, long queries take it."""
    spec = small_spec(backend, window_left=window_left)
    require_support(backend, spec, PAGE_SIZE, device)
    capacity = Capacity(max_batch_size=16, max_tokens=60, max_pages=80)
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device, capacity=capacity)
    for kv_lens, qo_lens in (((70, 200), (50, 1)), ((9, 8), (2, 1)), ((40,), (60,))):
        step = batch_of(spec, PAGE_SIZE, kv_lens, qo_lens).materialise(device)
        attn.plan(step.page_table, step.qo_indptr)
        answer = attn.run_return_lse(padded(step.q, capacity.max_tokens), step.kv_cache)
        assert_padded_answer(backend, step, answer)


def test_slots_are_padded_with_minus_one_at_one_address(backend, device):
    spec = small_spec(backend)
    require_support(backend, spec, PAGE_SIZE, device)
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device, capacity=CAPACITY)
    addresses = set()
    for kv_lens, qo_lens in STEPS.values():
        step = batch_of(spec, PAGE_SIZE, kv_lens, qo_lens).materialise(device)
        attn.plan(step.page_table, step.qo_indptr)
        expected = write_slots(step.page_table.to("cpu"), step.qo_indptr.cpu())
        assert attn.write_slots[: len(expected)].tolist() == expected.tolist()
        assert (attn.write_slots[len(expected) :] == -1).all()
        assert attn.write_slots.shape[0] == CAPACITY.max_tokens
        addresses.add(attn.write_slots.data_ptr())
    if backend != "reference":  # which cannot be captured
        assert len(addresses) == 1


def test_a_step_beyond_the_capacity_names_every_bound_and_leaves_no_plan(backend, device):
    spec = small_spec(backend)
    require_support(backend, spec, PAGE_SIZE, device)
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device, capacity=CAPACITY)
    large = batch_of(spec, PAGE_SIZE, (200,) * 7, (10,) * 7).materialise(device)
    with pytest.raises(ValueError, match=r"max_batch_size=6 .* max_tokens=40 .* max_pages=80"):
        attn.plan(large.page_table, large.qo_indptr)
    with pytest.raises(RuntimeError, match="no plan"):
        attn.run(large.q[:40], large.kv_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("window_left", [-1, 20])
def test_one_captured_run_serves_every_later_plan(backend, device, window_left):
    spec = small_spec(backend, window_left=window_left)
    require_support(backend, spec, PAGE_SIZE, device)
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device, capacity=CAPACITY)
    steps = [
        batch_of(spec, PAGE_SIZE, *lens, seed=seed).materialise(device)
        for seed, lens in enumerate(STEPS.values())
    ]
    pool = torch.full((100, *steps[0].kv_cache.shape[1:]), torch.nan).to(steps[0].kv_cache)
    q = padded(steps[0].q, CAPACITY.max_tokens)
    attn.plan(steps[0].page_table, steps[0].qo_indptr)
    pool[: steps[0].kv_cache.shape[0]] = steps[0].kv_cache
    attn.run_return_lse(q, pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = attn.run_return_lse(q, pool)
    for step in [*steps, *reversed(steps)]:
        pool.fill_(torch.nan)[: step.kv_cache.shape[0]] = step.kv_cache
        q.copy_(padded(step.q, CAPACITY.max_tokens))
        for tensor in (answer.out, answer.lse):
            tensor.fill_(torch.nan)
        for dirty in scratch_of(attn):
            dirty.view(torch.uint8).fill_(255)
        table, qo_indptr = step.page_table.to("cpu"), step.qo_indptr.cpu()
        torch.cuda.set_sync_debug_mode("error")
        try:
            attn.plan(table, qo_indptr)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_padded_answer(backend, step, answer)

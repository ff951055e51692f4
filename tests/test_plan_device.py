"""Tables that exist on the device alone: planned without a wait, and safe whatever they hold."""

import pytest
import torch
from attention_steps import assert_same_bits, batch_of, half, require_support
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable, UnsupportedSpec
from pagedattn.checking.step import Step

SPEC = AttentionSpec(4, 2, 64, torch.float16)
PAGE_SIZE = 16
CAPACITY = Capacity(max_batch_size=5, max_tokens=24, max_pages=20)
STEPS = [((100, 33, 1), (1, 1, 1)), ((40, 5), (20, 0)), ((0, 9, 30), (3, 2, 1))]


@pytest.fixture(scope="module")
def attn(device) -> PagedAttention:
    require_support("triton", SPEC, PAGE_SIZE, device)
    return PagedAttention(SPEC, PAGE_SIZE, backend="triton", device=device, capacity=CAPACITY)


def step_of(device, lens, seed: int = 0) -> Step:
    return batch_of(SPEC, PAGE_SIZE, *lens, seed=seed).materialise(device)


def padded(q: torch.Tensor) -> torch.Tensor:
    rows = torch.ones(CAPACITY.max_tokens, *q.shape[1:], dtype=q.dtype, device=q.device)
    rows[: q.shape[0]] = q
    return rows


def longer(table: PageTable, device: torch.device) -> PageTable:
    """The table on the device, with entries behind its last page as engines have them."""
    unused = torch.full((3,), -1, dtype=torch.int32)
    kv_indices = torch.cat([table.kv_indices.cpu(), unused])
    return PageTable(PAGE_SIZE, table.kv_indptr, kv_indices, table.kv_lens).to(device)


@pytest.mark.parametrize("lens", STEPS)
def test_a_table_on_the_device_gives_the_bits_of_the_same_on_the_host(attn, device, lens):
    step = step_of(device, lens)
    q, num_pages = padded(step.q), step.kv_cache.shape[0]
    attn.plan(step.page_table, step.qo_indptr)
    expected, slots = attn.run_return_lse(q, step.kv_cache), attn.write_slots.clone()
    table = longer(step.page_table, device)
    attn.plan_device(table, step.qo_indptr.to(device), num_pages=num_pages)
    assert_same_bits(attn.run_return_lse(q, step.kv_cache), expected)
    assert torch.equal(attn.write_slots, slots)
    assert "requests planned" in repr(attn)


def test_without_qo_indptr_every_request_has_one_query(attn, device):
    step = step_of(device, STEPS[0])
    attn.plan(step.page_table)
    expected = attn.run_return_lse(padded(step.q), step.kv_cache)
    attn.plan_device(step.page_table.to(device), num_pages=step.kv_cache.shape[0])
    assert_same_bits(attn.run_return_lse(padded(step.q), step.kv_cache), expected)


ANY = st.sampled_from([-(2**31), -1000, -1, 0, 1, 2, 7, 15, 16, 17, 24, 25, 31, 1000, 2**31 - 1])


def int32s(size: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(ANY, min_size=size, max_size=size).map(
        lambda values: torch.tensor(values, dtype=torch.int32)
    )


@settings(max_examples=8)
@given(data=st.data(), batch_size=st.integers(0, 5), num_entries=st.integers(0, 12))
def test_no_value_leads_out_of_bounds(attn, device, data, batch_size, num_entries):
    """What the kernels read is a table that a host would accept, and no page that is not there."""
    num_pages = data.draw(st.integers(1, 9))
    table = PageTable(
        PAGE_SIZE,
        data.draw(int32s(batch_size + 1)),
        data.draw(int32s(num_entries)),
        data.draw(int32s(batch_size)),
    ).to(device)
    attn.plan_device(table, data.draw(int32s(batch_size + 1)).to(device), num_pages=num_pages)
    qo_indptr, kv_indptr, kv_lens, kv_indices = (x.cpu() for x in attn._backend._staging.arrays)
    for bounds, last in ((qo_indptr, CAPACITY.max_tokens), (kv_indptr, num_entries)):
        bounds = bounds[: batch_size + 2]
        assert (bounds.diff() >= 0).all()
        assert bounds[0] == 0
        assert bounds[-1] <= last
    assert qo_indptr[batch_size + 1] == CAPACITY.max_tokens
    assert kv_lens[batch_size] == 0
    lens, owned = kv_lens[: batch_size + 1], kv_indptr[: batch_size + 2].diff()
    assert ((lens >= 0) & (lens <= owned * PAGE_SIZE)).all()
    ids = kv_indices[:num_entries]
    assert ((ids >= 0) & (ids < num_pages)).all()
    kv_cache = torch.ones(num_pages, 2, PAGE_SIZE, 2, 64, dtype=SPEC.dtype, device=device)
    q = torch.ones(CAPACITY.max_tokens, 4, 64, dtype=SPEC.dtype, device=device)
    out = attn.run(q, kv_cache)
    assert torch.isfinite(out).all()
    assert int(attn.write_slots.max()) < num_pages * PAGE_SIZE


def test_a_cache_with_fewer_pages_than_planned_is_refused(attn, device):
    step = step_of(device, STEPS[0])
    attn.plan_device(step.page_table.to(device), num_pages=100)
    with pytest.raises(ValueError, match=r"kv_cache has 14 pages, .* page id 99"):
        attn.run(padded(step.q), step.kv_cache)


def test_what_can_be_known_without_waiting_is_checked(attn, device):
    step = step_of(device, STEPS[0])
    table = step.page_table.to(device)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        attn.plan_device(table, num_pages=0)
    with pytest.raises(ValueError, match=r"qo_indptr must have shape \[4\], got \[2\]"):
        attn.plan_device(table, torch.zeros(2, dtype=torch.int32, device=device), num_pages=9)
    with pytest.raises(ValueError, match="page_table must be on"):
        attn.plan_device(step.page_table.to("meta"), num_pages=9)
    ids = torch.zeros(31, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="max_pages=20 but the step has 31"):
        attn.plan_device(PageTable(16, table.kv_indptr, ids, table.kv_lens), num_pages=9)
    with pytest.raises(RuntimeError, match="there is no plan"):
        attn.run(padded(step.q), step.kv_cache)


def test_without_a_capacity_it_is_refused(device):
    require_support("triton", SPEC, PAGE_SIZE, device)
    attn = PagedAttention(SPEC, PAGE_SIZE, backend="triton", device=device)
    with pytest.raises(RuntimeError, match="plan_device needs a capacity"):
        attn.plan_device(PageTable.from_lengths([5], PAGE_SIZE).to(device), num_pages=9)


def test_a_backend_that_plans_on_the_host_says_so(backend, device):
    if backend == "triton":
        pytest.skip("triton: plans on the device")
    spec = AttentionSpec(4, 2, 64, half(backend))
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device, capacity=CAPACITY)
    with pytest.raises(UnsupportedSpec, match=r"plan_device: .*host"):
        attn.plan_device(PageTable.from_lengths([5], PAGE_SIZE).to(device), num_pages=9)


@pytest.mark.gpu
def test_device_plans_wait_for_nothing_and_serve_a_captured_run(attn, device):
    steps = [step_of(device, lens, seed) for seed, lens in enumerate(STEPS)]
    expected = []
    for step in steps:
        attn.plan(step.page_table, step.qo_indptr)
        expected.append(attn.run_return_lse(padded(step.q), step.kv_cache))
    num_pages = max(step.kv_cache.shape[0] for step in steps)
    pool = torch.full((num_pages, *steps[0].kv_cache.shape[1:]), torch.nan).to(steps[0].kv_cache)
    q = padded(steps[0].q)
    tables = [longer(step.page_table, device) for step in steps]
    bounds = [step.qo_indptr.to(device) for step in steps]
    attn.plan_device(tables[0], bounds[0], num_pages=num_pages)
    attn.run_return_lse(q, pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = attn.run_return_lse(q, pool)
    for step, table, qo_indptr, right in zip(steps, tables, bounds, expected, strict=True):
        pool.fill_(torch.nan)[: step.kv_cache.shape[0]] = step.kv_cache
        q.copy_(padded(step.q))
        torch.cuda.set_sync_debug_mode("error")
        try:
            attn.plan_device(table, qo_indptr, num_pages=num_pages)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same_bits(answer, right)

"""A mixed step's two kernels run side by side, and yet in the order of the caller's stream.

With pages of 16 tokens, one launch has both kinds of queries: then as well.
"""

import pytest
import torch

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable
from pagedattn.backends.triton.side_by_side import SideBySide

SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=128)
KV_LENS, QO_LENS = [700, 40, 515, 300, 1024], [1, 1, 260, 1, 400]


@pytest.fixture
def hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("in_graph", [False, True])
def test_it_is_behind_what_is_queued_and_before_what_comes_next(hopper, in_graph, page_size):
    table = PageTable.from_lengths(KV_LENS, page_size)
    qo_indptr = torch.tensor([0, *QO_LENS]).cumsum(0).int()
    num_tokens, num_pages = sum(QO_LENS), len(table.kv_indices)
    capacity = Capacity(len(KV_LENS), num_tokens, num_pages) if in_graph else None
    attn = PagedAttention(SPEC, page_size, backend="triton", device=hopper, capacity=capacity)
    generator = torch.Generator(hopper).manual_seed(0)
    options = {"dtype": SPEC.dtype, "device": hopper, "generator": generator}
    q = torch.randn(num_tokens, 8, 128, **options)
    kv_cache = torch.randn(num_pages, 2, page_size, 2, 128, **options)
    stream = torch.cuda.Stream(hopper)
    with torch.cuda.stream(stream):
        attn.plan(table, qo_indptr)
        expected = attn.run(q, kv_cache).clone()
        late_q, late_out = torch.full_like(q, torch.nan), torch.empty_like(q)
        ways = [lambda: attn.run(late_q, kv_cache, out=late_out)]
        if in_graph:  # and by itself again, and in another graph: with the same events
            ways = [graph_of(ways[0]).replay, *ways, graph_of(ways[0]).replay, *ways]
        for run in ways * 2:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(2e8))
            late_q.copy_(q)
            late_out.fill_(torch.nan)
            run()
            after = late_out.clone()
            late_q.fill_(torch.nan)
            torch.cuda.synchronize()
            assert torch.equal(after, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [5, 16])
def test_runs_in_a_row_wait_for_one_another_by_the_same_events(hopper, page_size):
    """Each run reads what the one before it wrote, and none is waited for on the host."""
    table = PageTable.from_lengths(KV_LENS, page_size)
    qo_indptr = torch.tensor([0, *QO_LENS]).cumsum(0).int()
    attn = PagedAttention(SPEC, page_size, backend="triton", device=hopper)
    attn.plan(table, qo_indptr)
    generator = torch.Generator(hopper).manual_seed(0)
    options = {"dtype": SPEC.dtype, "device": hopper, "generator": generator}
    q = torch.randn(sum(QO_LENS), 8, 128, **options)
    kv_cache = torch.randn(len(table.kv_indices), 2, page_size, 2, 128, **options)
    attn.run(attn.run(q, kv_cache), kv_cache)  # compiles

    def chained(wait) -> torch.Tensor:
        out = q
        for _ in range(20):
            out = attn.run(out, kv_cache) + q
            wait()
        return out

    expected = chained(torch.cuda.synchronize)
    torch.cuda._sleep(int(2e8))
    assert torch.equal(chained(lambda: None), expected)


def graph_of(call) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.gpu
def test_short_queries_come_between_the_programs_for_long_ones(hopper):
    launched = []
    both = SideBySide(hopper, 60, 72)
    both.run(lambda: launched.append("short"), lambda grid, stream=None: launched.append(grid))
    assert launched == [60, "short", 72]

"""Appends to pages against a plain loop, bit for bit; on a GPU, or in Triton's interpreter."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, OutOfPages, PagedKVCache, PageTable, write_slots

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def spec_of(num_kv_heads=2, head_dim=16, dtype=torch.float32):
    return AttentionSpec(
        num_qo_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )


@st.composite
def appends(draw):
    """A cache's shape, a step's lengths and shuffled pages; shrinks to one request, one token."""
    page_size = draw(st.sampled_from([1, 2, 3, 5, 16]))
    requests = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=4))
    kv_lens = [kv_len for kv_len, _ in requests]
    num_needed = sum(-(-kv_len // page_size) for kv_len in kv_lens)
    page_ids = draw(st.permutations(range(num_needed + draw(st.integers(1, 3)))))
    return {
        "table": PageTable.from_lengths(kv_lens, page_size, page_ids),
        "qo_lens": [qo_len for _, qo_len in requests],  # may exceed kv_len: those have no slot
        "num_pages": len(page_ids),
        "num_layers": draw(st.integers(1, 2)),
        "spec": spec_of(
            draw(st.sampled_from([1, 3])),
            draw(st.sampled_from([1, 16, 72, 80, 400])),
            draw(st.sampled_from(DTYPES)),
        ),
        "layout": draw(st.sampled_from(["dense", "packed kv", "heads first"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def new_rows(case, num_tokens, device):
    """K and V in one of the layouts that models produce: all are dense in head_dim alone."""
    spec = case["spec"]
    shape = (num_tokens, 2, spec.num_kv_heads, spec.head_dim)
    generator = torch.Generator().manual_seed(case["seed"])
    rows = torch.randn(shape, generator=generator).to(device, spec.dtype)
    if case["layout"] == "dense":
        return rows[:, 0].contiguous(), rows[:, 1].contiguous()
    if case["layout"] == "heads first":
        rows = rows.transpose(0, 2).contiguous().transpose(0, 2)
    return rows[:, 0], rows[:, 1]


@given(case=appends())
def test_append_writes_every_planned_row_and_no_other_bit(device, case):
    table, spec = case["table"], case["spec"]
    qo_indptr = torch.tensor([0, *case["qo_lens"]], dtype=torch.int32).cumsum(0).int()
    cache = PagedKVCache(
        case["num_layers"], case["num_pages"], table.page_size, spec, device, sink_page=None
    )
    cache.pages.fill_(7.0)
    k, v = new_rows(case, int(qo_indptr[-1]), device)
    layer = case["num_layers"] - 1
    cache.append(layer, k, v, write_slots(table, qo_indptr).to(device))

    expected = torch.full_like(cache.pages, 7.0)
    for request, qo_len in enumerate(case["qo_lens"]):
        pages, kv_len = table.pages_of(request).tolist(), int(table.kv_lens[request])
        for i in range(qo_len):
            position = kv_len - qo_len + i
            if position >= 0:
                page, offset = pages[position // table.page_size], position % table.page_size
                row = int(qo_indptr[request]) + i
                expected[layer, page, 0, offset] = k[row]
                expected[layer, page, 1, offset] = v[row]
    assert torch.equal(cache.pages, expected)
    cache.raise_if_refused()


def test_repr_says_how_large_it_is_and_what_is_free():
    cache = PagedKVCache(2, 8, 4, spec_of(), "cpu")
    cache.extend("a", 5)
    assert "2 layers, 8 pages of 4 tokens" in repr(cache)
    assert repr(cache).endswith("1 requests, 5 free pages")


@pytest.mark.parametrize("bad", [-2, -(2**40), 12, 2**31 + 5, 2**40])
def test_a_slot_outside_the_cache_raises_and_writes_nothing_outside(device, bad):
    # the cache is the middle of a larger buffer, so a stray write would show
    cache = PagedKVCache(1, 3, 4, spec_of(), device)
    around = torch.full((3, *cache.pages.shape), 7.0, device=device)
    cache.pages = around[1]
    rows = torch.ones(2, 2, 16, device=device)
    slots = torch.tensor([5, bad], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"slots\[1\] is {bad}, outside the cache"):
            cache.append(0, rows, rows, slots)
        assert (around == 7.0).all()
    else:
        cache.append(0, rows, rows, slots)
        with pytest.raises(ValueError, match="append refused 1 slots outside the cache"):
            cache.raise_if_refused()
        assert int((around != 7.0).sum()) == 2 * 2 * 16  # the good token, K and V
    cache.raise_if_refused()


def test_the_kernel_itself_refuses_and_counts(device):
    pytest.importorskip("triton")
    from pagedattn.kernels.append import launch_append

    pages = torch.full((3, 3, 2, 4, 2, 16), 7.0, device=device)
    num_refused = torch.zeros(1, dtype=torch.int32, device=device)
    rows = torch.ones(6, 2, 16, device=device)
    slots = torch.tensor([-1, -2, 12, 3, 2**33, 11], device=device)
    launch_append(rows, rows, slots, pages[1], num_refused)
    assert int(num_refused) == 3
    expected = torch.full_like(pages, 7.0)
    expected[1, 0, :, 3] = 1.0
    expected[1, 2, :, 3] = 1.0
    assert torch.equal(pages, expected)


def test_the_kernel_is_launched_with_the_pages_device_as_the_current_one(monkeypatch):
    """Kernels launch on the current device, wherever their tensors are."""
    pytest.importorskip("triton")
    from pagedattn.kernels import append

    current, launches = [], []

    @contextmanager
    def noted(tensor):
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append((args[3], *current))

    monkeypatch.setattr(torch.cuda, "device_of", noted)
    monkeypatch.setattr(append, "_append_kernel", Kernel())
    pages, rows = torch.zeros(3, 2, 4, 2, 16), torch.ones(1, 2, 16)
    append.launch_append(rows, rows, torch.tensor([5]), pages, torch.zeros(1, dtype=torch.int32))
    ((written, device_of),) = launches
    assert written is device_of is pages


def test_minus_one_is_skipped_and_no_tokens_are_legal(device):
    cache = PagedKVCache(2, 3, 4, spec_of(), device)
    rows = torch.ones(2, 2, 16, device=device)
    cache.append(1, rows, rows, torch.tensor([-1, -1], device=device))
    cache.append(1, rows[:0], rows[:0], torch.zeros(0, dtype=torch.int64, device=device))
    assert not cache.pages.any()
    cache.raise_if_refused()


@given(
    page_size=st.integers(1, 5),
    prompt=st.integers(1, 9),
    shared=st.integers(0, 9),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=5),
)
def test_requests_that_share_a_prefix_each_keep_their_own_tokens(
    device, page_size, prompt, shared, steps
):
    cache = PagedKVCache(2, 40, page_size, spec_of(1, 1), device)
    tokens = {"parent": [], "child": []}
    counter = 0

    def write(request, num_tokens):
        nonlocal counter
        cache.extend(request, num_tokens)
        table = cache.allocator.page_table([request])
        slots = write_slots(table, torch.tensor([0, num_tokens], dtype=torch.int32))
        values = torch.arange(counter, counter + num_tokens, dtype=torch.float32)
        counter += num_tokens
        tokens[request] += values.tolist()
        rows = values.view(-1, 1, 1).to(device)
        for layer in range(2):
            cache.append(layer, rows + 1000 * layer, rows + 500, slots.to(device))

    write("parent", prompt)
    cache.allocator.fork("parent", "child", min(shared, prompt))
    tokens["child"] = tokens["parent"][:shared]
    for to_child, num_tokens in steps:
        write("child" if to_child else "parent", num_tokens)
    for request, expected in tokens.items():
        pages = torch.tensor(cache.allocator.pages_of(request), dtype=torch.int64, device=device)
        for layer in range(2):
            held = cache[layer][pages].cpu().transpose(0, 1).reshape(2, -1)[:, : len(expected)]
            wanted = torch.tensor(expected)
            assert torch.equal(held, torch.stack([wanted + 1000 * layer, wanted + 500]))


def test_a_new_cache_is_all_zeros_and_its_sink_page_is_never_owned(device):
    cache = PagedKVCache(2, 4, 8, spec_of(3, 80, torch.bfloat16), device, sink_page=2)
    assert cache.pages.shape == (2, 4, 2, 8, 3, 80)
    assert cache[1].shape == (4, 2, 8, 3, 80)
    assert cache[1].data_ptr() == cache.pages[1].data_ptr()
    assert not cache.pages.any()
    cache.extend("a", 24)
    assert cache.allocator.pages_of("a") == (0, 1, 3)
    with pytest.raises(OutOfPages, match="1 pages were asked for and 0 are free"):
        cache.extend("b", 1)


ROWS = torch.zeros(2, 2, 16)
SLOTS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("layer", "k", "v", "slots", "message"),
    [
        (2, ROWS, ROWS, SLOTS, "layer must be 0 to 1, got 2"),
        (-1, ROWS, ROWS, SLOTS, "layer must be 0 to 1, got -1"),
        (0, ROWS[:, :1], ROWS, SLOTS, r"k must have shape \[tokens, 2, 16\]"),
        (0, ROWS[0], ROWS, SLOTS, r"k must have shape \[tokens, 2, 16\]"),
        (0, ROWS, ROWS[..., :8], SLOTS, r"v must have shape .* got \[2, 2, 8\]"),
        (0, ROWS.half(), ROWS, SLOTS, "k must be torch.float32, got torch.float16"),
        (0, ROWS, ROWS.to("meta"), SLOTS, "v must be on .*, got meta"),
        (0, ROWS, torch.zeros(2, 2, 32)[..., ::2], SLOTS, "v must be dense in its last dimension"),
        (0, ROWS, torch.zeros(3, 2, 16), SLOTS, "v must have 2 tokens as k has, got 3"),
        (0, ROWS, ROWS, SLOTS[:1], r"slots must have shape \[2\].*got \[1\]"),
        (0, ROWS, ROWS, SLOTS.int(), "slots must be torch.int64, got torch.int32"),
        (0, ROWS, ROWS, SLOTS.to("meta"), "slots must be on .*, got meta"),
        (0, ROWS, ROWS, torch.zeros(4, dtype=torch.int64)[::2], "slots must be contiguous"),
    ],
)
def test_bad_tensors_are_named_before_anything_is_written(device, layer, k, v, slots, message):
    cache = PagedKVCache(2, 3, 4, spec_of(), device)
    cache.pages.fill_(7.0)
    moved = [t if t.device.type == "meta" else strided_to(t, device) for t in (k, v, slots)]
    with pytest.raises(ValueError, match=message):
        cache.append(layer, *moved)
    assert (cache.pages == 7.0).all()


def strided_to(tensor, device):
    """Move a tensor without making it dense."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def test_without_triton_interpreting_a_cpu_cache_writes_the_same_with_torch():
    code = (
        "import sys, torch; from pagedattn import *\n"
        "spec = AttentionSpec(2, 2, 16, dtype=torch.float32)\n"
        "cache = PagedKVCache(1, 3, 4, spec, 'cpu')\n"
        "rows = torch.arange(96.).view(3, 2, 16)\n"
        "cache.append(0, rows, -rows, torch.tensor([9, -1, 2]))\n"
        "print('triton' in sys.modules, (cache[0][2, 0, 1] == rows[0]).all().item(),\n"
        "      (cache[0][0, 1, 2] == -rows[2]).all().item(), int(cache.pages.ne(0).sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.split() == ["False", "True", "True", str(4 * 32 - 2)]


@pytest.mark.gpu
def test_append_can_be_captured_and_replayed_and_never_waits(device):
    cache = PagedKVCache(1, 3, 4, spec_of(), device)
    rows, slots = torch.ones(2, 2, 16, device=device), torch.tensor([4, 5], device=device)
    cache.append(0, rows, rows, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(0, rows, rows, slots)
    rows.fill_(3.0)
    slots.fill_(-1)
    slots[0] = 11
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append(0, rows, rows, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    cache.pages.zero_()
    graph.replay()
    expected = torch.zeros_like(cache.pages)
    expected[0, 2, :, 3] = 3.0
    assert torch.equal(cache.pages, expected)

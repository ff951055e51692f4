"""Hostile input never reaches a kernel through the wrappers: it is right, or a clear error."""

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    HEADS,
    PAGE_SIZE,
    assert_right,
    flashinfer,
    make_step,
    workspace,
)

from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
    check_flashinfer_head_dim,
)

SIZES = (*HEADS.values(), PAGE_SIZE)
KV_LENS = [5, 9, 1]


def prefill(device):
    return FlashInferPrefillWrapper(workspace(device), *SIZES, device=device)


def decode(device):
    return FlashInferDecodeWrapper(workspace(device), *SIZES, device=device)


def mixed(device):
    halves = (workspace(device), workspace(device))
    return FlashInferMixedWrapper(*halves, *SIZES, 4, 3, 32, 1, device)


MAKERS = pytest.mark.parametrize("make", [prefill, decode, mixed])


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


# Every array of a step of 3 requests with 5, 9 and 1 tokens: (0, 2, 5, 6), 6 pages, (1, 1, 1)
BAD = {
    "indptr int64": ("paged_kv_indptr", torch.tensor([0, 2, 5, 6]), "must be int32"),
    "indptr too short": ("paged_kv_indptr", i32(0, 2, 5), "paged_kv_indptr must have shape"),
    "indptr decreases": ("paged_kv_indptr", i32(0, 5, 2, 6), "must not decrease"),
    "indptr not from 0": ("paged_kv_indptr", i32(1, 2, 5, 6), "must start at 0"),
    "indptr strided": ("paged_kv_indptr", i32(0, 0, 2, 0, 5, 0, 6, 0)[::2], "contiguous"),
    "indices int64": ("paged_kv_indices", torch.arange(6), "paged_kv_indices must be int32"),
    "indices too short": ("paged_kv_indices", i32(1, 2, 3), "paged_kv_indices must have shape"),
    "indices negative": ("paged_kv_indices", i32(1, 2, -3, 4, 5, 6), "negative"),
    "last 0": ("paged_kv_last_page_len", i32(1, 0, 1), r"last_page_len\[1\] is 0"),
    "last too large": ("paged_kv_last_page_len", i32(1, 1, 5), r"last_page_len\[2\] is 5"),
    "last negative": ("paged_kv_last_page_len", i32(-1, 1, 1), r"last_page_len\[0\] is -1"),
    "last int64": ("paged_kv_last_page_len", torch.tensor([1, 1, 1]), "must be int32"),
    "last 2-d": ("paged_kv_last_page_len", i32(1, 1, 1)[None], "paged_kv_last_page_len"),
    "kv_lens wrong": ("kv_lens", i32(5, 8, 1), r"kv_lens\[1\] is 8"),
    "kv_lens too short": ("kv_lens", i32(5, 9), "kv_lens must have shape"),
    "window": ("window_left", -2, "window_left"),
    "dtype": ("dtype", torch.float32, "dtype must be one of"),
}
BAD_QUERIES = {
    "too short": (i32(0, 1, 2), "qo_indptr must have shape"),
    "decreases": (i32(0, 2, 1, 3), "qo_indptr must not decrease"),
    "float": (torch.tensor([0.0, 1, 2, 3]), "qo_indptr must be int32"),
}


def arguments(step, wrapper) -> dict:
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    kwargs = dict(zip(names, step.kv_arrays, strict=True))
    if not isinstance(wrapper, FlashInferDecodeWrapper):
        kwargs["qo_indptr"] = step.qo_indptr
    return kwargs


def check_refused_and_still_usable(wrapper, step, bad: dict, message: str) -> None:
    good = arguments(step, wrapper)
    wrapper.plan(**good)
    with pytest.raises(ValueError, match=message):
        wrapper.plan(**{**good, **bad})
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper.run(step.q, step.kv_cache)
    wrapper.plan(**good)
    assert_right(wrapper.run(step.q, step.kv_cache), None, step)


@MAKERS
@pytest.mark.parametrize("name", BAD)
def test_malformed_plans_raise_and_leave_no_plan(device, make, name):
    argument, value, message = BAD[name]
    step = make_step(device, KV_LENS)
    check_refused_and_still_usable(make(device), step, {argument: value}, message)


@pytest.mark.parametrize("make", [prefill, mixed])
@pytest.mark.parametrize("name", BAD_QUERIES)
def test_malformed_query_bounds_raise_and_leave_no_plan(device, make, name):
    value, message = BAD_QUERIES[name]
    step = make_step(device, KV_LENS)
    check_refused_and_still_usable(make(device), step, {"qo_indptr": value}, message)


@MAKERS
def test_malformed_tensors_raise_in_run_and_leave_the_plan(device, make):
    step = make_step(device, KV_LENS)
    wrapper = make(device)
    wrapper.plan(**arguments(step, wrapper))
    q, cache = step.q, step.kv_cache
    highest = int(step.table.kv_indices.max())
    for bad_q, bad_cache, message in [
        (q[:2], cache, "q must have shape"),
        (q[:, :2], cache, "q must have shape"),
        (q.float(), cache, "q must be"),
        (q.transpose(1, 2).contiguous().transpose(1, 2), cache, "dense"),
        (q, cache[:highest], f"page id {highest}"),
        (q, cache[:, :, :2], "kv_cache must have shape"),
        (q, cache.transpose(0, 1), "kv_cache must have shape"),
        (q, cache.half(), "kv_cache must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrapper.run(bad_q, bad_cache)
    assert_right(wrapper.run(q, cache), None, step)


@MAKERS
def test_caches_at_odd_addresses_raise(device, make):
    step = make_step(device, KV_LENS)
    wrapper = make(device)
    wrapper.plan(**arguments(step, wrapper))
    shape = step.kv_cache.shape
    odd = torch.empty(step.kv_cache.numel() + 1, dtype=step.q.dtype, device=device)[1:].view(shape)
    odd.copy_(step.kv_cache)
    with pytest.raises(ValueError, match="16 bytes"):
        wrapper.run(step.q, odd)


@MAKERS
def test_queries_at_odd_addresses_are_right(device, make):
    step = make_step(device, KV_LENS)
    wrapper = make(device)
    wrapper.plan(**arguments(step, wrapper))
    odd = torch.empty(step.q.numel() + 1, dtype=step.q.dtype, device=device)[1:].view(step.q.shape)
    odd.copy_(step.q)
    assert_right(wrapper.run(odd, step.kv_cache), None, step)


@MAKERS
def test_run_before_plan_raises(device, make):
    step = make_step(device, KV_LENS)
    with pytest.raises(RuntimeError, match="no plan"):
        make(device).run(step.q, step.kv_cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_qo_heads": 3}, "divisible"),
        ({"page_size": 0}, "page_size"),
        ({"backend": "cudnn"}, "backend must be"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
@pytest.mark.parametrize("kind", [FlashInferPrefillWrapper, FlashInferDecodeWrapper])
def test_malformed_wrappers_raise(device, kind, change, message):
    arguments = {**HEADS, "page_size": PAGE_SIZE, "device": device, **change}
    with pytest.raises(ValueError, match=message):
        kind(workspace(device), **arguments)


@pytest.mark.parametrize("kind", [FlashInferPrefillWrapper, FlashInferDecodeWrapper])
def test_workspaces_must_be_memory_in_one_piece(device, kind):
    """Planners take the length for the size, and kernels write there."""
    one_byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for tensor in (one_byte.expand(1 << 20), one_byte[0], one_byte.expand(4, 1 << 20)):
        with pytest.raises(ValueError, match="workspace_buffer must be contiguous"):
            kind(tensor, *SIZES, device=device)
    with pytest.raises(TypeError, match=r"workspace_buffer must be a tensor .* got int"):
        kind(1 << 20, *SIZES, device=device)


@MAKERS
def test_a_sink_page_is_a_page(device, make):
    wrapper = make(device)
    with pytest.raises(ValueError, match="sink_page must be a page id or None, got -1"):
        wrapper.sink_page = -1
    assert wrapper.sink_page == 0


def test_one_token_rows_never_run_on_the_hopper_kernel(device):
    with pytest.raises(ValueError, match="'auto' or 'fa2'"):
        FlashInferDecodeWrapper(workspace(device), *SIZES, device=device, backend="fa3")


def test_head_sizes_are_checked_for_gpus_only(device, monkeypatch):
    check_flashinfer_head_dim(96, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"head_dim=96.*pad q, k and v with zeros to 128"):
        check_flashinfer_head_dim(96, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"head_dim=192.*pad q, k and v with zeros to 256"):
        check_flashinfer_head_dim(192, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"head_dim=1000.*another backend"):
        check_flashinfer_head_dim(1000)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [prefill, decode])
def test_a_capture_of_an_eager_wrapper_raises(device, make):
    if device.type != "cuda":
        pytest.skip("captures a CUDA graph")
    step = make_step(device, KV_LENS)
    wrapper = make(device)
    wrapper.plan(**arguments(step, wrapper))
    wrapper.run(step.q, step.kv_cache)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match="accelerator_graph=True"):
            wrapper.run(step.q, step.kv_cache)
        with pytest.raises(RuntimeError, match="cannot be captured"):
            wrapper.plan(**arguments(step, wrapper))
        step.q.add_(0)  # a graph of nothing is refused

"""The bytes that a graph-mode wrapper is said to need, against FlashInfer's own account of them."""

import pytest
import torch
from flashinfer_cases import flashinfer  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity
from pagedattn.backends.flashinfer import (
    DeviceFacts,
    FlashInferDecodeWrapper,
    FlashInferPrefillWrapper,
    Workspace,
    library,
    workspace_need,
)
from pagedattn.backends.flashinfer.kernel_choice import has_fa3
from pagedattn.backends.flashinfer.library import flashinfer_version
from pagedattn.backends.flashinfer.need import (
    capacity_needs,
    decode_need,
    eager_float_bytes,
    prefill_need,
)

H200 = DeviceFacts(num_processors=132, compute_capability=(9, 0))
A100 = DeviceFacts(num_processors=108, compute_capability=(8, 0))
OLD, NEW = (0, 6, 18), (0, 7, 4)


def test_a_publicly_reported_need_is_met_to_the_byte():
    """Public report vllm issue 40023: a piece of 536346624 bytes, and a smaller one behind it."""
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=2, head_dim=256)
    need = decode_need(spec, 512, H200, OLD)
    rows = 536346624 // (32 * 256 * 4)
    assert need.float_bytes == 536346624 + 32 * rows * 4


def test_newer_versions_need_less_by_the_heads_that_share_a_kv_head():
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    old = prefill_need(spec, 64, 8192, "fa2", H200, OLD).float_bytes
    new = prefill_need(spec, 64, 8192, "fa2", H200, NEW).float_bytes
    assert 3.9 < old / new <= 4


def test_fa3_needs_no_float_workspace():
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    assert prefill_need(spec, 64, 8192, "fa3", H200, NEW).float_bytes == 0


def test_one_token_requests_that_fill_the_gpu_need_no_float_workspace_in_newer_versions():
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    assert decode_need(spec, 256, H200, NEW).float_bytes == 0
    assert decode_need(spec, 16, H200, NEW).float_bytes > 0


def test_the_need_of_a_capacity_covers_both_halves(device):
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    need = workspace_need(spec, Capacity(64, 8192, 4096), H200)
    assert need.float_bytes >= decode_need(spec, 64, H200, NEW).float_bytes


def test_each_half_of_a_capacity_has_its_own_need():
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    needs = capacity_needs(spec, Capacity(16, 8192, 4096), H200, NEW)
    assert needs.decode == decode_need(spec, 16, H200, NEW)
    assert needs.prefill == prefill_need(spec, 2 * 16, 8192, "fa3", H200, NEW)
    assert needs.decode.float_bytes > needs.prefill.float_bytes == 0
    without_fa3 = capacity_needs(spec, Capacity(256, 8192, 4096), A100, NEW)
    assert without_fa3.prefill.float_bytes > without_fa3.decode.float_bytes == 0


def test_a_capacity_for_a_few_tokens_a_row_needs_the_prefill_wrapper_alone():
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    needs = capacity_needs(spec, Capacity(64, 256, 4096), H200, NEW)
    assert needs.decode is None
    assert needs.prefill == prefill_need(spec, 64, 256, "fa2", H200, NEW)


def test_eager_plans_of_larger_heads_reserve_fewer_rows():
    rows = {
        head_dim: eager_float_bytes(AttentionSpec(8, 2, head_dim), H200) / (4 * 8 * (head_dim + 1))
        for head_dim in (64, 128, 256, 512)
    }
    assert rows == {64: 132 * 128, 128: 132 * 128, 256: 132 * 64, 512: 132 * 32}


def close(said: int, real: int) -> bool:
    return real <= said <= max(1.3 * real, real + 64)


SHAPES = {
    "kv_heads": st.sampled_from([1, 2, 8]),
    "group": st.sampled_from([1, 3, 4, 7, 16]),
    "head_dim": st.sampled_from([64, 128, 512]),
    "batch": st.sampled_from([1, 2, 16, 33, 64, 256]),
}


def on_gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("asks FlashInfer's planner on a GPU")
    return device


TYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def facts_and_version(device: torch.device):
    return DeviceFacts.of(device), flashinfer_version(library.load_flashinfer())


@pytest.mark.gpu
@given(**SHAPES)
def test_decode_needs_what_flashinfer_says(device, kv_heads, group, head_dim, batch):
    floats = torch.zeros(1 << 20, dtype=torch.uint8, device=on_gpu(device))
    heads = (kv_heads * group, kv_heads, head_dim)
    sizes = (batch, 8 * batch)
    wrapper = FlashInferDecodeWrapper(floats, *heads, 16, *sizes, device, accelerator_graph=True)
    kernel = wrapper._make_kernel()
    indptr = torch.arange(batch + 1, dtype=torch.int32) * 8
    arrays = (indptr, torch.zeros(8 * batch, dtype=torch.int32), torch.ones(batch).int())
    real = kernel.wrapper.workspace_size(*arrays, *heads, 16, **TYPES)
    said = decode_need(AttentionSpec(*heads), batch, *facts_and_version(device))
    assert all(map(close, said, real)), (said, real)


@pytest.mark.gpu
@given(**SHAPES, rows=st.sampled_from([1, 5, 64, 300]))
def test_prefill_needs_what_flashinfer_says(device, kv_heads, group, head_dim, batch, rows):
    floats = torch.zeros(1 << 20, dtype=torch.uint8, device=on_gpu(device))
    heads, tokens = (kv_heads * group, kv_heads, head_dim), batch * rows
    sizes = (batch, tokens, 8 * batch)
    graph = {"accelerator_graph": True, "backend": "fa2"}
    wrapper = FlashInferPrefillWrapper(floats, *heads, 16, *sizes, device, **graph)
    kernel = wrapper._kernel("fa2")
    added = batch + 1  # the wrapper's padding request
    qo_indptr = torch.tensor([0] * added + [tokens], dtype=torch.int32)
    indptr = torch.zeros(added + 1, dtype=torch.int32)
    arrays = (qo_indptr, indptr, torch.zeros(0).int(), torch.zeros(added).int())
    real = kernel.wrapper.workspace_size(*arrays, *heads, 16, **TYPES)
    facts, version = facts_and_version(device)
    said = prefill_need(AttentionSpec(*heads), batch, tokens, "fa2", facts, version)
    assert all(map(close, said, real)), (said, real)


@pytest.mark.gpu
@given(**{**SHAPES, "batch": st.sampled_from([1, 2, 16])}, seed=st.integers(0, 9))
def test_eager_plans_never_reserve_more_than_is_said(
    device, kv_heads, group, head_dim, batch, seed
):
    gen = torch.Generator().manual_seed(seed)
    heads = (kv_heads * group, kv_heads, head_dim)
    said = eager_float_bytes(AttentionSpec(*heads), DeviceFacts.of(on_gpu(device)))
    floats = torch.zeros(said, dtype=torch.uint8, device=device)
    wrapper = FlashInferPrefillWrapper(floats, *heads, 16, device=device, backend="fa2")
    pages = torch.randint(1, 300, (batch,), generator=gen)
    queries = torch.randint(1, 100, (batch,), generator=gen)
    zero = torch.zeros(1, dtype=torch.int64)
    indptr, qo_indptr = (torch.cat([zero, x.cumsum(0)]).int() for x in (pages, queries))
    wrapper.plan(qo_indptr, indptr, torch.zeros(int(pages.sum())).int(), torch.ones(batch).int())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 8192])
def test_the_integer_workspace_of_a_graph_wrapper_never_grows(device, tokens):
    kernels = ["fa2", "fa3"] if has_fa3(on_gpu(device), 64) else ["fa2"]
    for kernel in kernels:
        floats = Workspace(torch.zeros(1 << 20, dtype=torch.uint8, device=device), "test")
        graph = {"accelerator_graph": True, "backend": kernel}
        wrapper = FlashInferPrefillWrapper(
            floats, 32, 8, 64, 16, 8, tokens, tokens, device, **graph
        )
        said = wrapper._kernel(kernel).wrapper._int_workspace_buffer.numel()
        for lens in ([tokens], [tokens // 8] * 8, [1, tokens - 1], [0, 3]):
            qo_indptr = torch.tensor([0, *lens]).cumsum(0).int()
            pages = -(-torch.tensor(lens) // 16)
            indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
            last_page_len = torch.where(pages > 0, torch.tensor(lens) - 16 * (pages - 1), 0).int()
            ids = torch.zeros(int(indptr[-1]), dtype=torch.int32)
            wrapper.plan(qo_indptr, indptr, ids, last_page_len)
        assert wrapper._kernel(kernel).wrapper._int_workspace_buffer.numel() == said

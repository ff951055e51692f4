"""Workspaces: sizes, growth under their users, sealing, and errors that say what to set."""

import gc
import weakref

import pytest
import torch
from flashinfer_cases import HEADS, PAGE_SIZE, assert_right, flashinfer, make_step  # noqa: F401

from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferPrefillWrapper,
    Workspace,
    WorkspacePool,
    WorkspaceTooSmall,
    workspace_bytes,
)
from pagedattn.backends.flashinfer.overflow import read_overflow
from pagedattn.backends.flashinfer.workspace import overlap

MB = 1024 * 1024
SIZES = (*HEADS.values(), PAGE_SIZE)


def complaint(piece: str, size: int, left: int) -> RuntimeError:
    return RuntimeError(
        f"Error in function 'aligned_alloc': Buffer overflow when allocating memory for {piece} "
        f"with size {size} and alignment 16, but only {left} bytes available in AlignedAllocator. "
        "Increase the workspace buffer size."
    )


def reserving(tensor: torch.Tensor, pieces: dict[str, int]):
    """A plan that reserves pieces one after the other, as FlashInfer does."""

    def plan() -> int:
        taken = 0
        for name, size in pieces.items():
            taken = -(-taken // 16) * 16
            if taken + size > tensor.numel():
                raise complaint(name, size, tensor.numel() - taken)
            taken += size
        return taken

    return plan


PIECES = {"batch_prefill_tmp_v": 4096, "batch_prefill_tmp_s": 128}


def test_growth_takes_what_was_taken_plus_what_failed_as_often_as_needed():
    tensor = torch.zeros(64, dtype=torch.uint8)
    workspace = Workspace(tensor, "here")
    assert workspace.plan(reserving(tensor, PIECES)) == 4096 + 128
    assert workspace.tensor is tensor
    assert tensor.numel() == 4096 + 128


def test_workspaces_overlap_where_they_have_a_byte_in_common():
    memory = torch.zeros(64, dtype=torch.uint8)
    assert overlap(memory, memory.view(64))
    empty = memory[:0]
    assert overlap(empty, empty)  # and so they do once it has grown
    assert overlap(memory[:33], memory[32:])
    assert overlap(memory[32:], memory[:33])
    assert not overlap(memory[:32], memory[32:])
    assert not overlap(memory[32:], memory[:32])


def test_arguments_and_results_pass_through():
    workspace = Workspace(torch.zeros(64, dtype=torch.uint8), "here")
    assert workspace.plan(lambda *a, **k: (a, k), 1, 2, x=3) == ((1, 2), {"x": 3})


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("Buffer overflow"), KeyError(1)])
def test_other_exceptions_pass_through_untouched(error):
    def plan() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        Workspace(torch.zeros(64, dtype=torch.uint8), "here").plan(plan)
    assert caught.value is error


def test_replaced_memory_lives_as_long_as_the_workspace():
    tensor = torch.zeros(64, dtype=torch.uint8)
    view = tensor[:64]  # as a captured kernel's pointer would
    view.fill_(7)
    address = view.data_ptr()
    workspace = Workspace(tensor, "here")
    workspace.plan(reserving(tensor, PIECES))
    del view
    gc.collect()
    assert workspace.num_outgrown_bytes == 64 + 4096  # two pieces, so it grew twice
    others = [torch.zeros(64, dtype=torch.uint8) for _ in range(100)]
    assert address not in {other.data_ptr() for other in others}


def test_a_sealed_workspace_names_itself_the_sizes_and_the_setting():
    tensor = torch.zeros(64, dtype=torch.uint8)
    workspace = Workspace(tensor, "decode of layer kind 2", floor="MY_MB")
    workspace.seal()
    with pytest.raises(WorkspaceTooSmall) as caught:
        workspace.plan(reserving(tensor, PIECES))
    for part in ("decode of layer kind 2", "4096", "64", "MY_MB=1"):
        assert part in str(caught.value)
    assert tensor.numel() == 64


def test_a_sealed_workspace_with_room_plans():
    tensor = torch.zeros(8192, dtype=torch.uint8)
    assert Workspace(tensor, "here", sealed=True).plan(reserving(tensor, PIECES)) == 4224


def test_the_integer_workspace_is_named_as_such_and_grows_nothing():
    tensor = torch.zeros(64, dtype=torch.uint8)

    def plan() -> None:
        raise complaint("batch_prefill_request_indices", 4096, 8)

    with pytest.raises(WorkspaceTooSmall, match="integer workspace"):
        Workspace(tensor, "here").plan(plan)
    assert tensor.numel() == 64


@pytest.mark.gpu
def test_growth_in_a_capture_raises_and_names_it(device):
    if device.type != "cuda":
        pytest.skip("captures a CUDA graph")
    tensor = torch.zeros(64, dtype=torch.uint8, device=device)
    workspace = Workspace(tensor, "here")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(WorkspaceTooSmall, match="capture"):
            workspace.plan(reserving(tensor, PIECES))
        tensor.zero_()  # a graph of nothing is refused
    assert tensor.numel() == 64


def test_wrappers_on_one_workspace_move_with_it(device):
    workspace = Workspace(torch.zeros(4096, dtype=torch.uint8, device=device), "shared")
    decode = FlashInferDecodeWrapper(workspace, *SIZES, device=device)
    prefill = FlashInferPrefillWrapper(workspace, *SIZES, device=device)
    small = make_step(device, [9, 5])
    decode.plan(*small.kv_arrays)
    long = make_step(device, [200] + [9] * 3, [5] * 4, max_pages=128)
    prefill.plan(long.qo_indptr, *long.kv_arrays)
    assert_right(prefill.run(long.q, long.kv_cache), None, long)
    assert_right(decode.run(small.q, small.kv_cache), None, small)


def test_a_plan_that_fails_leaves_no_plan_and_a_grown_one_works(device):
    tensor = torch.zeros(64, dtype=torch.uint8, device=device)
    wrapper = FlashInferPrefillWrapper(tensor, *SIZES, device=device)
    step = make_step(device, [200] + [9] * 3, [5] * 4, max_pages=128)
    with pytest.raises(RuntimeError, match="batch_prefill_tmp_v"):
        wrapper.plan(step.qo_indptr, *step.kv_arrays)
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper.run(step.q, step.kv_cache)
    Workspace(tensor, "its own").plan(wrapper.plan, step.qo_indptr, *step.kv_arrays)
    assert_right(wrapper.run(step.q, step.kv_cache), None, step)


def test_a_small_integer_workspace_is_replaced(device):
    tensor = torch.zeros(64 * MB if device.type == "cuda" else MB, dtype=torch.uint8, device=device)
    wrapper = FlashInferPrefillWrapper(tensor, *SIZES, device=device)
    step = make_step(device, [9, 9], [8, 5])
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    kernel = next(iter(wrapper._kernels.values()))
    tiny = torch.zeros(16, dtype=torch.uint8, device=device)
    kernel.wrapper.reset_workspace_buffer(tensor, tiny)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    assert_right(wrapper.run(step.q, step.kv_cache), None, step)


def test_a_pool_has_one_workspace_a_key_and_seals_all():
    pool = WorkspacePool("cpu", size_mb=0.001, owner="model")
    first = pool.get("decode", cg_slot=3)
    assert pool.get("decode", 3) is first
    others = [pool.get("decode"), pool.get("prefill", 3), pool.get("decode", 4)]
    assert len({id(w) for w in [first, *others]}) == 4
    pool.seal()
    assert all(w.sealed for w in [first, *others, pool.get("later")])
    assert "model" in first.name
    assert "decode" in first.name


def test_a_pool_does_not_keep_others_alive():
    pool = WorkspacePool("cpu", size_mb=0.001)
    tensor = weakref.ref(pool.get("decode").tensor)
    del pool
    gc.collect()
    assert tensor() is None


def test_the_size_is_what_is_declared_then_the_environment_then_the_default(monkeypatch):
    for name in ("PAGEDATTN_WORKSPACE_BUFFER_MB", "MSTAR_WORKSPACE_BUFFER_MB"):
        monkeypatch.delenv(name, raising=False)
    assert workspace_bytes() == 512 * MB
    monkeypatch.setenv("MSTAR_WORKSPACE_BUFFER_MB", "100")
    assert workspace_bytes() == 100 * MB
    monkeypatch.setenv("PAGEDATTN_WORKSPACE_BUFFER_MB", "200")
    assert workspace_bytes() == 200 * MB
    assert workspace_bytes(3) == 3 * MB


@pytest.mark.parametrize("value", ["", "much", "-1", "0", "nan", "inf"])
@pytest.mark.parametrize("name", ["PAGEDATTN_WORKSPACE_BUFFER_MB", "MSTAR_WORKSPACE_BUFFER_MB"])
def test_a_nonsensical_size_names_its_variable(monkeypatch, name, value):
    monkeypatch.delenv("PAGEDATTN_WORKSPACE_BUFFER_MB", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        workspace_bytes()


def test_a_nonsensical_declaration_raises():
    with pytest.raises(ValueError, match="declared_mb"):
        workspace_bytes(-5)


def test_only_flashinfers_complaint_is_read():
    assert read_overflow(RuntimeError("CUDA out of memory")) is None
    overflow = read_overflow(complaint("batch_decode_tmp_s", 10, 5))
    assert (overflow.size, overflow.left, overflow.is_integer) == (10, 5, False)

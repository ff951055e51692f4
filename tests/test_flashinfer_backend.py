"""`FlashInferBackend` behind the facade's protocol, eager and with a capacity."""

import pytest
import torch
from flashinfer_cases import HEADS, PAGE_SIZE, Step, assert_right, flashinfer, make_step  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, PageTable, unsupported_reasons, write_slots
from pagedattn.backends.flashinfer.backend import FlashInferBackend, _GraphWrapper
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.kernel_choice import graph_prefill_kernel, prefill_kernel
from pagedattn.backends.flashinfer.need import CapacityNeeds, WorkspaceNeed

SPEC = AttentionSpec(**HEADS)
ONE_TOKEN = torch.tensor([0, 1], dtype=torch.int32)
CAPACITIES = {
    "eager": None,
    "few tokens a row": Capacity(max_batch_size=6, max_tokens=30, max_pages=64),
    "prompts": Capacity(max_batch_size=6, max_tokens=60, max_pages=64),
}


def run(backend: FlashInferBackend, step: Step, rows: int | None):
    """Plan and run as the facade does, with poisoned outputs."""
    backend.plan(step.table, step.qo_indptr.numpy())
    rows = step.q.shape[0] if rows is None else rows
    q = torch.full((rows, *step.q.shape[1:]), 0.5, dtype=step.q.dtype, device=step.q.device)
    q[: step.q.shape[0]] = step.q
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    if rows:
        backend.run(q, step.kv_cache, out, lse)
    return out, lse


@st.composite
def steps(draw) -> tuple[list[int], list[int], int]:
    """At most 6 requests, 30 tokens and 60 pages, one-token rows most often; shrinks to none."""
    rows = draw(
        st.lists(st.tuples(st.integers(0, 36), st.sampled_from([1, 0, 1, 2, 5])), max_size=6)
    )
    return [kv for kv, _ in rows], [qo for _, qo in rows], draw(st.integers(0, 3))


@pytest.mark.parametrize("name", CAPACITIES)
@given(batches=st.lists(steps(), min_size=1, max_size=3))
def test_every_step_is_right_one_after_the_other(device, name, batches):
    capacity = CAPACITIES[name]
    backend = FlashInferBackend(SPEC, PAGE_SIZE, device, capacity)
    for kv_lens, qo_lens, seed in batches:
        step = make_step(device, kv_lens, qo_lens, seed=seed)
        step.kv_cache[0] = torch.nan  # the facade knows no sink page
        out, lse = run(backend, step, None if capacity is None else capacity.max_tokens)
        assert_right(out, lse, step)
        assert torch.isfinite(out).all()
        right = write_slots(step.table, step.qo_indptr)
        assert torch.equal(backend.write_slots[: len(right)].cpu(), right)
        assert bool((backend.write_slots[len(right) :] == -1).all())


@pytest.mark.parametrize(  # window and cap apart: each combination is minutes of compiling
    "mask", [{"window_left": 2, "sm_scale": 0.4}, {"logits_soft_cap": 2.0}], ids=str
)
@pytest.mark.parametrize("name", CAPACITIES)
def test_the_spec_reaches_the_kernels(device, name, mask):
    capacity = CAPACITIES[name]
    backend = FlashInferBackend(AttentionSpec(**HEADS, **mask), PAGE_SIZE, device, capacity)
    for lens in ([9, 17, 30], [1, 1, 1]), ([9, 17, 30], [4, 1, 16]):
        step = make_step(device, *lens)
        out, lse = run(backend, step, None if capacity is None else capacity.max_tokens)
        assert_right(out, lse, step, **mask)


@pytest.mark.parametrize("name", ["few tokens a row", "prompts"])
def test_each_half_gets_the_workspace_that_it_needs(device, name):
    capacity = CAPACITIES[name]
    decode, prefill = WorkspaceNeed(5000, 64), WorkspaceNeed(70000, 64)
    needs = CapacityNeeds(decode if name == "prompts" else None, prefill)
    shape = (*HEADS.values(), PAGE_SIZE)
    wrappers = _GraphWrapper(shape, device, capacity, SPEC, needs)
    sizes = [need.float_bytes for need in needs if need is not None]
    assert [workspace.num_bytes for workspace in wrappers.workspaces] == sizes
    wrapper = wrappers.of(HostStep.of_table(PageTable.from_lengths([1], PAGE_SIZE), ONE_TOKEN))
    halves = [wrapper._decode, wrapper._prefill] if name == "prompts" else [wrapper]
    assert [half.float_workspace.numel() for half in halves] == sizes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["few tokens a row", "prompts"])
def test_no_workspace_of_a_capacity_grows(device, name):
    if device.type != "cuda":
        pytest.skip("the needs are those of FlashInfer's planners on a GPU")
    capacity = CAPACITIES[name]
    backend = FlashInferBackend(SPEC, PAGE_SIZE, device, capacity)
    for lens in ([9, 17, 30], [1, 1, 1]), ([9, 17, 30], [4, 1, 16]), ([40], [30]):
        run(backend, make_step(device, *lens), capacity.max_tokens)
    assert all(workspace.num_outgrown_bytes == 0 for workspace in backend.workspaces)


def test_a_strided_output_is_written(device):
    backend = FlashInferBackend(SPEC, PAGE_SIZE, device, None)
    step = make_step(device, [9, 17, 30], [4, 1, 16])
    backend.plan(step.table, step.qo_indptr.numpy())
    wide = torch.full((21, 7, HEADS["head_dim"]), torch.nan, dtype=step.q.dtype, device=device)
    backend.run(step.q, step.kv_cache, wide[:, 1:5], None)
    assert_right(wide[:, 1:5].contiguous(), None, step)
    assert bool(wide[:, [0, 5, 6]].isnan().all())


def test_a_cpu_is_refused_without_importing_flashinfer(monkeypatch):
    from pagedattn.backends.flashinfer import backend

    def fail() -> None:
        raise AssertionError("imported FlashInfer for a CPU")

    monkeypatch.setattr(backend, "load_flashinfer", fail)
    spec = AttentionSpec(**HEADS, dtype=torch.float32)
    reasons = FlashInferBackend.unsupported_reasons(spec, PAGE_SIZE, torch.device("cpu"))
    assert reasons[0] == "needs an NVIDIA GPU, got device cpu"
    assert "float32" in reasons[1]


@pytest.mark.gpu
def test_all_reasons_are_given_at_once(device):
    if device.type != "cuda":
        pytest.skip("FlashInfer is imported on a GPU only")
    spec = AttentionSpec(4, 2, 100, dtype=torch.float32)
    reasons = unsupported_reasons("flashinfer", spec, PAGE_SIZE, device)
    assert any("float32" in r for r in reasons)
    assert any("head_dim=100" in r for r in reasons)
    assert not unsupported_reasons("flashinfer", SPEC, PAGE_SIZE, device)


def test_the_hopper_kernel_is_for_long_rows_only():
    assert prefill_kernel(8192, 1, fa3=True) == "fa3"
    assert prefill_kernel(64, 64, fa3=True) == "fa2"
    assert prefill_kernel(8192, 1, fa3=False) == "fa2"
    assert prefill_kernel(8192, 1, fa3=True, window_left=3) == "fa2"
    assert graph_prefill_kernel(8192, 64, fa3=True) == "fa3"
    assert graph_prefill_kernel(64 * 4, 64, fa3=True) == "fa2"
    assert graph_prefill_kernel(8192, 64, fa3=False) == "fa2"

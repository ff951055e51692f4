"""FlashInfer's known wrong answers: shown where a version has them, and right through ours."""

import pytest
import torch
from attention_steps import batch_of
from flashinfer_cases import (  # noqa: F401
    HEADS,
    PAGE_SIZE,
    assert_right,
    flashinfer,
    make_step,
    right_answer,
    workspace,
)

from pagedattn import AttentionSpec, PagedAttention
from pagedattn.backends.flashinfer import FlashInferPrefillWrapper
from pagedattn.backends.flashinfer.defects import (
    DEFECTS,
    FA2_WINDOW_WITHOUT_MASK,
    FA3_ROWS_WITHOUT_KEYS,
    Call,
)
from pagedattn.backends.flashinfer.kernel_choice import has_fa3
from pagedattn.backends.flashinfer.library import flashinfer_version


def on_hopper(device: torch.device) -> torch.device:
    if not has_fa3(device, HEADS["head_dim"]):
        pytest.skip("needs a GPU of compute capability 9.0")
    return device


def call_flashinfer(library, step, kernel: str, **mask) -> torch.Tensor:
    """FlashInfer itself, with nothing of ours around it."""
    floats = torch.zeros(128 * 1024 * 1024, dtype=torch.uint8, device=step.q.device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(floats, backend=kernel)
    sizes = (*HEADS.values(), step.table.page_size)
    types = {"q_data_type": step.q.dtype, "kv_data_type": step.q.dtype}
    wrapper.plan(step.qo_indptr, *step.kv_arrays, *sizes, **mask, **types)
    return wrapper.run(step.q, step.kv_cache)


WINDOW = {"causal": False, "window_left": 333}


def window_step(device: torch.device):
    return make_step(device, [4096], [300], max_pages=300, page_size=16)


@pytest.mark.gpu
def test_fa2_is_wrong_for_a_window_without_a_mask(device, flashinfer):  # noqa: F811
    step = window_step(on_hopper(device))
    if not FA2_WINDOW_WITHOUT_MASK.hits(Call(flashinfer_version(flashinfer), "fa2", False, 333)):
        pytest.skip("this version is right")
    out = call_flashinfer(flashinfer, step, "fa2", **WINDOW)
    right, _ = right_answer(step, **WINDOW)
    assert (out.double() - right).abs().max() > 0.1


@pytest.mark.gpu
def test_ours_is_right_for_a_window_without_a_mask(device):
    step = window_step(on_hopper(device))
    spec = AttentionSpec(**HEADS, **WINDOW)
    attn = PagedAttention(spec, 16, backend="flashinfer", device=device)
    attn.plan(step.table, step.qo_indptr)
    assert_right(*attn.run_return_lse(step.q, step.kv_cache), step, **WINDOW)


@pytest.mark.gpu
def test_fa3_lets_nan_through_for_a_window_without_a_mask(device, flashinfer):  # noqa: F811
    spec = AttentionSpec(2, 1, 64, causal=False, window_left=1)
    batch = batch_of(spec, 16, (17, 70, 100), (1, 33, 1), values="loud_key")
    step = batch.materialise(on_hopper(device))
    table = step.page_table
    floats = torch.zeros(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, backend="fa3")
    arrays = (step.qo_indptr, table.kv_indptr, table.kv_indices, table.last_page_len)
    types = {"q_data_type": spec.dtype, "kv_data_type": spec.dtype}
    wrapper.plan(*arrays, 2, 1, 64, 16, causal=False, window_left=1, **types)
    assert bool(wrapper.run(step.q, step.kv_cache).isnan().any())


@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 65])
def test_ours_reads_no_unused_slot_for_a_window_without_a_mask(device, window_left):
    step = make_step(device, [17, 70, 100], [1, 33, 1], page_size=16)
    wrapper = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), 16, device=device)
    mask = {"causal": False, "window_left": window_left}
    wrapper.plan(step.qo_indptr, *step.kv_arrays, **mask)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step, **mask)


def test_what_would_be_wrong_is_refused_for_a_window_without_a_mask(device):
    step = make_step(device, [9], [3])
    sizes = (workspace(device), *HEADS.values(), PAGE_SIZE)
    mask = {"causal": False, "window_left": 3}
    fa3 = FlashInferPrefillWrapper(*sizes, device=device, backend="fa3")
    with pytest.raises(ValueError, match="use fa2"):
        fa3.plan(step.qo_indptr, *step.kv_arrays, **mask)
    fa2 = FlashInferPrefillWrapper(*sizes, device=device)
    with pytest.raises(ValueError, match="4972"):
        fa2.plan(step.qo_indptr, *step.kv_arrays, **mask, disable_split_kv=False)


@pytest.mark.gpu
def test_fa3_leaves_rows_without_keys_on_affected_versions(device, flashinfer):  # noqa: F811
    step = make_step(on_hopper(device), [17], [40], page_size=16)
    if not FA3_ROWS_WITHOUT_KEYS.hits(Call(flashinfer_version(flashinfer), "fa3", True, -1)):
        pytest.skip("this version is right")
    out = call_flashinfer(flashinfer, step, "fa3", causal=True)
    assert not bool((out[:23] == 0).all())


@pytest.mark.parametrize("kv_lens", [[17], [17, 0, 60]])
def test_ours_gives_zeros_to_rows_without_keys(device, kv_lens):
    kernel = "fa3" if has_fa3(device, HEADS["head_dim"]) else "fa2"
    floats = workspace(device)
    wrapper = FlashInferPrefillWrapper(
        floats, *HEADS.values(), PAGE_SIZE, device=device, backend=kernel
    )
    step = make_step(device, kv_lens, [40] * len(kv_lens))
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step)


def test_rows_without_keys_are_cleared_where_a_version_needs_it(device, monkeypatch, flashinfer):  # noqa: F811
    """On a CPU: a kernel that leaves garbage in those rows is put right."""
    if device.type == "cuda":
        pytest.skip("the real kernel is tested above")
    monkeypatch.setattr(flashinfer, "__version__", "0.6.18.post1")
    attend = flashinfer.BatchPrefillWithPagedKVCacheWrapper._attend

    def garbage(self, q, paged_kv_cache, qo_bounds, causal, out, lse):
        attend(self, q, paged_kv_cache, qo_bounds, causal, out, lse)
        out[:23] = torch.nan
        if lse is not None:
            lse[:23] = 3.0

    monkeypatch.setattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "_attend", garbage)
    floats = workspace(device)
    wrapper = FlashInferPrefillWrapper(
        floats, *HEADS.values(), PAGE_SIZE, device=device, backend="fa3"
    )
    step = make_step(device, [17], [40])
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step)


def test_every_defect_says_what_is_done_and_where_it_is_reported():
    for defect in DEFECTS:
        assert defect.name
        assert defect.instead
        assert defect.report


def test_a_defect_ends_with_the_first_right_version():
    call = Call((0, 6, 18), "fa3", causal=True, window_left=-1)
    assert FA3_ROWS_WITHOUT_KEYS.hits(call)
    assert not FA3_ROWS_WITHOUT_KEYS.hits(Call((0, 7, 4), "fa3", causal=True, window_left=-1))
    assert not FA3_ROWS_WITHOUT_KEYS.hits(Call((0, 6, 18), "fa2", causal=True, window_left=-1))

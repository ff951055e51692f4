"""FlashInfer's known wrong answers: shown where a version has them, and right through ours."""

import math
import warnings
from itertools import accumulate

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    HEADS,
    PAGE_SIZE,
    TOKENS,
    assert_right,
    flashinfer,
    graph_prefill,
    make_step,
    padded_query,
    right_answer,
    workspace,
)
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, PagedAttention, PageTable
from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferPrefillWrapper,
    KnownDefectWarning,
)
from pagedattn.backends.flashinfer.defects import (
    DEFECTS,
    EMPTY_WARPS,
    FA2_LOW_SCORES,
    FA2_WINDOW_WITHOUT_MASK,
    FA3_ROWS_WITHOUT_KEYS,
    FINITE_INFINITY,
    LSE_WITHOUT_KEYS,
    Call,
    warn_of_defects,
)
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.kernel_choice import has_fa3
from pagedattn.backends.flashinfer.library import flashinfer_version
from pagedattn.backends.flashinfer.prefill_step import separate_rows_without_keys


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


def step_left_of_a_window(device: torch.device):
    """665 keys, 615 queries, window 49: the first key is seen by none, and NaN."""
    step = make_step(device, [665], [615], page_size=16)
    step.kv_cache[step.table.kv_indices[0], :, 0] = torch.nan
    return step


@pytest.mark.gpu
def test_fa3_lets_nan_through_from_the_left_of_a_window(device, flashinfer):  # noqa: F811
    step = step_left_of_a_window(on_hopper(device))
    out = call_flashinfer(flashinfer, step, "fa3", causal=True, window_left=49)
    assert bool(out.isnan().any())


def test_ours_reads_nothing_left_of_a_window(device):
    step = step_left_of_a_window(device)
    wrapper = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), 16, device=device)
    mask = {"causal": True, "window_left": 49}
    wrapper.plan(step.qo_indptr, *step.kv_arrays, **mask)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step, **mask)


@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 65])
def test_ours_reads_no_unused_slot_for_a_window_without_a_mask(device, window_left):
    step = make_step(device, [17, 70, 100], [1, 33, 1], page_size=16)
    wrapper = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), 16, device=device)
    mask = {"causal": False, "window_left": window_left}
    wrapper.plan(step.qo_indptr, *step.kv_arrays, **mask)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step, **mask)


@pytest.mark.parametrize("window_left", [0, 3, 40])
def test_a_graph_is_right_for_a_window_without_a_mask(device, window_left):
    """Its grid is that of the largest step: what a schedule does not fill must do no harm."""
    mask = {"causal": False, "window_left": window_left}
    wrapper = graph_prefill(device, "fa2")
    lens = [([9, 17, 4, 8], [4, 2, 4, 6]), ([60], [1]), ([], []), ([0, 50], [3, 9])]
    for kv_lens, qo_lens in lens:
        step = make_step(device, kv_lens, qo_lens)
        wrapper.plan(step.qo_indptr, *step.kv_arrays, **mask)
        out, lse = wrapper.run_return_lse(padded_query(step, TOKENS), step.kv_cache)
        assert_right(out, lse, step, **mask)
        for buffer in wrapper._step.kernel._schedules._buffers.values():
            buffer.fill_(0x7F)  # the worst that a former schedule or owner can have left


@pytest.mark.parametrize("causal", [True, False])
def test_fa3_is_refused_for_a_window(device, causal):
    step = make_step(device, [9], [3])
    fa3 = FlashInferPrefillWrapper(
        workspace(device), *HEADS.values(), PAGE_SIZE, device=device, backend="fa3"
    )
    with pytest.raises(ValueError, match=r"window_left=3: use fa2"):
        fa3.plan(step.qo_indptr, *step.kv_arrays, causal=causal, window_left=3)


def test_a_wrong_split_is_refused_for_a_window_without_a_mask(device):
    step = make_step(device, [9], [3])
    fa2 = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), PAGE_SIZE, device=device)
    mask = {"causal": False, "window_left": 3}
    with pytest.raises(ValueError, match="4972"):
        fa2.plan(step.qo_indptr, *step.kv_arrays, **mask, disable_split_kv=False)


MORE_QUERIES_THAN_KEYS = [([17], [40]), ([64], [65]), ([130, 3, 0, 300], [200, 9, 4, 301])]


@pytest.mark.gpu
def test_fa2_unmasks_keys_where_queries_outnumber_a_tile_of_them(device, flashinfer):  # noqa: F811
    step = make_step(on_hopper(device), [300], [301], page_size=16)
    out = call_flashinfer(flashinfer, step, "fa2", causal=True)
    assert not bool((out[0] == 0).all())


@pytest.mark.gpu
def test_fa3_leaves_rows_without_keys_on_affected_versions(device, flashinfer):  # noqa: F811
    step = make_step(on_hopper(device), [17], [40], page_size=16)
    if not FA3_ROWS_WITHOUT_KEYS.hits(Call(flashinfer_version(flashinfer), "fa3", True, -1)):
        pytest.skip("this version is right")
    out = call_flashinfer(flashinfer, step, "fa3", causal=True)
    assert not bool((out[:23] == 0).all())


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize(("kv_lens", "qo_lens"), MORE_QUERIES_THAN_KEYS)
def test_ours_is_right_where_queries_outnumber_keys(device, kernel, kv_lens, qo_lens):
    if kernel == "fa3":
        on_hopper(device)
    wrapper = FlashInferPrefillWrapper(
        workspace(device), *HEADS.values(), PAGE_SIZE, device=device, backend=kernel
    )
    step = make_step(device, kv_lens, qo_lens, max_pages=200)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step)


def test_a_graph_needs_room_for_queries_without_keys(device):
    """They are requests of their own: the message says which size to raise."""
    sizes = {"batch_size": 2, "max_total_tokens": 24, "max_num_pages": 16}
    wrapper = FlashInferPrefillWrapper(
        workspace(device),
        *HEADS.values(),
        PAGE_SIZE,
        device=device,
        accelerator_graph=True,
        **sizes,
    )
    crowded = make_step(device, [18, 3], [19, 3])
    with pytest.raises(ValueError, match=r"1 requests have more queries than keys.*to 3, got 2"):
        wrapper.plan(crowded.qo_indptr, *crowded.kv_arrays)
    for kv_lens, qo_lens in (([18], [19]), ([15, 3], [18, 4])):
        step = make_step(device, kv_lens, qo_lens)
        wrapper.plan(step.qo_indptr, *step.kv_arrays)
        assert_right(wrapper.run(padded_query(step, 24), step.kv_cache), None, step)


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    min_keys=st.integers(1, 5),
)
def test_separated_rows_keep_every_token_and_every_page(rows, min_keys):
    """Request by request: queries without keys, then as many queries as there are keys at most."""
    qo_lens, kv_lens = [q for _, q in rows], [kv for kv, _ in rows]
    table = PageTable.from_lengths(kv_lens, 2)
    qo_indptr = torch.tensor([0, *qo_lens], dtype=torch.int32).cumsum(0).int()
    separated = separate_rows_without_keys(HostStep.of_table(table, qo_indptr.numpy()), min_keys)
    expected = []
    for kv_len, qo_len in rows:
        if min_keys <= kv_len < qo_len:
            expected += [(qo_len - kv_len, 0), (kv_len, kv_len)]
        else:
            expected.append((qo_len, kv_len))
    got = zip(separated.qo_lens.tolist(), separated.kv_lens.tolist(), strict=True)
    assert list(got) == expected
    assert separated.kv_indices.tolist() == table.kv_indices.tolist()
    num_pages = [-(-kv_len // 2) for _, kv_len in expected]
    assert separated.kv_indptr.tolist() == [0, *accumulate(num_pages)]
    last = [kv_len - 2 * max(-(-kv_len // 2) - 1, 0) for _, kv_len in expected]
    assert separated.last_page_len.tolist() == last


@pytest.mark.gpu
def test_the_lse_without_keys_is_finite_on_affected_versions(device, flashinfer):  # noqa: F811
    step = make_step(device, [0, 5], [2, 5])
    version = flashinfer_version(flashinfer)
    if not LSE_WITHOUT_KEYS.hits(Call(version, "fa2", True, -1)):
        pytest.skip("this version is right")
    wrapper = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), PAGE_SIZE, device=device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    (kernel,) = wrapper._kernels.values()
    lse = torch.empty(step.q.shape[:2], device=device)
    kernel.wrapper.run(step.q, step.kv_cache, lse=lse, return_lse=True)
    assert bool(((lse[:2] - FINITE_INFINITY).abs() < EMPTY_WARPS).all())


def test_ours_gives_minus_infinity_without_keys(device, monkeypatch, flashinfer):  # noqa: F811
    """On a CPU the stand-in acts as an affected version."""
    if device.type == "cpu":
        monkeypatch.setattr(flashinfer, "__version__", "0.6.18.post1")
        attend = flashinfer.BatchPrefillWithPagedKVCacheWrapper._run_module

        def finite(self, *arguments):
            attend(self, *arguments)
            arguments[-1].nan_to_num_(neginf=FINITE_INFINITY + math.log2(5))

        monkeypatch.setattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "_run_module", finite)
    step = make_step(device, [0, 5, 3], [2, 5, 6])
    wrapper = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), PAGE_SIZE, device=device)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    assert_right(*wrapper.run_return_lse(step.q, step.kv_cache), step)


@pytest.mark.gpu
def test_fa2_takes_low_scores_for_none_on_affected_versions(device, flashinfer):  # noqa: F811
    step = make_step(device, [9], [1])
    if not FA2_LOW_SCORES.hits(Call(flashinfer_version(flashinfer), "fa2", True, -1)):
        pytest.skip("this version is right")
    step.q.fill_(40)
    step.kv_cache[:, 0] = -40  # scores of -102400, all the same
    out = call_flashinfer(flashinfer, step, "fa2", causal=True)
    right, _ = right_answer(step)
    assert (out.double() - right).abs().max() > 0.1


def test_a_kernel_with_a_defect_that_nothing_is_done_about_warns(device, flashinfer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(flashinfer, "__version__", "0.6.18")
    step = make_step(device, [9, 5], [4, 1])
    wrapper = FlashInferPrefillWrapper(workspace(device), *HEADS.values(), PAGE_SIZE, device=device)
    with pytest.warns(KnownDefectWarning, match=r"0\.6\.18.*-50000.*need 0\.7\.4"):
        wrapper.plan(step.qo_indptr, *step.kv_arrays)


def test_a_version_can_be_refused_for_it(device, flashinfer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(flashinfer, "__version__", "0.6.18")
    step = make_step(device, [9, 5])
    decode = FlashInferDecodeWrapper(workspace(device), *HEADS.values(), PAGE_SIZE, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KnownDefectWarning)
        for _ in range(2):
            with pytest.raises(KnownDefectWarning):
                decode.plan(*step.kv_arrays)
    with pytest.raises(RuntimeError, match="there is no plan"):
        decode.run(step.q, step.kv_cache)


@pytest.mark.parametrize(("kernel", "version"), [("fa2", (0, 7, 4)), ("fa3", (0, 6, 18))])
def test_other_kernels_and_versions_do_not_warn(kernel, version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_defects(kernel, version)


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

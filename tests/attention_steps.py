"""Steps for tests: written out by hand, or drawn within what a backend supports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from pagedattn import AttentionSpec, PagedAttention, unsupported_reasons
from pagedattn.attention import AttentionOutput
from pagedattn.backends.flashinfer.defects import FA2_LOW_SCORES, Call
from pagedattn.backends.flashinfer.library import flashinfer_version, load_flashinfer
from pagedattn.checking.batch import Batch
from pagedattn.checking.bound import Bound
from pagedattn.checking.compare import check_backend, compare
from pagedattn.checking.drawing import (
    HEAD_DIMS,
    RandomChoices,
    SpecLimits,
    draw_page_size,
    draw_spec,
)
from pagedattn.checking.step import Step
from pagedattn.testing import batches, page_sizes, specs


def batch_of(
    spec: AttentionSpec,
    page_size: int,
    kv_lens: Sequence[int],
    qo_lens: Sequence[int],
    *,
    values: str = "normal",
    garbage: str = "nan",
    seed: int = 0,
) -> Batch:
    """A batch whose pages go from the top of its pool downwards, three at the bottom unowned."""
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    top = sum(counts) + 3
    pages = []
    for count in counts:
        pages.append(tuple(range(top - 1, top - 1 - count, -1)))
        top -= count
    num_pages = sum(counts) + 3
    lens = tuple(kv_lens), tuple(qo_lens)
    return Batch(spec, page_size, num_pages, *lens, tuple(pages), values, garbage, seed)


def half(backend: str) -> torch.dtype:
    """The 16-bit dtype that tests use with this backend.

    float16 has the sharper bound. FlashInfer compiles a family of kernels for minutes for each
    dtype, head size and option, so all its tests share one dtype.
    """
    return torch.bfloat16 if backend == "flashinfer" else torch.float16


def require_support(
    backend: str, spec: AttentionSpec, page_size: int, device: torch.device
) -> None:
    """Skip the test where the backend cannot compute this here, and say why."""
    reasons = unsupported_reasons(backend, spec, page_size, device)
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")


def require_low_scores(backend: str) -> None:
    """Skip the test where FlashInfer cannot compute scores that are all below -5e4."""
    if _lacks_low_scores(backend):
        pytest.skip(f"flashinfer: {FA2_LOW_SCORES.name}: {FA2_LOW_SCORES.instead}")


def _lacks_low_scores(backend: str) -> bool:
    if backend != "flashinfer":
        return False
    version = flashinfer_version(load_flashinfer())
    return FA2_LOW_SCORES.hits(Call(version, "fa2", causal=True, window_left=-1))


def assert_agrees(backend: str, batch: Batch, device: torch.device) -> None:
    """The backend is within the derived bound of float64 on this batch."""
    require_support(backend, batch.spec, batch.page_size, device)
    if batch.values == "low_scores":
        require_low_scores(backend)
    comparison = check_backend(backend, batch.materialise(device))
    assert comparison.ok, f"{comparison.worst} for {batch}"


def padded(q: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`q` with rows of ones after its own, as an object with a capacity takes it."""
    rows = torch.ones(num_rows, *q.shape[1:], dtype=q.dtype, device=q.device)
    rows[: q.shape[0]] = q
    return rows


def assert_padded_answer(backend: str, step: Step, answer: AttentionOutput) -> None:
    """The step's rows agree with float64; the padding's output is finite."""
    rows = step.q.shape[0]
    got = AttentionOutput(answer.out[:rows], answer.lse[:rows])
    comparison = check_backend(backend, step, attend=lambda _: got)
    assert comparison.ok, str(comparison.worst)
    assert torch.isfinite(answer.out[rows:]).all()


def scratch_of(attn: PagedAttention) -> list[torch.Tensor]:
    """What a backend may find dirty: all that it writes before it reads."""
    if attn.backend == "triton":
        buffers = attn._backend._buffers
        return [buffers.piece_acc, buffers.piece_ml, buffers.arrived, buffers.short_first]
    return [workspace.tensor for workspace in attn._backend.workspaces]


def assert_related(got: AttentionOutput, expected: AttentionOutput, *bounds: Bound) -> None:
    """Two answers differ by no more than the sum of what their bounds allow."""
    bound = Bound(sum(b.out for b in bounds), sum(b.lse for b in bounds))
    doubled = AttentionOutput(expected.out.double().cpu(), expected.lse.double().cpu())
    comparison = compare(got, doubled, bound)
    assert comparison.ok, str(comparison.worst)


def assert_same_bits(got: AttentionOutput, expected: AttentionOutput) -> None:
    """Two answers are equal in every bit; neither holds NaN."""
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def attention_kinds(
    backend: str,
    device: torch.device,
    *,
    max_window_left: int | None = None,
    max_soft_cap: float = 50.0,
    small: bool = False,
) -> st.SearchStrategy[tuple[int, AttentionSpec]]:
    """Page sizes and layer kinds within what the backend computes fast enough to be tested."""
    on_gpu = device.type == "cuda"
    head_dims, dtypes = HEAD_DIMS, [torch.float32, torch.bfloat16, torch.float16]
    if backend == "flashinfer":  # see `half`
        head_dims, dtypes, max_soft_cap = [64], [half(backend)], 0.0
    if max_window_left is None:
        max_window_left = longest_context(device, small)
    max_qo_heads = 48 if on_gpu else 6 if small else 12
    limits = SpecLimits(
        max_qo_heads, tuple(head_dims), tuple(dtypes), max_window_left, max_soft_cap
    )
    return _kinds(limits, on_gpu)


def longest_context(device: torch.device, small: bool) -> int:
    """Keys of a request that the device makes cheap."""
    return 3000 if device.type == "cuda" else 100 if small else 300


def supported_batches(
    backend: str,
    device: torch.device,
    *,
    mode: str | None = None,
    max_window_left: int | None = None,
    max_soft_cap: float = 50.0,
    small: bool = False,
) -> st.SearchStrategy[Batch]:
    """Batches that the backend supports, as large as the device makes cheap."""
    on_gpu = device.type == "cuda"
    kinds = attention_kinds(
        backend, device, max_window_left=max_window_left, max_soft_cap=max_soft_cap, small=small
    )
    drawn = kinds.flatmap(
        lambda kind: batches(
            mode=mode,
            page_sizes=st.just(kind[0]),
            specs=st.just(kind[1]),
            max_batch_size=8 if on_gpu else 3 if small else 4,
            max_kv_len=longest_context(device, small),
            max_work=1000 if on_gpu else 3 if small else 12,
        )
    )
    return drawn.map(lambda batch: with_supported_values(backend, batch))


def with_supported_values(backend: str, batch: Batch) -> Batch:
    """The batch, with normal values where it has low scores and the backend lacks them."""
    is_lacking = batch.values == "low_scores" and _lacks_low_scores(backend)
    return replace(batch, values="normal") if is_lacking else batch


@st.composite
def _kinds(draw: st.DrawFn, limits: SpecLimits, on_gpu: bool) -> tuple[int, AttentionSpec]:
    """A page size and a layer kind.

    On a GPU each is a kernel to compile, for seconds: there all but the deep profile draw from a
    few that are the same in every run, and tests with a case for each value cover the breadth.
    """
    if on_gpu and os.environ.get("PAGEDATTN_PROFILE") != "deep":
        choices = RandomChoices(f"kind {draw(st.integers(0, 7))}")
        page_size = draw_page_size(choices)
        return page_size, draw_spec(choices, page_size, limits)
    page_size = draw(page_sizes())
    kinds = specs(
        page_size=page_size,
        max_qo_heads=limits.max_qo_heads,
        head_dims=limits.head_dims,
        dtypes=limits.dtypes,
        max_window_left=limits.max_window_left,
        max_soft_cap=limits.max_soft_cap,
    )
    return page_size, draw(kinds)

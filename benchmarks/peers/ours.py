"""This package: the backends behind `PagedAttention`, and the wrapper of mixed steps."""

from __future__ import annotations

import torch

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peer import Call, Peer, needs_gpu_and
from pagedattn import Capacity, PagedAttention
from pagedattn.backends import unsupported_reasons
from pagedattn.checking.compare import arithmetic_of
from pagedattn.flashinfer import FlashInferMixedWrapper, Workspace

FIRST_BYTES = 1024
"""Of a workspace that grows to what the first plan needs."""


def growing_workspace(device: torch.device) -> Workspace:
    """A workspace that ends as large as its plans need."""
    return Workspace(torch.zeros(FIRST_BYTES, dtype=torch.uint8, device=device), "benchmark")


def _paged_attention(backend: str, *, batch_invariant: bool = False) -> Peer:
    def build(inputs: Inputs) -> Call:
        case = inputs.case
        capacity = Capacity(len(case.qo_lens), case.num_tokens, case.num_pages)
        attn = PagedAttention(
            case.spec, case.page_size, backend=backend, device=inputs.device, capacity=capacity,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return Call(
            plan=lambda: attn.plan(inputs.table, inputs.qo_indptr),
            run=lambda: attn.run(inputs.q, inputs.kv_cache, out=inputs.out),
            capturable=backend != "reference",
        )

    def missing(device: torch.device) -> str | None:
        small = Case("", "", (1,), (1,)).spec
        return "; ".join(unsupported_reasons(backend, small, 16, device)) or None

    return Peer(
        name=f"pagedattn-{backend}" + ("-invariant" if batch_invariant else ""),
        routine="PagedAttention",
        build=build,
        missing=missing,
        kernel=backend,
        arithmetic=arithmetic_of(backend),
        ours=True,
        by_default=backend != "reference" and not batch_invariant,
    )


def _build_mixed(inputs: Inputs) -> Call:
    case = inputs.case
    decode, prefill = growing_workspace(inputs.device), growing_workspace(inputs.device)
    wrapper = FlashInferMixedWrapper(
        decode,
        prefill,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        batch_size=len(case.qo_lens),
        max_total_tokens=case.num_tokens,
        max_num_pages=case.num_pages,
        max_prefill_rows=len(case.qo_lens) - case.num_decodes,
        device=inputs.device,
    )
    return Call(
        plan=lambda: wrapper.plan(
            inputs.qo_indptr, *inputs.kv_arrays, dtype=case.dtype, window_left=case.window_left
        ),
        run=lambda: wrapper.run(inputs.q, inputs.kv_cache),
        outgrown_bytes=lambda: decode.num_outgrown_bytes + prefill.num_outgrown_bytes,
    )


def _takes_mixed(case: Case) -> bool:
    return case.kind == "mixed"


OURS = (
    _paged_attention("triton"),
    _paged_attention("flashinfer"),
    Peer(
        name="pagedattn-mixed",
        routine="FlashInferMixedWrapper",
        build=_build_mixed,
        takes=_takes_mixed,
        missing=needs_gpu_and("flashinfer"),
        arithmetic=arithmetic_of("flashinfer"),
        ours=True,
    ),
    _paged_attention("triton", batch_invariant=True),
    _paged_attention("reference"),
)

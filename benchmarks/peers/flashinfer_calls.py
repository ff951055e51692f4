"""FlashInfer's own paged calls, as its documentation has them: what ours are measured by."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peer import Call, Peer, cache_views, needs_gpu_and
from benchmarks.peers.ours import growing_workspace
from pagedattn.backends.flashinfer.head_dim import FA3_HEAD_DIMS
from pagedattn.checking.bound import FLASHINFER

CUDA_CORE_RATIOS = (1, 2, 3, 4, 6, 8)
"""Query heads a KV head that the CUDA-core decode kernel is compiled for, in every version."""
BATCH_POD_BYTES = 1 << 29
"""Its workspace is cut in halves at construction, so it cannot grow later."""


def _library() -> Any:
    return importlib.import_module("flashinfer")


def _layer(case: Case) -> tuple[int, int, int, int]:
    return case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size


def _types(case: Case) -> dict[str, torch.dtype]:
    return {"q_data_type": case.dtype, "kv_data_type": case.dtype}


def build_decode(inputs: Inputs, *, tensor_cores: bool) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper."""
    case, workspace = inputs.case, growing_workspace(inputs.device)
    wrapper = _library().BatchDecodeWithPagedKVCacheWrapper(
        workspace.tensor, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
    )
    kv_cache = cache_views(inputs)
    return Call(
        plan=lambda: workspace.plan(
            wrapper.plan,
            *inputs.kv_arrays,
            *_layer(case),
            window_left=case.window_left,
            seq_lens=inputs.table.kv_lens,
            **_types(case),
        ),
        run=lambda: wrapper.run(inputs.q, kv_cache, out=inputs.out),
        outgrown_bytes=lambda: workspace.num_outgrown_bytes,
    )


def build_prefill(inputs: Inputs, *, kernel: str) -> Call:
    """BatchPrefillWithPagedKVCacheWrapper."""
    case, workspace = inputs.case, growing_workspace(inputs.device)
    wrapper = _library().BatchPrefillWithPagedKVCacheWrapper(
        workspace.tensor, "NHD", backend=kernel
    )
    kv_cache = cache_views(inputs)
    return Call(
        plan=lambda: workspace.plan(
            wrapper.plan,
            inputs.qo_indptr,
            *inputs.kv_arrays,
            *_layer(case),
            causal=True,
            window_left=case.window_left,
            seq_lens=inputs.table.kv_lens,
            **_types(case),
        ),
        run=lambda: wrapper.run(inputs.q, kv_cache, out=inputs.out),
        outgrown_bytes=lambda: workspace.num_outgrown_bytes,
    )


def build_batch_attention(inputs: Inputs) -> Call:
    """BatchAttention: any query lengths in one persistent kernel; reads its tables on the GPU."""
    case, table = inputs.case, inputs.table
    wrapper = _library().BatchAttention("NHD", str(inputs.device))
    host = (inputs.qo_indptr, table.kv_indptr, table.kv_indices, table.kv_lens)
    arrays = [array.to(inputs.device) for array in host]
    lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.device)
    kv_cache = cache_views(inputs)
    return Call(
        plan=lambda: wrapper.plan(
            *arrays,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            case.head_dim,
            case.page_size,
            causal=True,
            sm_scale=case.spec.scale,
            **_types(case),
        ),
        run=lambda: wrapper.run(inputs.q, kv_cache, inputs.out, lse),
        rows=lambda both: both[0],
    )


def build_pod(inputs: Inputs) -> Call:
    """PODWithPagedKVCacheWrapper: pages for decode, and one prompt with dense keys and values."""
    case, workspace = inputs.case, growing_workspace(inputs.device)
    decode = inputs.part(0, case.num_decodes)
    prompt = inputs.part(case.num_decodes, len(case.qo_lens))
    k, v = prompt.gather(0)
    wrapper = _library().PODWithPagedKVCacheWrapper(workspace.tensor, "NHD")
    kv_cache = cache_views(inputs)
    return Call(
        plan=lambda: workspace.plan(
            wrapper.plan,
            *decode.kv_arrays,
            *_layer(case),
            window_left=case.window_left,
            sm_scale=case.spec.scale,
            **_types(case),
        ),
        run=lambda: wrapper.run(
            prompt.q, k, v, decode.q, kv_cache, causal_p=True, window_left_p=case.window_left
        ),
        rows=_decode_first,
        capturable=False,  # its launcher clears a buffer with a synchronous cudaMemset
        outgrown_bytes=lambda: workspace.num_outgrown_bytes,
    )


def build_batch_pod(inputs: Inputs) -> Call:
    """BatchPODWithPagedKVCacheWrapper: pages for decode and for prompts."""
    case = inputs.case
    decode = inputs.part(0, case.num_decodes)
    prompts = inputs.part(case.num_decodes, len(case.qo_lens))
    floats = torch.zeros(BATCH_POD_BYTES, dtype=torch.uint8, device=inputs.device)
    wrapper = _library().BatchPODWithPagedKVCacheWrapper(floats, "NHD")
    kv_cache = cache_views(inputs)
    return Call(
        plan=lambda: wrapper.plan(
            prompts.qo_indptr,
            *prompts.kv_arrays,
            decode.qo_indptr,
            *decode.kv_arrays,
            *_layer(case),
            window_left=case.window_left,
            sm_scale=case.spec.scale,
            **_types(case),
        ),
        run=lambda: wrapper.run(prompts.q, kv_cache, decode.q, kv_cache, causal_p=True),
        rows=_decode_first,
    )


def _decode_first(both: tuple[Tensor, Tensor]) -> Tensor:
    """POD returns the prompts' rows first; steps have them last."""
    prompts, decode = both
    return torch.cat([decode, prompts])


def _takes_decode(case: Case) -> bool:
    return case.kind == "decode"


def _takes_cuda_core_decode(case: Case) -> bool:
    return case.kind == "decode" and case.spec.group_size in CUDA_CORE_RATIOS


def _takes_prefill(case: Case) -> bool:
    return case.kind != "decode"


def _takes_fa3(case: Case) -> bool:
    return case.kind != "decode" and case.head_dim in FA3_HEAD_DIMS


def _takes_batch_attention(case: Case) -> bool:
    return case.window_left < 0


def _takes_pod(case: Case) -> bool:
    return case.kind == "mixed" and len(case.qo_lens) - case.num_decodes == 1


def _takes_batch_pod(case: Case) -> bool:
    return case.kind == "mixed"


_here = needs_gpu_and("flashinfer")


def _fa3_here(device: torch.device) -> str | None:
    reason = _here(device)
    if reason is None and torch.cuda.get_device_capability(device)[0] != 9:
        reason = "fa3 needs compute capability 9"
    return reason


_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
_POD, _BATCH_POD = "PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"

FLASHINFER_CALLS = (
    Peer(
        "flashinfer-decode",
        _DECODE,
        lambda inputs: build_decode(inputs, tensor_cores=True),
        _takes_decode,
        _here,
        "fa2_tc",
        FLASHINFER,
    ),
    Peer(
        "flashinfer-decode-cuda-cores",
        _DECODE,
        lambda inputs: build_decode(inputs, tensor_cores=False),
        _takes_cuda_core_decode,
        _here,
        "fa2",
        FLASHINFER,
    ),
    Peer(
        "flashinfer-fa3",
        _PREFILL,
        lambda inputs: build_prefill(inputs, kernel="fa3"),
        _takes_fa3,
        _fa3_here,
        "fa3",
        FLASHINFER,
    ),
    Peer(
        "flashinfer-fa2",
        _PREFILL,
        lambda inputs: build_prefill(inputs, kernel="fa2"),
        _takes_prefill,
        _here,
        "fa2",
        FLASHINFER,
    ),
    Peer(
        "flashinfer-batch-attention",
        "BatchAttention",
        build_batch_attention,
        _takes_batch_attention,
        _here,
        "fa2",
        FLASHINFER,
    ),
    Peer("flashinfer-pod", _POD, build_pod, _takes_pod, _here, "fa2", FLASHINFER),
    Peer(
        "flashinfer-batch-pod",
        _BATCH_POD,
        build_batch_pod,
        _takes_batch_pod,
        _here,
        "fa2",
        FLASHINFER,
    ),
)

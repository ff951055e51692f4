"""FlashInfer's paged prefill, safe to serve with: any query lengths, in one plan a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedattn.backends.flashinfer.defects import FA3_WINDOW, Call
from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.host_step import HostStep, pad_step
from pagedattn.backends.flashinfer.kernel import Kernel
from pagedattn.backends.flashinfer.kernel_choice import (
    KERNELS,
    graph_prefill_kernel,
    has_fa3,
    prefill_kernel,
)
from pagedattn.backends.flashinfer.kernel_wrapper import KernelWrapper, PreparedStep
from pagedattn.backends.flashinfer.library import flashinfer_version, load_flashinfer
from pagedattn.backends.flashinfer.need import DeviceFacts, prefill_need
from pagedattn.backends.flashinfer.prefill_step import safe_options, safe_requests
from pagedattn.backends.flashinfer.sizes import Capacity, check_step_fits, require_sizes
from pagedattn.backends.flashinfer.workspace import Workspace
from pagedattn.spec import AttentionSpec

_OURS = frozenset(
    [
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "head_dim_vo",
        "page_size",
        "causal",
        "window_left",
        "q_data_type",
        "kv_data_type",
        "o_data_type",
        "non_blocking",
        "seq_lens",
        "seq_lens_q",
        "max_token_per_sequence",
        "max_sequence_kv",
    ]
)
_STATIC_BUFFERS = {
    "qo_indptr_buf": "qo_indptr",
    "paged_kv_indptr_buf": "kv_indptr",
    "paged_kv_indices_buf": "kv_indices",
    "paged_kv_last_page_len_buf": "last_page_len",
}


class FlashInferPrefillWrapper(KernelWrapper):
    """Paged attention of queries of any length, through FlashInfer's prefill kernels.

    Index tensors may be, and should be, on the CPU: FlashInfer needs them there, and tensors on the
    GPU cost a synchronisation with everything queued on the stream. They are read before `plan`
    returns. What the device needs goes over in an asynchronous copy from page-locked memory that
    this wrapper owns, so planning the next step while this one runs is safe.

    Args:
        workspace_buffer: uint8[bytes] on the device, or a `Workspace`, which grows when needed.
        num_qo_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements of one head.
        page_size: Tokens in one page.
        batch_size: In graph mode, the most requests of a step; smaller steps are padded.
        max_total_tokens: In graph mode, the rows of every `q`.
        max_num_pages: In graph mode, the most entries of `paged_kv_indices`.
        device: Where attention runs.
        accelerator_graph: Graph mode: static buffers, so that one captured `run` is replayed after
            any later `plan` on the same stream. Run once before the capture, as for any capture.
        enable_nvtx: Mark `plan` and `run` for a profiler.
        backend: "fa2", "fa3", or "auto": by measurement, see `kernel_choice.py`. In graph mode the
            first plan decides, by the capacity.

    Raises:
        ValueError: A size is missing or out of its range, FlashInfer cannot compute `head_dim`, or
            there is no such backend.
    """

    index_arrays = ("qo_indptr", "kv_indptr", "last_page_len", "kv_lens")

    def __init__(
        self,
        workspace_buffer: Tensor | Workspace,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        batch_size: int | None = None,
        max_total_tokens: int | None = None,
        max_num_pages: int | None = None,
        device: torch.device = torch.device("cuda"),  # noqa: B008 - a value, and the contract's
        accelerator_graph: bool = False,
        enable_nvtx: bool = False,
        backend: str = "auto",
    ) -> None:
        if backend not in KERNELS:
            raise ValueError(f"backend must be one of {list(KERNELS)}, got {backend!r}")
        require_sizes(
            accelerator_graph,
            batch_size=batch_size,
            max_total_tokens=max_total_tokens,
            max_num_pages=max_num_pages,
        )
        check_flashinfer_head_dim(head_dim, device)
        capacity = None
        if accelerator_graph:
            capacity = Capacity(batch_size or 0, max_total_tokens or 0, max_num_pages or 0)
        spec = AttentionSpec(num_qo_heads, num_kv_heads, head_dim)
        super().__init__(workspace_buffer, spec, page_size, device, capacity, enable_nvtx)
        self.backend = backend
        self._library = load_flashinfer()
        self._version = flashinfer_version(self._library)
        self._kernels: dict[str, Kernel] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        causal: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        kv_lens: Tensor | None = None,
        window_left: int = -1,
        **kwargs: Any,
    ) -> None:
        """Make ready for a step, and compute where its new tokens' keys and values belong.

        Args:
            qo_indptr: i32[batch + 1], where each request's query tokens begin.
            paged_kv_indptr: i32[batch + 1], where each request's pages begin.
            paged_kv_indices: i32[paged_kv_indptr[-1]], page ids.
            paged_kv_last_page_len: i32[batch], 1 to `page_size`; 0 where a request has no page.
            causal: Whether a query sees only keys up to its own position.
            dtype: Of queries, keys, values and output: bfloat16 or float16.
            kv_lens: i32[batch], tokens of each request; checked against the table.
            window_left: Preceding positions that each query sees; -1: all.
            **kwargs: Handed to FlashInfer's plan by name, such as `sm_scale`, `logits_soft_cap`.

        Raises:
            ValueError: An argument is malformed, or the step does not fit; nothing was touched, and
                the wrapper is without a plan until the next good one.
            TypeError: FlashInfer does not know an option, or this wrapper sets it itself.
        """
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(arrays, kv_lens, (dtype, causal, window_left), kwargs)

    def prepare(self, step: HostStep, spec: AttentionSpec, options: dict[str, Any]) -> PreparedStep:
        """See `KernelWrapper`."""
        name = self._choose(step, spec)
        call = Call(self._version, name, spec.causal, spec.window_left)
        options = safe_options(options, call)
        choice = self._choice(name, spec, options)
        if self.capacity is None:
            requests = safe_requests(step, call, None)
        else:
            check_step_fits(step, self.capacity)
            batch_size, num_tokens = self.capacity.batch_size, self.capacity.num_tokens
            requests = safe_requests(step, call, batch_size)
            requests = pad_step(requests, batch_size + 1, num_tokens)
        kernel = self._kernel(name)
        kernel.check_options(options, _OURS)
        return PreparedStep(kernel, requests, spec, options, choice)

    def _choose(self, step: HostStep, spec: AttentionSpec) -> str:
        """The kernel for a step; in graph mode for the capacity."""
        name, window_left = self.backend, spec.window_left
        if name == "auto":
            fa3 = has_fa3(self.device, spec.head_dim)
            if self.capacity is None:
                rows = int(np.count_nonzero(step.qo_lens))
                name = prefill_kernel(step.num_tokens, rows, fa3=fa3, window_left=window_left)
            else:
                sizes = self.capacity.num_tokens, self.capacity.batch_size
                name = graph_prefill_kernel(*sizes, fa3=fa3, window_left=window_left)
        if FA3_WINDOW.hits(Call(self._version, name, spec.causal, window_left)):
            raise ValueError(
                f"FlashInfer's fa3 kernel lets NaN through from slots left of {window_left=}: use "
                'fa2, as backend="auto" does'
            )
        return name

    def _entries(self, capacity: Capacity) -> list[int]:
        batch, tokens = capacity.batch_size + 1, capacity.num_tokens  # one request is padding
        return [batch + 1, batch + 1, batch, batch, *[tokens] * 3, capacity.num_pages]

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            build = self._library.BatchPrefillWithPagedKVCacheWrapper
            kernel = self._kernel_of(build, name, self._version, _STATIC_BUFFERS, decodes=False)
            if self.capacity is not None and self.device.type == "cuda":
                facts = DeviceFacts.of(self.device)
                sizes = self.capacity.batch_size, self.capacity.num_tokens
                need = prefill_need(self.spec, *sizes, name, facts, self._version)
                kernel.set_integer_bytes(need.int_bytes)
            self._kernels[name] = kernel
        return self._kernels[name]

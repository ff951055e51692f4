"""FlashInfer's paged decode on tensor cores, safe to serve with: one new token a request."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.host_step import HostStep, pad_decode_step
from pagedattn.backends.flashinfer.kernel import Kernel
from pagedattn.backends.flashinfer.kernel_choice import KERNELS
from pagedattn.backends.flashinfer.kernel_wrapper import KernelWrapper, PreparedStep
from pagedattn.backends.flashinfer.library import flashinfer_version, load_flashinfer
from pagedattn.backends.flashinfer.need import DeviceFacts, decode_need
from pagedattn.backends.flashinfer.sizes import Capacity, check_fits, require_sizes
from pagedattn.backends.flashinfer.workspace import Workspace
from pagedattn.spec import AttentionSpec

_OURS = frozenset(
    [
        "indptr",
        "indices",
        "last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "page_size",
        "window_left",
        "window_right",
        "q_data_type",
        "kv_data_type",
        "o_data_type",
        "data_type",
        "non_blocking",
        "seq_lens",
        "q_len_per_req",
        "is_causal",
    ]
)
_STATIC_BUFFERS = {
    "paged_kv_indptr_buffer": "kv_indptr",
    "paged_kv_indices_buffer": "kv_indices",
    "paged_kv_last_page_len_buffer": "last_page_len",
}


class FlashInferDecodeWrapper(KernelWrapper):
    """Paged attention of one new token a request, through FlashInfer's tensor-core decode.

    Index tensors may be, and should be, on the CPU: FlashInfer needs them there, and tensors on the
    GPU cost a synchronisation with everything queued on the stream. They are read before `plan`
    returns. What the device needs goes over in an asynchronous copy from page-locked memory that
    this wrapper owns, so planning the next step while this one runs is safe.

    Args:
        workspace_buffer: uint8[bytes] on the device, or a `Workspace`, which grows when needed.
        num_qo_heads: Query heads; any multiple of `num_kv_heads`.
        num_kv_heads: Key and value heads.
        head_dim: Elements of one head.
        page_size: Tokens in one page.
        batch_size: In graph mode, the rows of every `q`; smaller steps are padded.
        max_num_pages: In graph mode, the most entries of `paged_kv_indices`.
        device: Where attention runs.
        accelerator_graph: Graph mode: static buffers, so that one captured `run` is replayed after
            any later `plan` on the same stream. Run once before the capture, as for any capture.
        enable_nvtx: Mark `plan` and `run` for a profiler.
        backend: "fa2" or "auto", which is fa2 too: one-token rows take 4 to 8 times as long on fa3.

    Raises:
        ValueError: A size is missing or out of its range, FlashInfer cannot compute `head_dim`, or
            the backend is not one for decode.
    """

    index_arrays = ("kv_indptr", "last_page_len", "kv_lens")

    def __init__(
        self,
        workspace_buffer: Tensor | Workspace,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        batch_size: int | None = None,
        max_num_pages: int | None = None,
        device: torch.device = torch.device("cuda"),  # noqa: B008 - a value, and the contract's
        accelerator_graph: bool = False,
        enable_nvtx: bool = False,
        backend: str = "auto",
    ) -> None:
        if backend not in KERNELS or backend == "fa3":
            raise ValueError(f"backend must be 'auto' or 'fa2' for decode, got {backend!r}")
        require_sizes(accelerator_graph, batch_size=batch_size, max_num_pages=max_num_pages)
        check_flashinfer_head_dim(head_dim, device)
        capacity = None
        if accelerator_graph:
            capacity = Capacity(batch_size or 0, batch_size or 0, max_num_pages or 0)
        spec = AttentionSpec(num_qo_heads, num_kv_heads, head_dim)
        super().__init__(workspace_buffer, spec, page_size, device, capacity, enable_nvtx)
        self._kernel: Kernel | None = None

    def plan(
        self,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        kv_lens: Tensor | None = None,
        window_left: int = -1,
        **kwargs: Any,
    ) -> None:
        """Make ready for a step, and compute where its new tokens' keys and values belong.

        Args:
            paged_kv_indptr: i32[batch + 1], where each request's pages begin.
            paged_kv_indices: i32[paged_kv_indptr[-1]], page ids.
            paged_kv_last_page_len: i32[batch], 1 to `page_size`, this step's token included; 0
                where a request has no page, whose output is 0.
            dtype: Of queries, keys, values and output: bfloat16 or float16.
            kv_lens: i32[batch], tokens of each request; checked against the table.
            window_left: Preceding positions that each query sees; -1: all.
            **kwargs: Handed to FlashInfer's plan by name, such as `sm_scale`, `logits_soft_cap`.

        Raises:
            ValueError: An argument is malformed, or the step does not fit; nothing was touched, and
                the wrapper is without a plan until the next good one.
            TypeError: FlashInfer does not know an option, or this wrapper sets it itself.
        """
        arrays = (None, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(arrays, kv_lens, (dtype, True, window_left), kwargs)

    def prepare(self, step: HostStep, spec: AttentionSpec, options: dict[str, Any]) -> PreparedStep:
        """See `KernelWrapper`; the step has one token a request."""
        if self._kernel is None:
            self._kernel = self._make_kernel()
        self._kernel.check_options(options, _OURS)
        choice = self._choice("fa2", spec, options)
        if self.capacity is not None:
            check_fits(
                batch_size=(step.batch_size, self.capacity.batch_size),
                max_num_pages=(len(step.kv_indices), self.capacity.num_pages),
            )
            step = pad_decode_step(step, self.capacity.batch_size, self.sink_page)
        return PreparedStep(self._kernel, step, spec, options, choice)

    def _entries(self, capacity: Capacity) -> list[int]:
        batch = capacity.batch_size
        num_pages = capacity.num_pages + batch  # each padding row may read one
        return [batch + 1, *[batch] * 5, num_pages]

    def _make_kernel(self) -> Kernel:
        library = load_flashinfer()
        version = flashinfer_version(library)
        build = partial(library.BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores=True)
        kernel = self._kernel_of(build, "fa2", version, _STATIC_BUFFERS, decodes=True)
        if self.capacity is not None and self.device.type == "cuda":
            facts = DeviceFacts.of(self.device)
            need = decode_need(self.spec, self.capacity.batch_size, facts, version)
            kernel.set_integer_bytes(need.int_bytes)
        return kernel

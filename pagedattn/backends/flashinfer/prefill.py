"""FlashInfer's paged prefill, safe to serve with: any query lengths, in one plan a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.backends.flashinfer.defects import (
    FA2_ROWS_WITHOUT_KEYS,
    FA2_SMALLEST_TILE,
    FA2_WINDOW_WITHOUT_MASK,
    FA3_ROWS_WITHOUT_KEYS,
    FA3_WINDOW,
    Call,
)
from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.host_step import (
    HostStep,
    pad_step,
    read_step,
    separate_rows_without_keys,
    token_slots,
)
from pagedattn.backends.flashinfer.kernel import Kernel, on_device
from pagedattn.backends.flashinfer.kernel_choice import (
    KERNELS,
    graph_prefill_kernel,
    has_fa3,
    prefill_kernel,
)
from pagedattn.backends.flashinfer.library import (
    flashinfer_version,
    load_flashinfer,
)
from pagedattn.backends.flashinfer.need import DeviceFacts, prefill_need
from pagedattn.backends.flashinfer.paged_wrapper import (
    NO_SLOTS,
    Capacity,
    PagedWrapper,
    PlannedStep,
    check_fits,
    require_sizes,
    slot_arrays,
)
from pagedattn.backends.flashinfer.planner import PlanCall
from pagedattn.backends.flashinfer.step_arrays import StepArrays
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
_INDEX_ARRAYS = ("qo_indptr", "kv_indptr", "last_page_len", "kv_lens")


class FlashInferPrefillWrapper(PagedWrapper):
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
        self._arrays = StepArrays(
            self.device,
            {
                **dict.fromkeys(_INDEX_ARRAYS, torch.int32),
                **slot_arrays(accelerator_graph),
                "kv_indices": torch.int32,
            },
            self._entries(),
        )

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
        with self._range("plan"):
            spec = self._begin_plan(dtype, causal, window_left)
            step = read_step(
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                self.page_size,
                kv_lens,
            )
            self.plan_step(step, spec, kwargs)

    def plan_step(
        self,
        step: HostStep,
        spec: AttentionSpec,
        options: dict[str, Any],
        stage_slots: bool = True,
    ) -> None:
        """Plan a step that has been checked.

        Args:
            step: The step.
            spec: Mask and dtype; its scale and soft cap are not read.
            options: For FlashInfer's plan.
            stage_slots: Whether to say where new tokens belong.
        """
        self._step = None
        name = self._choose(step, spec)
        call = Call(self._version, name, spec.causal, spec.window_left)
        if FA2_WINDOW_WITHOUT_MASK.hits(call):
            options = _without_splitting(options)
        choice = None
        if self.capacity is not None:
            choice = (name, spec, tuple(sorted(options.items())))
            self._freeze(choice)
        requests = self._requests_of(step, call)
        num_tokens = step.num_tokens if self.capacity is None else self.capacity.num_tokens
        slots = token_slots(step, num_tokens) if stage_slots else NO_SLOTS
        if self.capacity is not None:
            requests = pad_step(requests, self.capacity.batch_size + 1, num_tokens)
        kernel = self._kernel(name)
        kernel.check_options(options, _OURS)
        self._stage_and_plan(kernel, requests, spec, options, slots)
        self._frozen = choice
        planned = kernel if num_tokens else None
        self._step = PlannedStep(planned, spec, num_tokens, requests.num_pages)

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
                f"FlashInfer's fa3 kernel lets NaN through from slots left of window_left="
                f"{window_left}: use fa2"
            )
        return name

    def _requests_of(self, step: HostStep, call: Call) -> HostStep:
        """The requests that a step is computed as; in graph mode they and the step must fit."""
        requests = separate_rows_without_keys(step) if call.causal else step
        if self.capacity is None:
            return requests
        check_fits(
            batch_size=(step.batch_size, self.capacity.batch_size),
            max_total_tokens=(step.num_tokens, self.capacity.num_tokens),
            max_num_pages=(len(step.kv_indices), self.capacity.num_pages),
        )
        if requests.batch_size <= self.capacity.batch_size:
            return requests
        requests = step
        if FA2_ROWS_WITHOUT_KEYS.hits(call):
            requests = separate_rows_without_keys(step, FA2_SMALLEST_TILE)
        elif FA3_ROWS_WITHOUT_KEYS.hits(call):
            requests = separate_rows_without_keys(step)
        if requests.batch_size > self.capacity.batch_size:
            raise ValueError(
                f"{requests.batch_size - step.batch_size} requests have more queries than keys, "
                "and FlashInfer computes their queries without keys as requests of their own: "
                f"raise batch_size (max_batch_size of a Capacity) to {requests.batch_size}, got "
                f"{self.capacity.batch_size}"
            )
        return requests

    def _stage_and_plan(
        self,
        kernel: Kernel,
        step: HostStep,
        spec: AttentionSpec,
        options: dict[str, Any],
        slots: NDArray[np.int64],
    ) -> None:
        """Send the step and its tokens' slots over, and have FlashInfer plan it."""
        arrays = self._arrays
        index = (step.qo_indptr, step.kv_indptr, step.last_page_len, step.kv_lens)
        self._upload(index, slots, step.kv_indices)
        try:
            if step.num_tokens:
                kernel.plan(PlanCall(step, arrays, spec, options))
        finally:
            arrays.hold()  # FlashInfer copies from page-locked memory too

    def _entries(self) -> list[int] | None:
        """Entries of every array at capacity, the added padding request included."""
        if self.capacity is None:
            return None
        batch, tokens = self.capacity.batch_size + 1, self.capacity.num_tokens
        return [batch + 1, batch + 1, batch, batch, *[tokens] * 3, self.capacity.num_pages]

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            buffers: dict[str, Any] = {}
            if self.capacity is not None:
                buffers = {
                    "use_cuda_graph": True,
                    "qo_indptr_buf": self._arrays.fixed("qo_indptr"),
                    "paged_kv_indptr_buf": self._arrays.fixed("kv_indptr"),
                    "paged_kv_indices_buf": self._arrays.fixed("kv_indices"),
                    "paged_kv_last_page_len_buf": self._arrays.fixed("last_page_len"),
                }
            with on_device(self.device):
                wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
                    self.float_workspace, "NHD", backend=name, **buffers
                )
            kernel = Kernel(
                wrapper,
                name,
                self._version,
                self._workspace,
                self._arrays.ring,
                decodes=False,
                fixed=self.accelerator_graph,
            )
            if self.capacity is not None and self.device.type == "cuda":
                facts = DeviceFacts.of(self.device)
                sizes = self.capacity.batch_size, self.capacity.num_tokens
                need = prefill_need(self.spec, *sizes, name, facts, self._version)
                kernel.set_integer_bytes(need.int_bytes)
            self._kernels[name] = kernel
        return self._kernels[name]


def _without_splitting(options: dict[str, Any]) -> dict[str, Any]:
    """The options with `disable_split_kv=True`, which the step needs to be right."""
    if options.get("disable_split_kv") is False:
        raise ValueError(
            "disable_split_kv=False with a window and no causal mask: FlashInfer's split is wrong "
            f"there ({FA2_WINDOW_WITHOUT_MASK.report})"
        )
    return {**options, "disable_split_kv": True}

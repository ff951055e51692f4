"""FlashInfer's paged prefill, safe to serve with: any query lengths, in one plan a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.defects import (
    FA2_WINDOW_WITHOUT_MASK,
    FA3_ROWS_WITHOUT_KEYS,
    Call,
)
from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.host_step import (
    NO_SLOTS,
    HostStep,
    pad_step,
    read_step,
    rows_without_keys,
    token_slots,
)
from pagedattn.backends.flashinfer.kernel import Kernel, on_device
from pagedattn.backends.flashinfer.kernel_choice import KERNELS, has_fa3, prefill_kernel
from pagedattn.backends.flashinfer.library import (
    check_plan_options,
    flashinfer_version,
    load_flashinfer,
)
from pagedattn.backends.flashinfer.need import DeviceFacts, prefill_need
from pagedattn.backends.flashinfer.paged_wrapper import (
    Capacity,
    PagedWrapper,
    PlannedStep,
    check_fits,
    require_sizes,
)
from pagedattn.backends.flashinfer.workspace import Workspace
from pagedattn.spec import AttentionSpec
from pagedattn.staging import Staging

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
_ARRAYS = (  # (dtype, entries for a capacity), in the order of the staged arrays
    ("qo_indptr", torch.int32),
    ("kv_indptr", torch.int32),
    ("last_page_len", torch.int32),
    ("kv_lens", torch.int32),
    ("write_slots", torch.int64),
    ("token_to_page", torch.int64),
    ("token_to_cache", torch.int64),
    ("rows_without_keys", torch.bool),
    ("kv_indices", torch.int32),  # last: a copy ends with the last entry that a step has
)


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
        self._staging = Staging(self.device, self._capacity_bytes())

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
            spec = self._begin_plan(dtype)
            step = read_step(
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                self.page_size,
                kv_lens,
            )
            spec = with_mask(spec, causal, window_left)
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
        self._freeze((name, spec, tuple(sorted(options.items()))))
        num_tokens = step.num_tokens if self.capacity is None else self.capacity.num_tokens
        if self.capacity is not None:
            check_fits(
                batch_size=(step.batch_size, self.capacity.batch_size),
                max_total_tokens=(step.num_tokens, self.capacity.num_tokens),
                max_num_pages=(len(step.kv_indices), self.capacity.num_pages),
            )
        slots = token_slots(step, num_tokens, self.sink_page) if stage_slots else NO_SLOTS
        if self.capacity is not None:
            step = pad_step(step, self.capacity.batch_size + 1, num_tokens, self.sink_page)
        call = Call(self._version, name, spec.causal, spec.window_left)
        clear = rows_without_keys(step) if FA3_ROWS_WITHOUT_KEYS.hits(call) else None
        if clear is not None and self.capacity is None and not clear.any():
            clear = None  # a graph clears always: a later step may need it
        kernel = self._kernel(name)
        check_plan_options(kernel.wrapper, options, _OURS)
        no_rows = torch.empty(0, dtype=torch.bool)
        token_arrays = [*slots, no_rows if clear is None else torch.from_numpy(clear)]
        rows_to_clear = self._stage_and_plan(kernel, step, spec, options, token_arrays)
        self._frozen = (name, spec, tuple(sorted(options.items())))
        planned = kernel if step.num_tokens else None
        self._step = PlannedStep(
            planned,
            spec,
            step.num_tokens,
            step.num_pages,
            None if clear is None else rows_to_clear,
        )

    def _choose(self, step: HostStep, spec: AttentionSpec) -> str:
        """The kernel for a step; in graph mode for the capacity."""
        name = self.backend
        if name == "auto":
            tokens = step.num_tokens
            rows = int((step.qo_lens > 0).sum())
            if self.capacity is not None:
                tokens, rows = self.capacity.num_tokens, self.capacity.batch_size
            fa3 = has_fa3(self.device, spec.head_dim)
            name = prefill_kernel(
                tokens, rows, fa3=fa3, causal=spec.causal, window_left=spec.window_left
            )
        if FA2_WINDOW_WITHOUT_MASK.hits(Call(self._version, name, spec.causal, spec.window_left)):
            raise ValueError(
                f"FlashInfer's {name} kernel is wrong for window_left={spec.window_left} without a "
                f"causal mask ({FA2_WINDOW_WITHOUT_MASK.report}); use fa3, which needs a GPU of "
                "compute capability 9.0"
            )
        return name

    def _stage_and_plan(
        self,
        kernel: Kernel,
        step: HostStep,
        spec: AttentionSpec,
        options: dict[str, Any],
        token_arrays: list[Tensor],
    ) -> Tensor:
        """Send the step and its tokens' arrays over, have FlashInfer plan it; return the last."""
        parts = (step.qo_indptr, step.kv_indptr, step.last_page_len, step.kv_lens, step.kv_indices)
        *arrays, kv_indices = map(torch.from_numpy, parts)
        host, on_gpu = self._stage(self._staging, [*arrays, *token_arrays, kv_indices])
        self.write_slots, self.token_to_page, self.token_to_cache = on_gpu[4:7]
        if step.num_tokens:
            try:
                kernel.plan(
                    *host[:2],
                    on_gpu[8],
                    host[2],
                    spec.num_qo_heads,
                    spec.num_kv_heads,
                    spec.head_dim,
                    self.page_size,
                    causal=spec.causal,
                    window_left=spec.window_left,
                    q_data_type=spec.dtype,
                    kv_data_type=spec.dtype,
                    seq_lens=host[3],
                    max_token_per_sequence=int(step.qo_lens.max()),
                    **options,
                )
            finally:
                self._staging.hold()  # FlashInfer copies from the same page-locked memory
        return on_gpu[7]

    def _capacity_bytes(self) -> list[int] | None:
        return (
            None
            if self.capacity is None
            else [
                entries * dtype.itemsize
                for entries, (_, dtype) in zip(self._entries(), _ARRAYS, strict=True)
            ]
        )

    def _entries(self) -> list[int]:
        """Entries of every staged array at capacity, the added padding request included."""
        if self.capacity is None:
            return []
        batch, tokens = self.capacity.batch_size + 1, self.capacity.num_tokens
        return [batch + 1, batch + 1, batch, batch, *[tokens] * 4, self.capacity.num_pages + 1]

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            buffers: dict[str, Any] = {}
            if self.capacity is not None:
                views = self._staging.fixed_buffers([dtype for _, dtype in _ARRAYS])
                fixed = [v[:n] for v, n in zip(views, self._entries(), strict=True)]
                buffers = {
                    "use_cuda_graph": True,
                    "qo_indptr_buf": fixed[0],
                    "paged_kv_indptr_buf": fixed[1],
                    "paged_kv_indices_buf": fixed[8],
                    "paged_kv_last_page_len_buf": fixed[2],
                }
            with on_device(self.device):
                wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
                    self.float_workspace, "NHD", backend=name, **buffers
                )
            kernel = Kernel(wrapper, name, self._workspace, self.device, self.accelerator_graph)
            if self.capacity is not None and self.device.type == "cuda":
                facts = DeviceFacts.of(self.device)
                sizes = self.capacity.batch_size, self.capacity.num_tokens
                need = prefill_need(self.spec, *sizes, name, facts, self._version)
                kernel.set_integer_bytes(need.int_bytes)
            self._kernels[name] = kernel
        return self._kernels[name]


def with_mask(spec: AttentionSpec, causal: bool, window_left: int) -> AttentionSpec:
    """Return the same layer with another mask."""
    return AttentionSpec(
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.dtype,
        causal=causal,
        window_left=window_left,
    )

"""`PagedAttention(backend="flashinfer")`: the wrappers behind the facade's protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedattn.backends.flashinfer.decode import FlashInferDecodeWrapper
from pagedattn.backends.flashinfer.defects import FIRST_SUPPORTED
from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.kernel_choice import (
    graph_prefill_kernel,
    has_fa3,
    holds_prompts,
    most_prompts,
)
from pagedattn.backends.flashinfer.library import flashinfer_version, load_flashinfer
from pagedattn.backends.flashinfer.mixed import FlashInferMixedWrapper, MixedWrapper
from pagedattn.backends.flashinfer.need import (
    CapacityNeeds,
    DeviceFacts,
    capacity_needs,
    eager_float_bytes,
)
from pagedattn.backends.flashinfer.paged_wrapper import DTYPES
from pagedattn.backends.flashinfer.prefill import FlashInferPrefillWrapper
from pagedattn.backends.flashinfer.workspace import Workspace
from pagedattn.capacity import Capacity
from pagedattn.page_table import Int32s, PageTable
from pagedattn.spec import AttentionSpec
from pagedattn.validation import KVCache, halves_of

_Wrapper = FlashInferDecodeWrapper | FlashInferPrefillWrapper | MixedWrapper
Shape = tuple[int, int, int, int]
"""num_qo_heads, num_kv_heads, head_dim, page_size."""


class FlashInferBackend:
    """FlashInfer's kernels, picked by what a step holds.

    Without a capacity: one-token rows run on the decode wrapper, prompts on the prefill wrapper,
    and steps with both on both. With one, all steps run on what one captured graph can serve: the
    prefill wrapper alone where a row has room for a few tokens only, else the mixed wrapper.
    """

    capturable = True
    no_batch_invariance = (
        "FlashInfer picks a kernel and its query tile by the whole batch: fixed_split_size and "
        "disable_split_kv fix the split of the keys alone, and fa3 has neither"
    )
    no_device_plan = "FlashInfer's planners read lengths on the host"

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
        batch_invariant: bool = False,
    ) -> None:
        self.spec = spec
        self._options: dict[str, Any] = {"sm_scale": spec.scale}
        if spec.logits_soft_cap > 0:
            self._options["logits_soft_cap"] = spec.logits_soft_cap
        shape = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, page_size)
        self._wrappers = (
            _EagerWrappers(shape, device, _eager_bytes(spec, device))
            if capacity is None
            else _GraphWrapper(shape, device, capacity, spec, _needs_of(spec, capacity, device))
        )
        self.workspaces = self._wrappers.workspaces
        self._planned: _Wrapper | None = None
        self.write_slots = torch.empty(0, dtype=torch.int64, device=device)

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, page_size: int, device: torch.device
    ) -> list[str]:
        """What FlashInfer lacks, or computes wrongly; it is imported on a CUDA device only."""
        reasons = []
        if device.type != "cuda":
            reasons.append(f"needs an NVIDIA GPU, got device {device}")
        if spec.dtype not in DTYPES:
            reasons.append(f"FlashInfer's paged kernels compute {list(DTYPES)}, got {spec.dtype}")
        if device.type != "cuda":
            return reasons
        try:
            version = flashinfer_version(load_flashinfer())
        except Exception as error:  # its import runs GPU code, which fails in many ways
            return [*reasons, f"import flashinfer failed: {type(error).__name__}: {error}"]
        if version < FIRST_SUPPORTED:
            reasons.append(
                f"needs flashinfer-python >= {_dotted(FIRST_SUPPORTED)}, got {_dotted(version)}"
            )
        try:
            check_flashinfer_head_dim(spec.head_dim, device)
        except ValueError as error:
            reasons.append(str(error))
        return reasons

    def plan(self, page_table: PageTable, qo_indptr: Int32s) -> None:
        """Pick a wrapper for the step and plan it."""
        step = HostStep.of_table(page_table, qo_indptr)
        wrapper = self._wrappers.of(step)
        wrapper.sink_page = None  # the facade's caches need not have one: padding rows see no key
        wrapper.plan_step(step, self.spec, self._options)
        self._planned = wrapper
        slots = wrapper.write_slots
        if slots is not None:
            self.write_slots = slots

    def plan_device(self, page_table: PageTable, qo_indptr: Tensor, num_pages: int) -> None:
        """Never called: see `no_device_plan`."""
        raise NotImplementedError(self.no_device_plan)

    def run(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Write `out` and `lse`."""
        if self._planned is None:
            raise RuntimeError("there is no plan: call plan() first")
        self._planned.run_into(q, *halves_of(kv_cache), out, lse)


class _EagerWrappers:
    """Wrappers without static buffers; FlashInfer's own are made when a step first needs them."""

    def __init__(self, shape: Shape, device: torch.device, num_bytes: int) -> None:
        # One for all that runs in one stream: its content lives from a kernel to its merge
        workspace = _make_workspace(num_bytes, "PagedAttention", device)
        self.workspaces = [workspace]
        self._decode = FlashInferDecodeWrapper(workspace, *shape, device=device)
        self._prefill = FlashInferPrefillWrapper(workspace, *shape, device=device)
        self._mixed = MixedWrapper(self._decode, self._prefill, None)

    def of(self, step: HostStep) -> _Wrapper:
        """The wrapper for a step, by its query lengths."""
        if step.decodes:
            return self._decode
        num_decode_rows = np.count_nonzero(step.qo_lens == 1)
        if num_decode_rows == step.batch_size:
            return self._decode
        if num_decode_rows and holds_prompts(step.num_tokens, int(np.count_nonzero(step.qo_lens))):
            return self._mixed
        return self._prefill


class _GraphWrapper:
    """The one wrapper whose captured run serves every step within a capacity.

    Args:
        shape: The sizes that all wrappers take.
        device: Where attention runs.
        capacity: The largest step.
        spec: The layer kind.
        needs: What to make workspaces for; they grow where that is too little.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        capacity: Capacity,
        spec: AttentionSpec,
        needs: CapacityNeeds,
    ) -> None:
        sizes: dict[str, Any] = {
            "batch_size": capacity.max_batch_size,
            "max_total_tokens": capacity.max_tokens,
            "max_num_pages": capacity.max_pages,
        }
        kernel = graph_prefill_kernel(
            capacity.max_tokens,
            capacity.max_batch_size,
            fa3=has_fa3(device, spec.head_dim),
            window_left=spec.window_left,
        )
        prompts = _make_workspace(needs.prefill.float_bytes, "PagedAttention, prompts", device)
        self.workspaces = [prompts]
        self._wrapper: _Wrapper
        if needs.decode is not None:
            # apart, so that both halves may run at once
            num_bytes = needs.decode.float_bytes
            one_token_rows = _make_workspace(num_bytes, "PagedAttention, one-token rows", device)
            self.workspaces = [one_token_rows, prompts]
            self._wrapper = FlashInferMixedWrapper(
                one_token_rows,
                prompts,
                *shape,
                **sizes,
                max_prefill_rows=most_prompts(capacity.max_tokens, capacity.max_batch_size),
                device=device,
                backend=kernel,
            )
        else:
            self._wrapper = FlashInferPrefillWrapper(
                prompts, *shape, **sizes, device=device, accelerator_graph=True, backend=kernel
            )

    def of(self, step: HostStep) -> _Wrapper:
        """The wrapper for a step."""
        return self._wrapper


def _eager_bytes(spec: AttentionSpec, device: torch.device) -> int:
    """What eager plans are expected to reserve at most; nothing is known of a CPU."""
    return eager_float_bytes(spec, DeviceFacts.of(device)) if device.type == "cuda" else 0


def _needs_of(spec: AttentionSpec, capacity: Capacity, device: torch.device) -> CapacityNeeds:
    """What plans within a capacity are expected to reserve; a CPU counts as a small GPU."""
    facts = DeviceFacts.of(device) if device.type == "cuda" else DeviceFacts(1, (8, 0))
    return capacity_needs(spec, capacity, facts, flashinfer_version(load_flashinfer()))


def _make_workspace(num_bytes: int, name: str, device: torch.device) -> Workspace:
    """A workspace of that many bytes, and of some where none are needed."""
    tensor = torch.zeros(max(num_bytes, 1024), dtype=torch.uint8, device=device)
    return Workspace(tensor, name)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

"""`PagedAttention(backend="flashinfer")`: the wrappers behind the facade's protocol."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.decode import FlashInferDecodeWrapper
from pagedattn.backends.flashinfer.defects import (
    FA2_WINDOW_WITHOUT_MASK,
    FIRST_SUPPORTED,
    Call,
)
from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.kernel_choice import has_fa3
from pagedattn.backends.flashinfer.library import flashinfer_version, load_flashinfer
from pagedattn.backends.flashinfer.paged_wrapper import DTYPES
from pagedattn.backends.flashinfer.prefill import FlashInferPrefillWrapper
from pagedattn.backends.flashinfer.workspace import Workspace, workspace_bytes
from pagedattn.capacity import Capacity
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec


class FlashInferBackend:
    """FlashInfer's kernels, picked by what a step holds.

    Without a capacity a step runs on the decode wrapper or on the prefill wrapper. With one, every
    step runs on what one captured graph can serve.
    """

    capturable = True

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.device = device
        tensor = torch.zeros(_first_workspace_bytes(), dtype=torch.uint8, device=device)
        # One float workspace for all: its content lives from a kernel to its merge, in stream
        # order.
        self._workspace = Workspace(tensor, "PagedAttention")
        self._options: dict[str, Any] = {"sm_scale": spec.scale}
        if spec.logits_soft_cap > 0:
            self._options["logits_soft_cap"] = spec.logits_soft_cap
        shape = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, page_size)
        self._decode: FlashInferDecodeWrapper | None = None
        if capacity is None:
            self._decode = FlashInferDecodeWrapper(self._workspace, *shape, device=device)
            self._prefill = FlashInferPrefillWrapper(self._workspace, *shape, device=device)
        else:
            self._prefill = FlashInferPrefillWrapper(
                self._workspace,
                *shape,
                batch_size=capacity.max_batch_size,
                max_total_tokens=capacity.max_tokens,
                max_num_pages=capacity.max_pages,
                device=device,
                accelerator_graph=True,
            )
        for wrapper in (self._decode, self._prefill):
            if wrapper is not None:
                wrapper.sink_page = None  # the facade's caches need not have one
        self._planned: FlashInferDecodeWrapper | FlashInferPrefillWrapper = self._prefill
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
        call = Call(version, "fa2", spec.causal, spec.window_left)
        if FA2_WINDOW_WITHOUT_MASK.hits(call) and not has_fa3(device, spec.head_dim):
            reasons.append(
                "a window without a causal mask needs its fa3 kernel (compute capability 9.0), as "
                f"fa2 is wrong: {FA2_WINDOW_WITHOUT_MASK.report}"
            )
        return reasons

    def plan(self, page_table: PageTable, qo_indptr: Tensor) -> None:
        """Pick a wrapper for the step and plan it."""
        num_pages = int(page_table.kv_indices.max()) + 1 if page_table.kv_indices.numel() else 0
        step = HostStep(page_table, qo_indptr, num_pages)
        self._planned = self._prefill
        if self._decode is not None and bool((qo_indptr.diff() == 1).all()):
            self._planned = self._decode
        self._planned.plan_step(step, self.spec, self._options)
        if self._planned.write_slots is not None:
            self.write_slots = self._planned.write_slots

    def run(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse`."""
        self._planned.run_into(q, k_pages, v_pages, out, lse)


def _first_workspace_bytes() -> int:
    """What a workspace begins with, as far as nothing declares it: it grows to what plans need."""
    return min(workspace_bytes(), 64 * 1024 * 1024)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

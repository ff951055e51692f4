"""What the prefill and the decode wrapper share: a step that one FlashInfer kernel computes.

A plan has two halves. `prepare` refuses what cannot be right and touches nothing; `plan_prepared`
writes buffers. So whoever plans several wrappers for one step can ask all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.defects import warn_of_defects
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.kernel import Kernel
from pagedattn.backends.flashinfer.library import Version
from pagedattn.backends.flashinfer.paged_wrapper import PagedWrapper, PlannedStep
from pagedattn.backends.flashinfer.planner import PlanCall
from pagedattn.backends.flashinfer.sizes import Capacity
from pagedattn.backends.flashinfer.step_arrays import StepArrays
from pagedattn.backends.flashinfer.token_slots import NO_SLOTS, slot_arrays, token_slots
from pagedattn.backends.flashinfer.workspace import Workspace, check_workspace
from pagedattn.device import on_device
from pagedattn.slots import Slots
from pagedattn.spec import AttentionSpec


class Choice(NamedTuple):
    """What a captured kernel was compiled and launched for."""

    kernel: str
    dtype: torch.dtype
    causal: bool
    window_left: int
    options: tuple[tuple[str, Any], ...]  # by name


class PreparedStep(NamedTuple):
    """A step that may be planned: all that can be refused before anything is touched was not."""

    kernel: Kernel
    requests: HostStep  # what FlashInfer computes, padding included
    spec: AttentionSpec
    options: dict[str, Any]  # for FlashInfer's plan
    choice: Choice | None  # in graph mode


class KernelWrapper(PagedWrapper):
    """A wrapper round one FlashInfer wrapper at a time. Not for use by itself."""

    index_arrays: tuple[str, ...]
    """Fields of a `HostStep` that are staged in front of the slots; `kv_indices` comes last."""

    def __init__(
        self,
        workspace_buffer: Tensor | Workspace,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
        enable_nvtx: bool,
    ) -> None:
        super().__init__(spec, page_size, device, capacity, enable_nvtx)
        self._workspace = workspace_buffer if isinstance(workspace_buffer, Workspace) else None
        self.float_workspace: Tensor = (
            workspace_buffer.tensor if isinstance(workspace_buffer, Workspace) else workspace_buffer
        )
        check_workspace(self.float_workspace, "workspace_buffer")
        if self.float_workspace.device != self.device:
            raise ValueError(
                f"workspace_buffer must be on {self.device}, got {self.float_workspace.device}"
            )
        arrays = {
            **dict.fromkeys(self.index_arrays, torch.int32),
            **slot_arrays(self.accelerator_graph),
            "kv_indices": torch.int32,
        }
        entries = None if capacity is None else self._entries(capacity)
        self._arrays = StepArrays(self.device, arrays, entries)
        self._step: PlannedStep | None = None
        self._frozen: Choice | None = None  # of the first plan in graph mode

    def _entries(self, capacity: Capacity) -> list[int]:
        """Entries of every array at capacity, in the order of the arrays."""
        raise NotImplementedError

    def plan_step(self, step: HostStep, spec: AttentionSpec, options: dict[str, Any]) -> None:
        """See `PagedWrapper`."""
        self._step = None
        prepared = self.prepare(step, spec, options)
        self.plan_prepared(prepared, token_slots(step, prepared.requests.num_tokens))

    def prepare(self, step: HostStep, spec: AttentionSpec, options: dict[str, Any]) -> PreparedStep:
        """Decide how a step is computed, or refuse it; arguments as for `plan_step`."""
        raise NotImplementedError

    def plan_prepared(self, prepared: PreparedStep, slots: Slots = NO_SLOTS) -> None:
        """Send a step's arrays over, and have FlashInfer plan it.

        Args:
            prepared: From `prepare`.
            slots: [tokens], where new tokens belong.
        """
        self._step = None
        kernel, requests, spec, options, choice = prepared
        index_arrays = [getattr(requests, name) for name in self.index_arrays]
        self._upload(index_arrays, slots, requests.kv_indices)
        try:
            if requests.num_tokens:
                kernel.plan(PlanCall(requests, self._arrays, spec, options))
        finally:
            self._arrays.hold()  # FlashInfer copies from page-locked memory too
        self._frozen = choice
        planned = kernel if requests.num_tokens else None
        self._step = PlannedStep(planned, spec, requests.num_tokens, requests.num_pages)

    def run_into(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse` of tensors that have been checked already."""
        step = self._planned_step()
        with self._range("run"):
            if step.kernel is not None:
                step.kernel.run(q, k_pages, v_pages, out, lse)

    def _choice(self, kernel: str, spec: AttentionSpec, options: dict[str, Any]) -> Choice | None:
        """In graph mode what a plan asks for, refused if it is not what graphs captured."""
        if not self.accelerator_graph:
            return None
        of_mask = (spec.dtype, spec.causal, spec.window_left)
        choice = Choice(kernel, *of_mask, tuple(sorted(options.items())))
        if self._frozen is not None and self._frozen != choice:
            raise ValueError(
                f"a graph-mode wrapper keeps what its first plan chose, {self._frozen}, got "
                f"{choice}: build another wrapper"
            )
        return choice

    def _kernel_of(
        self,
        build: Callable[..., Any],
        name: str,
        version: Version,
        buffers: Mapping[str, str],
        *,
        decodes: bool,
    ) -> Kernel:
        """Build a FlashInfer wrapper and put a kernel round it.

        Args:
            build: FlashInfer's class.
            name: "fa2" or "fa3".
            version: FlashInfer's.
            buffers: In graph mode, the arrays that are static buffers, by FlashInfer's names.
            decodes: Whether it is the decode wrapper.
        """
        warn_of_defects(name, version)
        static: dict[str, Any] = {}
        if self.accelerator_graph:
            static = {theirs: self._arrays.fixed(ours) for theirs, ours in buffers.items()}
            static["use_cuda_graph"] = True
        with on_device(self.device):
            wrapper = build(self.float_workspace, "NHD", backend=name, **static)
        return Kernel(
            wrapper,
            name,
            version,
            self._workspace,
            self._arrays.ring,
            decodes=decodes,
            fixed=self.accelerator_graph,
        )

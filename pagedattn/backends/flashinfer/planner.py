"""Asking FlashInfer for a schedule: by its `plan`, and for steps like the last by what that calls.

FlashInfer's `plan` looks up its compiled module, checks its options, and copies every index array
to the device by itself, each to new memory. For a step that differs from the one before in lengths
and pages alone, all of that is known: the arrays are on the device, and what is left is the call of
the module's own `plan`, which builds the schedule. This takes a third of the time. It is done for
the versions whose sources were read for it; for others every step goes through FlashInfer's `plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.library import Version
from pagedattn.backends.flashinfer.step_arrays import StepArrays
from pagedattn.spec import AttentionSpec


class LastArguments(NamedTuple):
    """The last arguments of the fa2 module's plan: num_colocated_ctas, uniform_q_len and on."""

    of_decode: tuple[int | bool, ...]
    of_prefill: tuple[int | bool, ...]


LAST_ARGUMENTS: dict[Version, LastArguments] = {
    (0, 6, 18): LastArguments((0, 0), (0, 0)),
    (0, 7, 4): LastArguments((0, 1, True), (0, 0, False)),
}
"""Of each version whose sources were read."""

_KNOWN_OPTIONS = frozenset({"sm_scale", "logits_soft_cap", "fixed_split_size", "disable_split_kv"})


class PlanCall(NamedTuple):
    """What a plan is made of."""

    step: HostStep
    arrays: StepArrays  # the step's, uploaded
    spec: AttentionSpec  # mask and dtype; its scale and soft cap are not read
    options: dict[str, Any]  # for FlashInfer's plan


class Planner:
    """Plans one FlashInfer wrapper.

    Args:
        wrapper: FlashInfer's prefill or decode wrapper.
        kernel: "fa2" or "fa3".
        version: FlashInfer's.
        decodes: Whether it is the decode wrapper.
        fixed: Whether it is in graph mode: then its static buffers are the uploaded arrays.
        when_settings_change: Called before a plan with other settings than the last one's.
    """

    def __init__(
        self,
        wrapper: Any,
        kernel: str,
        version: Version,
        decodes: bool,
        fixed: bool,
        when_settings_change: Callable[[], None],
    ) -> None:
        self._wrapper = wrapper
        self._kernel = kernel
        self._decodes = decodes
        self._fixed = fixed
        self._when_settings_change = when_settings_change
        self._last_arguments = LAST_ARGUMENTS.get(version)
        self._planned: tuple[Any, ...] | None = None  # what must not differ for a direct plan
        self._one_each: tuple[Tensor, Tensor] | None = None  # 0, 1, 2, ... on host and device

    def plan(self, call: PlanCall) -> None:
        """Have FlashInfer build the schedule of a step and queue its copy to the device."""
        settings = (call.spec, call.options)
        if self._planned == settings:
            self._plan_directly(call)
            return
        self._planned = None
        self._when_settings_change()
        self._plan_through_flashinfer(call)
        if self._last_arguments is not None and _KNOWN_OPTIONS.issuperset(call.options):
            self._planned = settings

    def _plan_through_flashinfer(self, call: PlanCall) -> None:
        arrays, spec = call.arrays, call.spec
        queries: tuple[Tensor, ...] = ()
        options = call.options
        if not self._decodes:
            queries = (arrays.host("qo_indptr"),)
            longest = call.step.max_qo_len
            options = {"causal": spec.causal, "max_token_per_sequence": longest, **options}
        self._wrapper.plan(
            *queries,
            arrays.host("kv_indptr"),
            arrays.on_device("kv_indices"),
            arrays.host("last_page_len"),
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim,
            call.step.page_size,
            window_left=spec.window_left,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
            seq_lens=arrays.host("kv_lens"),
            **options,
        )

    def _plan_directly(self, call: PlanCall) -> None:
        """What FlashInfer's plan does for a step with the settings of the one before."""
        wrapper, step, arrays, spec = self._wrapper, call.step, call.arrays, call.spec
        if self._decodes:
            qo_indptr, qo_indptr_on_device = self._bounds_of_one_each(step.batch_size)
        else:
            qo_indptr = arrays.host("qo_indptr")
            qo_indptr_on_device = arrays.on_device("qo_indptr")
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            qo_indptr,
            arrays.host("kv_indptr"),
            arrays.host("kv_lens"),
            step.num_tokens,
            step.batch_size,
            spec.num_qo_heads,
            spec.num_kv_heads,
            step.page_size,
            self._fixed,
            spec.head_dim,
            spec.head_dim,
            spec.causal and not self._decodes,
            spec.window_left,
            *self._arguments_of_fa2(call.options),
        )
        if self._fixed:
            return
        wrapper._qo_indptr_buf = qo_indptr_on_device
        wrapper._paged_kv_indptr_buf = arrays.on_device("kv_indptr")
        wrapper._paged_kv_indices_buf = arrays.on_device("kv_indices")
        wrapper._paged_kv_last_page_len_buf = arrays.on_device("last_page_len")
        if not self._decodes:
            wrapper._qo_indptr_last = step.num_tokens

    def _arguments_of_fa2(self, options: dict[str, Any]) -> tuple[Any, ...]:
        """What only the fa2 module's plan takes."""
        last = self._last_arguments
        if self._kernel != "fa2" or last is None:
            return ()
        split_size = options.get("fixed_split_size") or -1
        disable_split_kv = options.get("disable_split_kv", False)
        of_wrapper = last.of_decode if self._decodes else last.of_prefill
        return split_size, disable_split_kv, *of_wrapper

    def _bounds_of_one_each(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """i32[batch + 1], 0, 1, 2, ..., on the host and on the device; kept from step to step."""
        if self._one_each is None or self._one_each[0].shape[0] != batch_size + 1:
            host = torch.arange(batch_size + 1, dtype=torch.int32)
            device = self._wrapper.device
            self._one_each = host, torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        return self._one_each

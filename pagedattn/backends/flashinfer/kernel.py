"""One FlashInfer wrapper, planned into its workspaces and run on given tensors.

Everything that must be right whatever is planned lives here: the current device, page-locked
schedule buffers in turn, workspaces that run short, the base of the LSE, and memory layouts that
the kernels would misread.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.defects import (
    EMPTY_WARPS,
    FA2_GRAPH_WITHOUT_SPLIT,
    FINITE_INFINITY,
    LSE_WITHOUT_KEYS,
    Call,
)
from pagedattn.backends.flashinfer.library import Version, plan_options, takes_argument
from pagedattn.backends.flashinfer.overflow import read_overflow
from pagedattn.backends.flashinfer.planner import LAST_ARGUMENTS, PlanCall, Planner
from pagedattn.backends.flashinfer.runner import Runner
from pagedattn.backends.flashinfer.schedules import PinnedSchedules
from pagedattn.backends.flashinfer.workspace import Workspace, WorkspaceTooSmall
from pagedattn.device import on_device
from pagedattn.staging import PinnedRing

_LOAD_BYTES = 16
"""The kernels load this many bytes at once, from addresses that are multiples of it."""


class Kernel:
    """A FlashInfer wrapper that is safe to plan while its last step is still queued.

    Args:
        wrapper: FlashInfer's prefill or decode wrapper.
        name: "fa2" or "fa3".
        version: FlashInfer's.
        workspace: The float workspace that it was built on; `None`: a plain tensor that never
            grows.
        ring: Whose turn it is to plan, on the device where it runs. A plan queues copies, so the
            turn must be held behind it.
        decodes: Whether it is the decode wrapper.
        fixed: Whether a graph may capture it, so that its integer workspace stays where it is once
            a plan has succeeded.
    """

    def __init__(
        self,
        wrapper: Any,
        name: str,
        version: Version,
        workspace: Workspace | None,
        ring: PinnedRing,
        *,
        decodes: bool,
        fixed: bool,
    ) -> None:
        self.wrapper = wrapper
        self.name = name
        self._workspace = workspace
        self._device = ring.device
        self._fixed = fixed
        self._planned_once = False
        self._schedules = PinnedSchedules(wrapper, ring)
        self._runner = Runner(wrapper, version in LAST_ARGUMENTS)
        self._planner = Planner(wrapper, name, version, decodes, fixed, self._runner.forget)
        call = Call(version, name, causal=True, window_left=-1)
        self._finite_infinity = LSE_WITHOUT_KEYS.hits(call)
        self._grid_has_no_end = fixed and FA2_GRAPH_WITHOUT_SPLIT.hits(call)
        # what stands for infinity is known in base 2
        self._natural_log = takes_argument(wrapper.run, "lse_base") and not self._finite_infinity
        self._options = plan_options(wrapper)
        self._accepted: object = None  # memory layouts of the last run that passed the checks

    def check_options(self, options: dict[str, Any], ours: frozenset[str]) -> None:
        """Refuse options that FlashInfer's plan does not know, or that our wrapper sets itself.

        Args:
            options: What a caller wants handed to FlashInfer's plan by name.
            ours: Names that our wrapper fills in.

        Raises:
            TypeError: An option is unknown to this version, or is ours.
        """
        for name in options:
            if name in ours:
                raise TypeError(f"plan() got option {name!r}, which the wrapper sets itself")
            if name not in self._options:
                expected = sorted(self._options - ours)
                raise TypeError(f"plan() got unknown option {name!r}, expected some of {expected}")

    def set_integer_bytes(self, num_bytes: int) -> None:
        """Replace FlashInfer's integer workspace of 8 MiB before the first plan.

        Args:
            num_bytes: What plans will need; if that is wrong, the first plan grows it.
        """
        with on_device(self._device):
            self._schedules.replace_integer_workspace(-(-num_bytes // _LOAD_BYTES) * _LOAD_BYTES)

    def plan(self, call: PlanCall) -> None:
        """Have FlashInfer plan; a too small integer workspace gives way to a larger one."""
        with on_device(self._device):
            clear = self._grid_has_no_end and bool(call.options.get("disable_split_kv"))
            self._schedules.take(clear=clear)
            while not self._try_plan(call):
                self._schedules.take(clear=clear)
            self._schedules.keep_until_copied()
        self._planned_once = True

    def _try_plan(self, call: PlanCall) -> bool:
        try:
            if self._workspace is None:
                self._planner.plan(call)
            else:
                self._workspace.plan(self._planner.plan, call)
        except RuntimeError as error:
            overflow = read_overflow(error.__cause__ or error)
            if overflow is None or not overflow.is_integer:
                raise
            size = self.wrapper._int_workspace_buffer.numel()
            if self._fixed and self._planned_once:
                raise WorkspaceTooSmall(
                    f"FlashInfer's integer workspace of {size} bytes is too small for "
                    f"{overflow.piece} of {overflow.size} bytes, and captured graphs read it where "
                    "it is: plan the largest step first"
                ) from error
            self._schedules.replace_integer_workspace(2 * (size + overflow.size))
            return False
        return True

    def run(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out`, and the natural-log `lse` where it is given.

        Args:
            q: dtype[tokens, num_qo_heads, head_dim], dense inside a token.
            k_pages: dtype[pages, page_size, num_kv_heads, head_dim].
            v_pages: As `k_pages`.
            out: As `q`.
            lse: Contiguous f32[tokens, num_qo_heads].
        """
        strides = (k_pages.stride(), v_pages.stride(), k_pages.dtype)
        if strides != self._accepted:
            self._check_strides(k_pages, v_pages)
            self._accepted = strides
        _check_addresses(k_pages, v_pages)
        dense_out = out
        if not out.is_contiguous():
            dense_out = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        with on_device(self._device):
            if lse is None:
                self._runner.run(_loadable(q), k_pages, v_pages, dense_out)
            else:
                self._run_with_lse(_loadable(q), k_pages, v_pages, dense_out, lse)
            if dense_out is not out:
                out.copy_(dense_out)

    def _run_with_lse(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        options = {"lse_base": "ln"} if self._natural_log else {}
        self.wrapper.run(q, (k_pages, v_pages), out=out, lse=lse, return_lse=True, **options)
        if self._finite_infinity:
            lse.masked_fill_((lse - FINITE_INFINITY).abs_() < EMPTY_WARPS, -torch.inf)
        if not self._natural_log:
            lse.mul_(math.log(2.0))

    def _check_strides(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Refuse caches that the kernels would read wrongly."""
        for pages, name in ((k_pages, "keys"), (v_pages, "values")):
            step = _LOAD_BYTES // pages.element_size()
            if pages.stride(0) % step or pages.stride(1) % step:
                raise ValueError(
                    f"the cache's {name} must have pages and tokens that begin at multiples of "
                    f"{_LOAD_BYTES} bytes, got stride {pages.stride()} of {pages.dtype}"
                )
        if self.name == "fa3" and k_pages.stride() != v_pages.stride():
            raise ValueError(
                "the Hopper kernel (fa3) needs keys and values with the same strides, got "
                f"{k_pages.stride()} and {v_pages.stride()}"
            )


def _loadable(q: Tensor) -> Tensor:
    """The same values where the kernels can load them; a copy only for odd strides or addresses."""
    step = _LOAD_BYTES // q.element_size()
    if q.data_ptr() % _LOAD_BYTES or q.stride(0) % step:
        return q.clone(memory_format=torch.contiguous_format)
    return q


def _check_addresses(k_pages: Tensor, v_pages: Tensor) -> None:
    """Refuse caches that begin where the kernels cannot load."""
    for pages, name in ((k_pages, "keys"), (v_pages, "values")):
        if pages.data_ptr() % _LOAD_BYTES:
            raise ValueError(
                f"the cache's {name} must begin at a multiple of {_LOAD_BYTES} bytes, got address "
                f"{pages.data_ptr()}"
            )

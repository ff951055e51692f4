"""One FlashInfer wrapper, planned into its workspaces and run on given tensors.

Everything that must be right whatever is planned lives here: the current device, page-locked
schedule buffers in turn, workspaces that run short, the base of the LSE, and memory layouts that
the kernels would misread.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.defects import FINITE_INFINITY, LSE_WITHOUT_KEYS, Call
from pagedattn.backends.flashinfer.library import Version, plan_options, takes_argument
from pagedattn.backends.flashinfer.overflow import read_overflow
from pagedattn.backends.flashinfer.schedules import PinnedSchedules
from pagedattn.backends.flashinfer.workspace import Workspace, WorkspaceTooSmall

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
        device: Where it runs.
        fixed: Whether a graph may capture it, so that its integer workspace stays where it is once
            a plan has succeeded.
    """

    def __init__(
        self,
        wrapper: Any,
        name: str,
        version: Version,
        workspace: Workspace | None,
        device: torch.device,
        fixed: bool,
    ) -> None:
        self.wrapper = wrapper
        self.name = name
        self._workspace = workspace
        self._device = device
        self._fixed = fixed
        self._planned_once = False
        self._schedules = PinnedSchedules(wrapper, device)
        call = Call(version, name, causal=True, window_left=-1)
        self._finite_infinity = LSE_WITHOUT_KEYS.hits(call)
        self._natural_log = (
            takes_argument(wrapper.run, "lse_base") and not self._finite_infinity
        )  # the finite one is known in base 2
        self._options = plan_options(wrapper)

    def check_options(self, options: dict[str, Any], ours: frozenset[str]) -> None:
        """Refuse options that FlashInfer's plan does not know, or that our wrapper sets itself.

        Args:
            options: What a caller wants handed to FlashInfer's plan by name.
            ours: Names that our wrapper fills in.

        Raises:
            TypeError: An option is unknown to this version, or is ours.
        """
        for name in options:
            if name not in self._options or name in ours:
                expected = sorted(self._options - ours)
                raise TypeError(f"plan() got unknown option {name!r}, expected some of {expected}")

    def set_integer_bytes(self, num_bytes: int) -> None:
        """Replace FlashInfer's integer workspace of 8 MiB before the first plan.

        Args:
            num_bytes: What plans will need; if that is wrong, the first plan grows it.
        """
        with on_device(self._device):
            self._schedules.replace_integer_workspace(-(-num_bytes // _LOAD_BYTES) * _LOAD_BYTES)

    def plan(self, *args: Any, **options: Any) -> None:
        """Call FlashInfer's plan; a too small integer workspace gives way to a larger one."""
        with on_device(self._device):
            self._schedules.take()
            try:
                while not self._try_plan(args, options):
                    pass
            finally:
                self._schedules.hold()
        self._planned_once = True

    def _try_plan(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        try:
            if self._workspace is None:
                self.wrapper.plan(*args, **options)
            else:
                self._workspace.plan(self.wrapper.plan, *args, **options)
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
        _check_pages(k_pages, v_pages, self.name)
        dense_out = (
            out
            if out.is_contiguous()
            else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        )
        options: dict[str, Any] = {}
        if lse is not None:
            options = {"lse": lse, "return_lse": True}
            if self._natural_log:
                options["lse_base"] = "ln"
        with on_device(self._device):
            self.wrapper.run(_loadable(q), (k_pages, v_pages), out=dense_out, **options)
            if lse is not None and self._finite_infinity:
                lse.masked_fill_(lse == FINITE_INFINITY, -torch.inf)
            if lse is not None and not self._natural_log:
                lse.mul_(math.log(2.0))
            if dense_out is not out:
                out.copy_(dense_out)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current: FlashInfer launches on the current one, not on its tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _loadable(q: Tensor) -> Tensor:
    """The same values where the kernels can load them; a copy only for odd strides or addresses."""
    step = _LOAD_BYTES // q.element_size()
    if q.data_ptr() % _LOAD_BYTES or q.stride(0) % step:
        return q.clone(memory_format=torch.contiguous_format)
    return q


def _check_pages(k_pages: Tensor, v_pages: Tensor, kernel: str) -> None:
    """Refuse caches that the kernels would read wrongly."""
    for pages, name in ((k_pages, "keys"), (v_pages, "values")):
        step = _LOAD_BYTES // pages.element_size()
        if pages.data_ptr() % _LOAD_BYTES or pages.stride(0) % step or pages.stride(1) % step:
            raise ValueError(
                f"the cache's {name} must begin, and have its pages and tokens, at multiples of "
                f"{_LOAD_BYTES} bytes, got address {pages.data_ptr()} and stride {pages.stride()}"
            )
    if kernel == "fa3" and k_pages.stride() != v_pages.stride():
        raise ValueError(
            f"fa3 needs keys and values with one stride, got {k_pages.stride()} and "
            f"{v_pages.stride()}"
        )

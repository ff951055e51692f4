"""Running a planned FlashInfer wrapper: by its `run`, and then by what that calls.

FlashInfer's `run` works out some thirty arguments of its compiled module from what `plan` has set,
in as much time as the module itself takes, and does so for every layer. Until settings change they
stay the same but for the tensors. So the first run is FlashInfer's, and what it hands its module is
kept; later runs put their tensors in the same places. It is done for the versions whose sources
were read for it, see `planner.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

_BUFFERS = (
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_plan_info",
    "_qo_indptr_buf",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
)
"""A FlashInfer wrapper's attributes that a plan may change."""


class _KeptCall(NamedTuple):
    """A call of a module, without what differs from run to run."""

    function: Callable[..., object]
    arguments: list[Any]
    places: tuple[int, ...]  # of q, keys, values and output
    buffers: tuple[tuple[int, str], ...]  # places of a wrapper's attributes


class Runner:
    """Runs one FlashInfer wrapper, without the LSE.

    Args:
        wrapper: FlashInfer's prefill or decode wrapper.
        is_known: Whether its version is one for which this is right.
    """

    def __init__(self, wrapper: Any, is_known: bool) -> None:
        self._wrapper = wrapper
        self._is_known = is_known
        self._kept: _KeptCall | None = None

    def forget(self) -> None:
        """The next run is FlashInfer's own: it was planned with other settings."""
        self._kept = None

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> None:
        """Write `out`; arguments as for FlashInfer's `run`."""
        if self._kept is None:
            self._run_and_keep(q, k_pages, v_pages, out)
            return
        function, arguments, places, buffers = self._kept
        arguments = arguments.copy()
        for place, tensor in zip(places, (q, k_pages, v_pages, out), strict=True):
            arguments[place] = tensor
        for place, name in buffers:
            arguments[place] = getattr(self._wrapper, name)
        function(*arguments)

    def _run_and_keep(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> None:
        wrapper, module = self._wrapper, self._wrapper._cached_module
        calls: list[tuple[Any, ...]] = []

        def paged_run(*arguments: Any) -> object:
            calls.append(arguments)
            return module.paged_run(*arguments)

        if self._is_known:
            wrapper._cached_module = SimpleNamespace(plan=module.plan, paged_run=paged_run)
        try:
            wrapper.run(q, (k_pages, v_pages), out=out)
        finally:
            wrapper._cached_module = module
        if len(calls) == 1:
            self._kept = self._keep(module.paged_run, calls[0], (q, k_pages, v_pages, out))

    def _keep(
        self, function: Callable[..., object], call: tuple[Any, ...], tensors: Sequence[Tensor]
    ) -> _KeptCall | None:
        """What to repeat; `None` if a tensor is not in exactly one place or a buffer is in none."""
        wrapper = self._wrapper
        buffers = [
            (place, name)
            for name in _BUFFERS
            for place, argument in enumerate(call)
            if argument is getattr(wrapper, name)
        ]
        places = [[i for i, argument in enumerate(call) if argument is t] for t in tensors]
        if {name for _, name in buffers} != set(_BUFFERS) or any(len(p) != 1 for p in places):
            return None
        arguments = list(call)
        for place in [p for (p,) in places] + [p for p, _ in buffers]:
            arguments[place] = None  # it keeps no tensor alive
        return _KeptCall(function, arguments, tuple(p for (p,) in places), tuple(buffers))

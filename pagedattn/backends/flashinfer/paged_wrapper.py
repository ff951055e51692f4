"""What all wrappers share: static sizes, the sink page, checks, and `run`.

A wrapper's life: `plan` checks a step, stages its arrays in page-locked memory, sends them over in
one asynchronous copy and has FlashInfer build its schedule; `run` computes one layer. Nothing is
read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.backends.flashinfer.host_step import HostStep, read_step
from pagedattn.backends.flashinfer.kernel import Kernel
from pagedattn.backends.flashinfer.sizes import Capacity
from pagedattn.backends.flashinfer.step_arrays import StepArrays
from pagedattn.backends.flashinfer.token_slots import (
    page_of_slots,
    pages_and_places,
    place_of_slots,
)
from pagedattn.device import NOTHING, is_capturing, resolve_device
from pagedattn.operators import dispatch, register
from pagedattn.slots import Slots
from pagedattn.spec import AttentionSpec
from pagedattn.validation import (
    KVCache,
    check_query,
    halves_of,
    layout_of,
    layout_of_cache,
    split_kv_cache,
)

DTYPES = (torch.bfloat16, torch.float16)
"""What FlashInfer's paged kernels take for queries, keys and values alike."""


class PlannedStep(NamedTuple):
    """What `run` must know of the last good plan."""

    kernel: Kernel | None  # None: there is nothing to compute
    spec: AttentionSpec
    num_rows: int
    num_pages: int  # pages that a cache must have


class PagedWrapper:
    """The part that does not depend on which kernels compute. Not for use by itself.

    Attributes:
        sink_page: The page that one-token padding rows read in graph mode, and where padding may
            be written; its content must stay finite, and no request may own it. `None`: padding
            rows have no key at all. Set it before `plan`.
        token_to_page: i64[tokens] on the device, the page of each planned new token.
        token_to_cache: i64[tokens] on the device, its place in that page:
            `kv_cache_layer[token_to_page, 0, token_to_cache] = k`.
        write_slots: i64[tokens] on the device, both in one, `page * page_size + place`; -1 for a
            token without a place: see `pagedattn.slots.write_slots`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
        enable_nvtx: bool,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.spec = spec
        self.page_size = page_size
        self.device = resolve_device(device)
        self.capacity = capacity
        self.enable_nvtx = enable_nvtx
        self._sink_page: int | None = 0
        self._arrays: StepArrays
        self._specs: dict[tuple[torch.dtype, bool, int], AttentionSpec] = {}
        self.number = register(self)
        self._step: PlannedStep | None = None
        self._has_slots = False
        self._accepted: object = None  # layouts of the last run that passed the checks

    @property
    def accelerator_graph(self) -> bool:
        """Whether buffers are static, so that a captured `run` serves later plans too."""
        return self.capacity is not None

    @property
    def sink_page(self) -> int | None:
        """See the class."""
        return self._sink_page

    @sink_page.setter
    def sink_page(self, page: int | None) -> None:
        if page is not None and page < 0:
            raise ValueError(f"sink_page must be a page id or None, got {page}")
        self._sink_page = page

    @property
    def write_slots(self) -> Tensor | None:
        """See the class."""
        return self._arrays.on_device("write_slots") if self._has_slots else None

    @property
    def token_to_page(self) -> Tensor | None:
        """See the class."""
        return self._of_slots("token_to_page", page_of_slots)

    @property
    def token_to_cache(self) -> Tensor | None:
        """See the class."""
        return self._of_slots("token_to_cache", place_of_slots)

    def _of_slots(
        self, name: str, compute: Callable[[Tensor, int, int | None], Tensor]
    ) -> Tensor | None:
        """A form of the slots: staged in graph mode, for a fixed address; else made when asked."""
        slots = self.write_slots
        if slots is None:
            return None
        if self.accelerator_graph:
            return self._arrays.on_device(name)
        return compute(slots, self.page_size, self.sink_page)

    def _plan(
        self,
        arrays: tuple[Tensor | None, Tensor, Tensor, Tensor],
        kv_lens: Tensor | None,
        mask: tuple[torch.dtype, bool, int],
        options: dict[str, Any],
    ) -> None:
        """Check a step as a caller gives it, and plan it.

        Args:
            arrays: As for `read_step`.
            kv_lens: As for `read_step`.
            mask: As for `_begin_plan`.
            options: For FlashInfer's plan.
        """
        with self._range("plan"):
            spec = self._begin_plan(*mask)
            self.plan_step(read_step(*arrays, self.page_size, kv_lens), spec, options)

    def plan_step(self, step: HostStep, spec: AttentionSpec, options: dict[str, Any]) -> None:
        """Plan a step that has been checked, and say where its new tokens belong.

        Args:
            step: The step.
            spec: Mask and dtype; its scale and soft cap are not read.
            options: For FlashInfer's plan.
        """
        raise NotImplementedError

    def _begin_plan(self, dtype: torch.dtype, causal: bool, window_left: int) -> AttentionSpec:
        """Forget the last plan; return the spec with the planned dtype and mask."""
        self._step = None
        if is_capturing(self.device):
            raise RuntimeError("plan() cannot be captured in a CUDA graph: plan before the capture")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype}")
        key = (dtype, causal, window_left)
        if key not in self._specs:
            self._specs[key] = replace(
                self.spec, dtype=dtype, causal=causal, window_left=window_left
            )
        return self._specs[key]

    def _upload(self, before: Sequence[NDArray[Any]], slots: Slots, last: NDArray[Any]) -> None:
        """Send a step's arrays over.

        Args:
            before: Those that come before the slots.
            slots: [tokens], where new tokens belong.
            last: The last one.
        """
        forms: list[NDArray[Any]] = [slots]
        if self.accelerator_graph:
            forms += pages_and_places(slots, self.page_size, self.sink_page)
        self._arrays.upload([*before, *forms, last])
        self._has_slots = True

    def run(self, q: Tensor, kv_cache_layer: KVCache) -> Tensor:
        """Compute attention of the planned step for one layer.

        Args:
            q: dtype[total_tokens, num_qo_heads, head_dim]; in graph mode always as many rows as the
                wrapper's capacity.
            kv_cache_layer: dtype[max_pages, 2, page_size, num_kv_heads, head_dim], or a pair of
                dtype[max_pages, page_size, num_kv_heads, head_dim].

        Returns:
            As `q`.

        Raises:
            RuntimeError: There is no good plan, or a graph captures a wrapper that is not for it.
            ValueError: A tensor has a wrong shape, dtype or device.
        """
        return self._run(q, kv_cache_layer, None)

    def run_return_lse(self, q: Tensor, kv_cache_layer: KVCache) -> tuple[Tensor, Tensor]:
        """Like `run`, and return the natural-log LSE, f32[total_tokens, num_qo_heads], too."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return self._run(q, kv_cache_layer, lse), lse

    def _run(self, q: Tensor, kv_cache_layer: KVCache, lse: Tensor | None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        dispatch(self, q, kv_cache_layer, out, lse)
        return out

    def run_into(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse` of tensors that have been checked already."""
        raise NotImplementedError

    def run_checked(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Check `q` and one layer's cache (one tensor, or keys and values), then `run_into`."""
        step = self._planned_step()
        if not self.accelerator_graph and is_capturing(self.device):
            raise RuntimeError(
                "a CUDA graph is capturing run() of a wrapper that is not in graph mode: replays "
                "would read stale plans; build it with accelerator_graph=True"
            )
        layouts = (
            step.num_rows, step.num_pages, step.spec, layout_of(q), layout_of_cache(kv_cache),
        )  # fmt: skip
        if layouts != self._accepted:
            check_query(q, "q", step.spec, step.num_rows, self.device)
            split_kv_cache(kv_cache, step.spec, self.page_size, step.num_pages, self.device)
            self._accepted = layouts
        self.run_into(q, *halves_of(kv_cache), out, lse)

    def _planned_step(self) -> PlannedStep:
        if self._step is None:
            raise RuntimeError(
                "there is no plan: call plan() first, and again after one that failed"
            )
        return self._step

    def _range(self, what: str) -> AbstractContextManager[Any]:
        if not self.enable_nvtx:
            return NOTHING
        return torch.cuda.nvtx.range(f"{type(self).__name__}.{what}")

"""What the prefill and the decode wrapper share: sizes, static buffers, checks, and `run`.

A wrapper's life: `plan` checks a step, stages its arrays in page-locked memory, sends them over in
one asynchronous copy and has FlashInfer build its schedule; `run` computes one layer. Nothing is
read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.backends.flashinfer.host_step import pages_and_places
from pagedattn.backends.flashinfer.kernel import NOTHING, Kernel
from pagedattn.backends.flashinfer.step_arrays import StepArrays
from pagedattn.backends.flashinfer.workspace import Workspace
from pagedattn.operators import register, run_into
from pagedattn.spec import AttentionSpec
from pagedattn.validation import check_query, halves_of, layout_of, split_kv_cache

DTYPES = (torch.bfloat16, torch.float16)
"""What FlashInfer's paged kernels take for queries, keys and values alike."""


NO_SLOTS = np.empty(0, dtype=np.int64)
"""In place of `token_slots`, where somebody else says where new tokens belong."""


def slot_arrays(in_graph: bool) -> dict[str, torch.dtype]:
    """Where new tokens belong, among a wrapper's `StepArrays`; in graph mode in every form."""
    names = ("write_slots", "token_to_page", "token_to_cache") if in_graph else ("write_slots",)
    return dict.fromkeys(names, torch.int64)


@dataclass(frozen=True)
class Capacity:
    """Sizes of a graph-mode wrapper, those of FlashInfer's static buffers."""

    batch_size: int
    num_tokens: int
    num_pages: int


class PlannedStep(NamedTuple):
    """What `run` must know of the last good plan."""

    kernel: Kernel | None  # None: there is nothing to compute
    spec: AttentionSpec
    num_rows: int
    num_pages: int  # pages that a cache must have


class PagedWrapper:
    """The part that does not depend on how queries are laid out. Not for use by itself.

    Attributes:
        sink_page: The page that one-token padding rows read in graph mode, and where padding may
            be written; its content must stay finite, and no request may own it. `None`: padding
            rows have no key at all. Set it before `plan`.
        token_to_page: i64[tokens] on the device, the page of each planned new token.
        token_to_cache: i64[tokens] on the device, its place in that page:
            `kv_cache_layer[token_to_page, 0, token_to_cache] = k`.
        write_slots: i64[tokens] on the device, both in one, `page * page_size + place`; -1 for a
            token without a place: see `pagedattn.page_table.write_slots`.
    """

    def __init__(
        self,
        workspace_buffer: Tensor | Workspace,
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
        self.device = full_device(device)
        self.capacity = capacity
        self.enable_nvtx = enable_nvtx
        self.sink_page: int | None = 0
        self._workspace = workspace_buffer if isinstance(workspace_buffer, Workspace) else None
        self.float_workspace: Tensor = (
            workspace_buffer.tensor if isinstance(workspace_buffer, Workspace) else workspace_buffer
        )
        if self.float_workspace.device != self.device:
            raise ValueError(
                f"workspace_buffer must be on {self.device}, got {self.float_workspace.device}"
            )
        self._arrays: StepArrays
        self._specs: dict[tuple[torch.dtype, bool, int], AttentionSpec] = {}
        self.number = register(self)
        self._step: PlannedStep | None = None
        self._has_slots = False
        self._accepted: object = None  # layouts of the last run that passed the checks
        self._frozen: object = None  # what a captured kernel was compiled and launched for

    @property
    def accelerator_graph(self) -> bool:
        """Whether buffers are static, so that a captured `run` serves later plans too."""
        return self.capacity is not None

    @property
    def write_slots(self) -> Tensor | None:
        """See the class."""
        return self._arrays.on_device("write_slots") if self._has_slots else None

    @property
    def token_to_page(self) -> Tensor | None:
        """See the class."""
        if self.capacity is not None and self._has_slots:
            return self._arrays.on_device("token_to_page")
        slots = self.write_slots
        if slots is None:
            return None
        sink_page = -1 if self.sink_page is None else self.sink_page
        page = slots.div(self.page_size, rounding_mode="floor")
        return page.masked_fill_(slots < 0, sink_page)

    @property
    def token_to_cache(self) -> Tensor | None:
        """See the class."""
        if self.capacity is not None and self._has_slots:
            return self._arrays.on_device("token_to_cache")
        slots = self.write_slots
        if slots is None:
            return None
        place = -1 if self.sink_page is None else 0
        return slots.remainder(self.page_size).masked_fill_(slots < 0, place)

    def run(self, q: Tensor, kv_cache_layer: Tensor | tuple[Tensor, Tensor]) -> Tensor:
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

    def run_return_lse(
        self, q: Tensor, kv_cache_layer: Tensor | tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Like `run`, and return the natural-log LSE, f32[total_tokens, num_qo_heads], too."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return self._run(q, kv_cache_layer, lse), lse

    def _run(
        self, q: Tensor, kv_cache_layer: Tensor | tuple[Tensor, Tensor], lse: Tensor | None
    ) -> Tensor:
        kv_cache = _as_sequence(kv_cache_layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if torch.compiler.is_compiling():
            run_into(q, kv_cache, out, lse, self.number)
        else:
            self.run_checked(q, kv_cache, out, lse)
        return out

    def run_into(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse` of tensors that have been checked already."""
        step = self._planned_step()
        with self._range("run"):
            if step.kernel is not None:
                step.kernel.run(q, k_pages, v_pages, out, lse)

    def run_checked(
        self, q: Tensor, kv_cache: Sequence[Tensor], out: Tensor, lse: Tensor | None
    ) -> None:
        """Check `q` and one layer's cache (one tensor, or keys and values), then `run_into`."""
        step = self._planned_step()
        if not self.accelerator_graph and is_capturing(self.device):
            raise RuntimeError(
                "a CUDA graph is capturing run() of a wrapper that is not in graph mode: replays "
                "would read stale plans; build it with accelerator_graph=True"
            )
        layer = kv_cache[0] if len(kv_cache) == 1 else (kv_cache[0], kv_cache[1])
        layouts = (step.num_rows, step.num_pages, step.spec, *map(layout_of, (q, *kv_cache)))
        if layouts != self._accepted:
            check_query(q, "q", step.spec, step.num_rows, self.device)
            split_kv_cache(layer, step.spec, self.page_size, step.num_pages, self.device)
            self._accepted = layouts
        self.run_into(q, *halves_of(layer), out, lse)

    def _planned_step(self) -> PlannedStep:
        if self._step is None:
            raise RuntimeError(
                "there is no plan: call plan() first, and again after one that failed"
            )
        return self._step

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

    def _freeze(self, choice: object) -> None:
        """In graph mode, refuse a plan whose kernel is not the one that graphs captured."""
        if self.accelerator_graph and self._frozen is not None and self._frozen != choice:
            raise ValueError(
                f"a graph-mode wrapper keeps what its first plan chose, {self._frozen}, got "
                f"{choice}: build another wrapper"
            )

    def _upload(
        self, before: Sequence[NDArray[Any]], slots: NDArray[np.int64], last: NDArray[Any]
    ) -> None:
        """Send a step's arrays over.

        Args:
            before: Those that come before the slots.
            slots: i64[tokens], where new tokens belong.
            last: The last one.
        """
        forms: list[NDArray[Any]] = [slots]
        if self.capacity is not None:
            forms += pages_and_places(slots, self.page_size, self.sink_page)
        self._arrays.upload([*before, *forms, last])
        self._has_slots = True

    def _range(self, what: str) -> AbstractContextManager[Any]:
        if not self.enable_nvtx:
            return NOTHING
        return torch.cuda.nvtx.range(f"{type(self).__name__}.{what}")


def _as_sequence(kv_cache_layer: Tensor | tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    return [kv_cache_layer] if isinstance(kv_cache_layer, Tensor) else list(kv_cache_layer)


def full_device(device: torch.device | str) -> torch.device:
    """Name a device fully: "cuda" is the current GPU."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def require_sizes(accelerator_graph: bool, **sizes: int | None) -> None:
    """In graph mode, require every size."""
    missing = [name for name, size in sizes.items() if size is None]
    if accelerator_graph and missing:
        raise ValueError(f"accelerator_graph=True needs {', '.join(missing)}")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_fits(**sizes: tuple[int, int]) -> None:
    """Raise a `ValueError` that names every size, (has, capacity), that the step exceeds."""
    over = [
        f"{name}={most} but the step has {has}" for name, (has, most) in sizes.items() if has > most
    ]
    if over:
        raise ValueError(f"the step does not fit, raise its size: {'; '.join(over)}")

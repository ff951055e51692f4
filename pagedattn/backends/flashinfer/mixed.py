"""Steps that mix one-token rows with prompt rows, each on the kernel that is right for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.backends.flashinfer.decode import FlashInferDecodeWrapper
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.mixed_step import split_step
from pagedattn.backends.flashinfer.paged_wrapper import PagedWrapper, PlannedStep
from pagedattn.backends.flashinfer.prefill import FlashInferPrefillWrapper
from pagedattn.backends.flashinfer.sizes import Capacity, check_step_fits, require_sizes
from pagedattn.backends.flashinfer.step_arrays import StepArrays
from pagedattn.backends.flashinfer.token_slots import slot_arrays, token_slots
from pagedattn.backends.flashinfer.workspace import Workspace, overlap
from pagedattn.device import NOTHING, on_device
from pagedattn.kernels.rows import gather_rows, scatter_rows
from pagedattn.spec import AttentionSpec


class MixedWrapper(PagedWrapper):
    """A decode and a prefill wrapper that share a step; both eager, or both in graph mode.

    Args:
        decode: For the one-token rows.
        prefill: For the others; in graph mode with room for two requests a prompt row.
        max_prefill_rows: In graph mode, the most prompt rows of a step.
    """

    def __init__(
        self,
        decode: FlashInferDecodeWrapper,
        prefill: FlashInferPrefillWrapper,
        max_prefill_rows: int | None,
    ) -> None:
        capacity = None
        if decode.capacity is not None and prefill.capacity is not None:
            capacity = Capacity(
                decode.capacity.batch_size,
                prefill.capacity.num_tokens,
                prefill.capacity.num_pages,
            )
        super().__init__(decode.spec, decode.page_size, decode.device, capacity, False)
        self.max_prefill_rows = max_prefill_rows
        self._decode = decode
        self._prefill = prefill
        # The end of one half's kernel leaves processors idle that the other half can use, where the
        # halves do not share a float workspace. In eager steps this costs the host too much.
        self._side: torch.cuda.Stream | None = None
        apart = not overlap(decode.float_workspace, prefill.float_workspace)
        if capacity is not None and apart and self.device.type == "cuda":
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        sizes = None
        if capacity is not None:
            sizes = [capacity.num_tokens] * 3 + [capacity.batch_size]
        self._arrays = StepArrays(
            self.device, {**slot_arrays(capacity is not None), "places": torch.int64}, sizes
        )
        self._places: Tensor | None = None  # i64[decode rows]  their tokens; negative: padding
        self._decode_rows: tuple[Tensor, Tensor, Tensor] | None = None  # q, out and lse of them

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
        """Make ready for a step; see `FlashInferPrefillWrapper.plan`, whose arguments these are."""
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(arrays, kv_lens, (dtype, causal, window_left), kwargs)

    def plan_step(self, step: HostStep, spec: AttentionSpec, options: dict[str, Any]) -> None:
        """See `PagedWrapper`; new tokens' slots are staged here, not by the halves."""
        self._step = None
        parts = split_step(step, causal=spec.causal, last_gap=self.capacity is None)
        num_rows, num_pages = step.num_tokens, step.num_pages
        if self.capacity is not None:
            prompts = parts.num_prompts, self.max_prefill_rows or 0
            check_step_fits(step, self.capacity, max_prefill_rows=prompts)
            num_rows = self.capacity.num_tokens
            num_pages = max(num_pages, 0 if self.sink_page is None else self.sink_page + 1)
        for half in (self._decode, self._prefill):
            half.sink_page = self.sink_page
        # either may refuse, and the first plan of a half in graph mode fixes its choices
        decode = self._decode.prepare(parts.decode, spec, options)
        prefill = self._prefill.prepare(parts.prefill, spec, options)
        self._decode.plan_prepared(decode)
        self._prefill.plan_prepared(prefill)
        self._stage_rows(step, num_rows, parts.decode_places, spec)
        self._step = PlannedStep(None, spec, num_rows, num_pages)

    def run_into(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse` of tensors that have been checked already."""
        self._planned_step()
        if not q.shape[0] or self._places is None or self._decode_rows is None:
            return
        row_q, row_out, lse_rows = (t[: self._places.shape[0]] for t in self._decode_rows)
        row_lse = None if lse is None else lse_rows
        with self._range("run"), on_device(self.device):
            # Prompts go beside: decode rows have two small kernels more in line, and a kernel that
            # waits for another stream's begins later than one that waits for its own.
            with self._beside():
                self._prefill.run_into(q, k_pages, v_pages, out, lse)
            gather_rows(q, self._places, row_q)
            self._decode.run_into(row_q, k_pages, v_pages, row_out, row_lse)
            if self._side is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._side)
            scatter_rows(row_out, self._places, out)
            if lse is not None:
                scatter_rows(lse_rows, self._places, lse)

    def _beside(self) -> AbstractContextManager[Any]:
        """Work in the context runs beside what the current stream gets from here on."""
        if self._side is None:
            return NOTHING
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._side)

    def _stage_rows(
        self, step: HostStep, num_tokens: int, places: NDArray[np.int64], spec: AttentionSpec
    ) -> None:
        """Send over where decode rows are and where new tokens go; make room for the former."""
        num_rows = len(places)
        if self.capacity is not None:
            num_rows = self.capacity.batch_size
            places = np.pad(places, (0, num_rows - len(places)), constant_values=-1)
        self._upload((), token_slots(step, num_tokens), places)
        self._arrays.hold()
        self._places = self._arrays.on_device("places")
        old = self._decode_rows
        if old is None or old[0].shape[0] < num_rows or old[0].dtype != spec.dtype:
            shape = (num_rows, spec.num_qo_heads, spec.head_dim)
            # zeros: padding rows are never gathered, and a NaN there would look like a fault
            q = torch.zeros(shape, dtype=spec.dtype, device=self.device)
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
            self._decode_rows = (q, torch.empty_like(q), lse)


class FlashInferMixedWrapper(MixedWrapper):
    """A step that mixes one-token rows with prompt rows, at static shapes, for captured graphs.

    The decode wrapper always computes `batch_size` rows: the one-token rows, gathered, attend their
    own pages; the others are padding, which reads one token of the sink page and is dropped. The
    prefill wrapper takes the prompt rows where they are. Every host array is staged in page-locked
    memory that the wrappers own, so planning a step while the last one runs is safe. `q` has
    `max_total_tokens` rows in every step, and output is in the caller's order; it is 0 behind the
    planned rows.

    Args:
        decode_workspace: uint8[bytes] on the device, or a `Workspace`, for the one-token rows.
        prefill_workspace: The same for the prompt rows. With another one than for the one-token
            rows, both run side by side.
        num_qo_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements of one head.
        page_size: Tokens in one page.
        batch_size: The most requests of a step.
        max_total_tokens: The rows of every `q`.
        max_num_pages: The most entries of `paged_kv_indices`.
        max_prefill_rows: The most requests of a step that have more than one token.
        device: Where attention runs.
        backend: The prompt rows' kernel: "fa2", "fa3", or "auto", by measurement and capacity.

    Raises:
        ValueError: A size is out of its range, or FlashInfer cannot compute `head_dim`.
    """

    def __init__(
        self,
        decode_workspace: Tensor | Workspace,
        prefill_workspace: Tensor | Workspace,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        batch_size: int,
        max_total_tokens: int,
        max_num_pages: int,
        max_prefill_rows: int,
        device: torch.device,
        backend: str = "auto",
    ) -> None:
        require_sizes(True, max_prefill_rows=max_prefill_rows)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        decode = FlashInferDecodeWrapper(
            decode_workspace,
            *shape,
            batch_size=batch_size,
            max_num_pages=max_num_pages,
            device=device,
            accelerator_graph=True,
        )
        prefill = FlashInferPrefillWrapper(
            prefill_workspace,
            *shape,
            batch_size=2 * max_prefill_rows,
            max_total_tokens=max_total_tokens,
            max_num_pages=max_num_pages,
            device=device,
            accelerator_graph=True,
            backend=backend,
        )
        super().__init__(decode, prefill, max_prefill_rows)

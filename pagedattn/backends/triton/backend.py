"""`TritonBackend`: one packed copy and one launch to plan, at most two launches to run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from pagedattn.backends.triton.schedule import (
    ScheduleBuffers,
    ScheduleSize,
    size_of_capacity,
    size_of_step,
)
from pagedattn.backends.triton.tiles import (
    DeviceFacts,
    choose_hopper_tiles,
    choose_tiles,
    padded_head_dim,
)
from pagedattn.capacity import Capacity
from pagedattn.kernels import gluon_names
from pagedattn.kernels.long import long_attention
from pagedattn.kernels.plan import build_schedule
from pagedattn.kernels.short import short_attention
from pagedattn.page_table import PageTable, write_slots
from pagedattn.spec import AttentionSpec
from pagedattn.staging import Staging

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30  # a window that no context reaches, small enough to add to in 32 bits


@dataclass(frozen=True, eq=False)
class _StepTensors:
    """The step's table on the device, as the kernels read it."""

    qo_indptr: Tensor  # i32[batch + 1]
    kv_indptr: Tensor  # i32[batch + 1]
    kv_lens: Tensor  # i32[batch]
    kv_indices: Tensor  # i32[pages]


class TritonBackend:
    """Paged attention in Triton, on NVIDIA GPUs and in Triton's interpreter on a CPU."""

    capturable = True

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.capacity = capacity
        facts = _device_facts(device)
        self.tiles = choose_tiles(spec, facts)
        self._long_hopper = None
        hopper_tiles = choose_hopper_tiles(spec, page_size, facts)
        if hopper_tiles is not None:
            # not at the top: where it is not chosen, Gluon may be missing
            from pagedattn.backends.triton.long_hopper import LongHopper

            self._long_hopper = LongHopper(spec, page_size, hopper_tiles, self.tiles.programs)
        self._constants = _kernel_constants(spec, page_size)
        self._window_left = spec.window_left if 0 <= spec.window_left < UNBOUNDED else UNBOUNDED
        self._numbers = (spec.num_kv_heads, self._window_left, *_score_factors(spec))
        if capacity is None:
            self._staging = Staging(device)
            self._buffers = self._allocate(ScheduleSize(0, 0))
        else:
            self._staging = Staging(device, _capacity_bytes(capacity))
            self._buffers = self._allocate(size_of_capacity(capacity, spec, self.tiles))

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, page_size: int, device: torch.device
    ) -> list[str]:
        """Head sizes above 256, and machines that Triton does not run on."""
        reasons = []
        if not 1 <= spec.head_dim <= 256:
            reasons.append(f"head_dim={spec.head_dim}: the kernels compute 1 to 256")
        if device.type == "cpu" and not triton.knobs.runtime.interpret:
            reasons.append(
                "on a CPU Triton only interprets: set TRITON_INTERPRET=1 before triton is imported"
            )
        if device.type not in ("cpu", "cuda"):
            reasons.append(f"device {device}: expected an NVIDIA GPU, or a CPU for the interpreter")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            reasons.append(
                f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
            )
        return reasons

    def plan(self, page_table: PageTable, qo_indptr: Tensor) -> None:
        """Copy the table to the device and build the schedule there."""
        num_padded = None if self.capacity is None else self.capacity.max_tokens
        slots = write_slots(page_table, qo_indptr, num_padded)
        num_rows = np.diff(qo_indptr.numpy()).astype(np.int64) * self.spec.group_size
        kv_indptr, kv_lens = page_table.kv_indptr, page_table.kv_lens
        if self.capacity is not None:
            # the rows past the last token are one more request, which has no keys
            qo_indptr = _append(qo_indptr, self.capacity.max_tokens)
            kv_indptr = _append(kv_indptr, int(kv_indptr[-1]))
            kv_lens = _append(kv_lens, 0)
        else:
            size = size_of_step(num_rows, self.tiles)
            if not self._buffers.size.covers(size):
                self._buffers = self._allocate(size)
        *step, self.write_slots = self._staging.upload(
            [qo_indptr, kv_indptr, kv_lens, page_table.kv_indices, slots]
        )
        self._step = _StepTensors(*step)
        # a captured launch must serve every later step, so with a capacity both kernels always run
        self._has_short = self.capacity is not None or bool(
            ((num_rows > 0) & (num_rows <= self.tiles.max_short_rows)).any()
        )
        self._has_long = self.capacity is not None or bool(
            (num_rows > self.tiles.max_short_rows).any()
        )
        if self._has_short or self._has_long:
            self._launch_plan(len(kv_lens))

    def run(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Launch the kernel of each list that is not empty."""
        tensors = (q, k_pages, v_pages, out, out if lse is None else lse)
        strides = (q.stride(0), out.stride(0), *k_pages.stride()[:2], *v_pages.stride()[:2])
        buffers = self._buffers
        table = (
            self._step.qo_indptr,
            self._step.kv_indptr,
            self._step.kv_indices,
            self._step.kv_lens,
            buffers.header,
        )
        numbers = (*self._numbers, *strides)
        constants = {**self._constants, "WITH_LSE": lse is not None}
        if self._has_short:
            tiles = self.tiles.short
            short_attention[(self.tiles.short_programs,)](
                *tensors, *table, buffers.short_ends, buffers.short_first,
                buffers.piece_acc, buffers.piece_ml, buffers.arrived, *numbers,
                **constants, ROWS=tiles.rows, TILE=tiles.tile, STAGES=tiles.num_stages,
                num_warps=tiles.num_warps,
            )  # fmt: skip
        if self._has_long and not self._run_long_hopper(q, k_pages, v_pages, out, lse, table):
            tiles = self.tiles.long
            long_attention[(self.tiles.long_programs,)](
                *tensors, *table, buffers.long_units, *numbers,
                **constants, ROWS=tiles.rows, TILE=tiles.tile, STAGES=tiles.num_stages,
                num_warps=tiles.num_warps,
            )  # fmt: skip

    def _run_long_hopper(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        lse: Tensor | None,
        table: tuple[Tensor, ...],
    ) -> bool:
        """Launch the Gluon kernel if it was chosen and reaches this cache; whether it did."""
        if self._long_hopper is None:
            return False
        k_map = self._long_hopper.map_of(k_pages)
        v_map = self._long_hopper.map_of(v_pages)
        if k_map is None or v_map is None:
            return False
        schedule = (*table, self._buffers.long_units, self._buffers.long_turns)
        self._long_hopper.launch((k_map, v_map), (q, out, lse), schedule, self._numbers)
        return True

    def _launch_plan(self, batch_size: int) -> None:
        buffers, tiles = self._buffers, self.tiles
        build_schedule[(1,)](
            self._step.qo_indptr, self._step.kv_lens,
            buffers.header, buffers.short_ends, buffers.short_first, buffers.long_units,
            buffers.long_ends, buffers.arrived,
            batch_size, self.spec.num_kv_heads, self.spec.group_size, self._window_left,
            tiles.short_programs, batch_size.bit_length(),
            tiles.max_short_rows, tiles.short.rows, tiles.short.tile, tiles.long.rows,
            tiles.min_chunk, BLOCK=1024, num_warps=8,
        )  # fmt: skip

    def _allocate(self, size: ScheduleSize) -> ScheduleBuffers:
        return ScheduleBuffers.allocate(size, self.spec, self.tiles, self.device)


def _device_facts(device: torch.device) -> DeviceFacts:
    if device.type == "cuda" and not triton.knobs.runtime.interpret:
        return DeviceFacts(
            torch.cuda.get_device_properties(device).multi_processor_count,
            compute_capability=torch.cuda.get_device_capability(device),
            missing_gluon=gluon_names.MISSING,
        )
    return DeviceFacts(num_sms=0, interpreted=True)


def _score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """The two factors of `scale_scores`, with log2(e) folded in."""
    if spec.logits_soft_cap > 0:
        return spec.scale / spec.logits_soft_cap, spec.logits_soft_cap * LOG2_E
    return spec.scale * LOG2_E, 0.0


def _kernel_constants(spec: AttentionSpec, page_size: int) -> dict[str, int | bool]:
    """Compile-time arguments that both attention kernels share."""
    return {
        "GROUP": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "D_PAD": padded_head_dim(spec.head_dim),
        "PAGE_SIZE": page_size,
        "CAUSAL": spec.causal,
        "HAS_WINDOW": spec.window_left >= 0,
        "SOFT_CAP": spec.logits_soft_cap > 0,
        "UPCAST": triton.knobs.runtime.interpret,
    }


def _capacity_bytes(capacity: Capacity) -> tuple[int, ...]:
    """Bytes of what `plan` uploads, in its order, with one request more for the padding rows."""
    batch_size = capacity.max_batch_size + 1
    return (
        4 * (batch_size + 1),
        4 * (batch_size + 1),
        4 * batch_size,
        4 * capacity.max_pages,
        8 * capacity.max_tokens,
    )


def _append(values: Tensor, last: int) -> Tensor:
    return torch.cat([values, values.new_tensor([last])])

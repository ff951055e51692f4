"""`TritonBackend`: one packed copy and one launch to plan, at most two launches to run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from pagedattn.backends.triton.arguments import (
    PLAN_BLOCK,
    PLAN_WARPS,
    blocks_of,
    kernel_constants,
    plan_numbers,
    tile_constants,
)
from pagedattn.backends.triton.bindings import Bindings
from pagedattn.backends.triton.launch import Launch, LayerPointers, Pointers
from pagedattn.backends.triton.schedule import ScheduleBuffers, StepSize, max_pieces
from pagedattn.backends.triton.side_by_side import SideBySide
from pagedattn.backends.triton.tiles import (
    DeviceFacts,
    KernelTiles,
    Tiles,
    choose_hopper_tiles,
    choose_kinds,
)
from pagedattn.capacity import Capacity
from pagedattn.kernels import gluon_names
from pagedattn.kernels.ingest import ingest_table
from pagedattn.kernels.long import long_attention
from pagedattn.kernels.plan import build_schedule
from pagedattn.kernels.short import short_attention
from pagedattn.page_table import Int32s, PageTable
from pagedattn.spec import AttentionSpec
from pagedattn.staging import Staging
from pagedattn.validation import KVCache


class _ShortKernel(NamedTuple):
    """The kernel for short queries, with blocks of one height."""

    tiles: Tiles
    launches: tuple[Launch, ...]  # without and with LSE
    plan_numbers: tuple[int, ...]


class TritonBackend:
    """Paged attention in Triton, on NVIDIA GPUs and in Triton's interpreter on a CPU."""

    capturable = True
    no_batch_invariance = None
    no_device_plan = None

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
        batch_invariant: bool = False,
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.device = device
        self.capacity = capacity
        self.batch_invariant = batch_invariant
        facts = _device_facts(device)
        hopper_tiles = choose_hopper_tiles(spec, page_size, facts)
        kinds = choose_kinds(spec, facts, capacity, batch_invariant, hopper_tiles)
        self.tiles = kinds[0]
        self._may_have_long = capacity is None or (
            capacity.max_tokens * spec.group_size > self.tiles.max_short_rows
        )
        self._hopper = None
        if hopper_tiles is not None:
            # not at the top: where it is not chosen, Gluon may be missing
            from pagedattn.backends.triton.hopper import Hopper

            self._hopper = Hopper(spec, page_size, hopper_tiles, device)
            share = self.tiles.long_share
            self._side_by_side = SideBySide(device, share, self.tiles.programs - share)
        self._make_launches(kinds)
        self._num_rows = 0
        self._size = StepSize(1, 0, 0) if capacity is None else StepSize.of_capacity(capacity)
        self._staging = Staging(device, [])
        self._make_room(self._size)

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

    def plan(self, page_table: PageTable, qo_indptr: Int32s) -> None:
        """Copy the table to the device and build the schedule there."""
        kv_indptr, kv_indices, kv_lens = page_table.arrays
        # one request more than there are: the rows past the last token, which have no keys
        batch_size, num_pages = len(qo_indptr), len(kv_indices)
        if self.capacity is None:
            self._num_rows = int(qo_indptr[-1])
            longest = self._make_lists(qo_indptr[1:] - qo_indptr[:-1])
            self._choose_blocks(longest * self.spec.group_size)
            size = StepSize(batch_size, self._num_rows, num_pages)
            if not self._size.covers(size):
                self._make_room(self._size.grown_to(size))
        else:  # a captured launch must serve every later step, so both kernels always run
            self._num_rows = self.capacity.max_tokens
            self._has_short, self._has_long = True, self._may_have_long
        self._staging.upload(
            (qo_indptr, kv_indptr, kv_lens, kv_indices), (self._num_rows, num_pages, 0)
        )
        if self._num_rows:
            self._build_schedule(batch_size)

    def plan_device(self, page_table: PageTable, qo_indptr: Tensor, num_pages: int) -> None:
        """Copy a table on the device to where kernels read it, and build the schedule."""
        self._num_rows = self._size.num_rows  # all of the capacity
        batch_size, num_entries = page_table.batch_size, page_table.kv_indices.shape[0]
        self._has_short, self._has_long = True, self._may_have_long
        source = Pointers.of(
            qo_indptr, page_table.kv_indptr, page_table.kv_lens, page_table.kv_indices
        )
        self._ingest(
            1 + blocks_of(num_entries), source, self._bindings.table,
            batch_size, self._num_rows, num_entries, num_pages, self.page_size,
        )  # fmt: skip
        self._build_schedule(batch_size + 1)

    @property
    def write_slots(self) -> Tensor:
        """i64[tokens], with a capacity i64[max_tokens]: see the protocol."""
        return self._buffers.slots[: self._num_rows]

    def run(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Launch the kernel of each list that is not empty, or the one for both."""
        layer = LayerPointers.of(q, kv_cache, out, out if lse is None else lse)
        strides = (q.stride(0), out.stride(0), *layer.page_strides)
        arguments = self._bindings.of_layer(strides)
        with_lse, hopper = lse is not None, self._hopper
        launch_short = partial(
            self._short.launches[with_lse], self.tiles.short_chunks * self.spec.num_kv_heads,
            layer, arguments.short,
        )  # fmt: skip
        is_joint = self.tiles.joint
        if hopper and (self._has_long or is_joint) and (maps := hopper.maps.of(layer)):
            launch = hopper.prepare(maps, with_lse, layer, arguments.hopper)
            if not self._has_short or (is_joint and not hopper.gathers(maps)):
                launch(self.tiles.programs)
            elif self._has_long:
                self._side_by_side.run(launch_short, launch)
            else:
                launch_short()
            return
        if self._has_short:
            launch_short()
        if self._has_long:
            self._long[with_lse](self.tiles.long_programs, layer, arguments.long)

    def _make_lists(self, qo_lens: np.ndarray) -> int:
        """Say whether the short and the long list will have entries; return the longest short."""
        max_len = self.tiles.max_short_rows // self.spec.group_size  # of a short request
        longest = int(qo_lens[qo_lens.argmax()]) if self._num_rows else 0
        self._has_long = longest > max_len
        if self._has_long:
            longest = int(np.where(qo_lens <= max_len, qo_lens, 0).max())
        self._has_short = longest > 0
        return longest

    def _choose_blocks(self, num_rows: int) -> None:
        """Take the short kernel for requests of up to so many rows, or that of long ones too."""
        kernels = self._short_kernels
        if self._has_long and kernels[-1].tiles.joint:
            kernels = kernels[-1:]
        for kernel in kernels:  # the last where none is high enough
            if kernel.tiles.short.rows >= num_rows:
                break
        self._short, self.tiles = kernel, kernel.tiles

    def _build_schedule(self, batch_size: int) -> None:
        self._plan(
            1 + blocks_of(self._num_rows), self._bindings.table, self._bindings.schedule,
            batch_size, self._num_rows, batch_size.bit_length(), *self._short.plan_numbers,
        )  # fmt: skip

    def _make_launches(self, kinds: Sequence[Tiles]) -> None:
        """Say once how each kernel is launched."""
        spec = self.spec
        invariant: dict[str, int | bool] = {"BATCH_INVARIANT": self.batch_invariant}
        block = {"BLOCK": PLAN_BLOCK}
        warps = {"num_warps": PLAN_WARPS[self.batch_invariant]}
        self._ingest = Launch(ingest_table, self.device, block, warps)
        self._plan = Launch(build_schedule, self.device, invariant | block, warps)
        self._long = self._launches_of(long_attention, self.tiles.long, {})
        self._short_kernels = [
            _ShortKernel(
                tiles,
                self._launches_of(short_attention, tiles.short, invariant),
                plan_numbers(spec, self.page_size, tiles),
            )
            for tiles in kinds
        ]
        self._short = self._short_kernels[0]

    def _launches_of(
        self, kernel: Any, tiles: KernelTiles, more: dict[str, int | bool]
    ) -> tuple[Launch, ...]:
        """Of one attention kernel, without and with LSE."""
        constants = kernel_constants(self.spec, self.page_size) | tile_constants(tiles) | more
        return tuple(
            Launch(
                kernel,
                self.device,
                constants | {"WITH_LSE": with_lse},
                {"num_warps": tiles.num_warps},
            )
            for with_lse in (False, True)
        )

    def _make_room(self, size: StepSize) -> None:
        """New buffers; torch frees the old in stream order."""
        self._size = size
        self._staging.make_room(size.table_entries())
        num_pieces = None
        if self.batch_invariant:
            num_pieces = max_pieces(size, self.spec, self.page_size, self.tiles)
        kinds = [kernel.tiles for kernel in self._short_kernels]
        self._buffers = ScheduleBuffers.allocate(size, num_pieces, self.spec, kinds, self.device)
        self._bindings = Bindings(self.spec, kinds[-1], self._staging.arrays, self._buffers)


def _device_facts(device: torch.device) -> DeviceFacts:
    if device.type == "cuda" and not triton.knobs.runtime.interpret:
        properties = torch.cuda.get_device_properties(device)
        return DeviceFacts(
            properties.multi_processor_count,
            compute_capability=torch.cuda.get_device_capability(device),
            missing_gluon=gluon_names.MISSING,
            l2_bytes=properties.L2_cache_size,
        )
    return DeviceFacts(num_sms=0, interpreted=True)

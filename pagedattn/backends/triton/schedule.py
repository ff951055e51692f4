"""The device memory of a schedule: what a step needs, and buffers that grow or stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedattn.backends.triton.tiles import Tiles, padded_head_dim
from pagedattn.capacity import Capacity
from pagedattn.spec import AttentionSpec


@dataclass(frozen=True)
class ScheduleSize:
    """Upper bounds of a step's schedule."""

    batch_size: int
    long_units: int  # row blocks of all long requests

    def covers(self, other: ScheduleSize) -> bool:
        """Whether buffers of this size hold a schedule of the other."""
        return self.batch_size >= other.batch_size and self.long_units >= other.long_units


def size_of_step(num_rows: np.ndarray, tiles: Tiles) -> ScheduleSize:
    """Bounds for requests of these packed query rows, i64[batch]."""
    long_rows = num_rows[num_rows > tiles.max_short_rows]
    return ScheduleSize(len(num_rows), int((-(-long_rows // tiles.long.rows)).sum()))


def size_of_capacity(capacity: Capacity, spec: AttentionSpec, tiles: Tiles) -> ScheduleSize:
    """Bounds for every step that fits a capacity, with one request more for the padding rows."""
    batch_size = capacity.max_batch_size + 1
    rows = capacity.max_tokens * spec.group_size
    return ScheduleSize(batch_size, batch_size + rows // tiles.long.rows)


@dataclass(frozen=True, eq=False)
class ScheduleBuffers:
    """Device memory of a schedule and of the pieces of shared row blocks; see `kernels/plan.py`."""

    size: ScheduleSize
    header: Tensor  # i32[3]
    short_ends: Tensor  # i32[batch + 1]
    short_first: Tensor  # i32[short programs]
    long_units: Tensor  # i32[long_units, 2]
    long_ends: Tensor  # i32[batch + 1]
    long_turns: Tensor  # i32[2]: long units taken, programs done; 0 between launches
    arrived: Tensor  # i32[short programs]
    piece_acc: Tensor  # f32[2 * short programs, rows, padded head_dim]
    piece_ml: Tensor  # f32[2 * short programs, 2, rows]

    @classmethod
    def allocate(
        cls, size: ScheduleSize, spec: AttentionSpec, tiles: Tiles, device: torch.device
    ) -> ScheduleBuffers:
        """Make buffers: the plan kernel writes all that the others read, but for long_turns."""

        def int32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def float32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        programs, rows = tiles.short_programs, tiles.short.rows
        return cls(
            size=size,
            header=int32(3),
            short_ends=int32(size.batch_size + 1),
            short_first=int32(programs),
            long_units=int32(size.long_units, 2),
            long_ends=int32(size.batch_size + 1),
            long_turns=int32(2).zero_(),
            arrived=int32(programs),
            piece_acc=float32(2 * programs, rows, padded_head_dim(spec.head_dim)),
            piece_ml=float32(2 * programs, 2, rows),
        )

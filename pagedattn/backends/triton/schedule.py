"""The device memory of a schedule: how much a step needs, and buffers that grow or stay."""

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
    """Upper bounds of a schedule; the units of both lists, before the KV heads multiply them."""

    batch_size: int
    short_units: int
    long_units: int

    def covers(self, other: ScheduleSize) -> bool:
        """Whether buffers of this size hold a schedule of the other."""
        return (
            self.batch_size >= other.batch_size
            and self.short_units >= other.short_units
            and self.long_units >= other.long_units
        )


def size_of_step(qo_lens: np.ndarray, spec: AttentionSpec, tiles: Tiles) -> ScheduleSize:
    """Bounds for these query lengths.

    Every row block has at least one unit, and the chunk is such that splitting adds at most
    `short_programs` units over all KV heads: see `kernels/plan.py`.
    """
    rows = qo_lens.astype(np.int64) * spec.group_size
    short = rows <= tiles.max_short_rows
    short_blocks = -(-rows[short] // tiles.short.rows)
    num_short = int(short_blocks.sum())
    if num_short:
        num_short += -(-tiles.short_programs // spec.num_kv_heads)
    num_long = int((-(-rows[~short] // tiles.long.rows)).sum())
    return ScheduleSize(len(qo_lens), num_short, num_long)


def size_of_capacity(capacity: Capacity, spec: AttentionSpec, tiles: Tiles) -> ScheduleSize:
    """Bounds for every step that fits a capacity, its padding request included."""
    batch_size = capacity.max_batch_size + 1
    rows = capacity.max_tokens * spec.group_size
    most_blocks = -(-tiles.max_short_rows // tiles.short.rows)  # of one short request
    short_blocks = min(batch_size * most_blocks, batch_size + rows // tiles.short.rows)
    splits = -(-tiles.short_programs // spec.num_kv_heads)
    return ScheduleSize(
        batch_size, short_blocks + splits, batch_size + rows // tiles.long.rows
    )


@dataclass(frozen=True, eq=False)
class ScheduleBuffers:
    """Device memory of a schedule and of the pieces of split row blocks."""

    size: ScheduleSize
    header: Tensor  # i32[4]
    short_units: Tensor  # i32[short_units, 4]
    long_units: Tensor  # i32[long_units, 2]
    per_request: Tensor  # i32[3, batch]  first short entry, first long entry, splits
    arrived: Tensor  # i32[short_units * kv_heads]
    piece_acc: Tensor  # f32[short_units * kv_heads, rows, padded head_dim]
    piece_ml: Tensor  # f32[short_units * kv_heads, 2, rows]

    @classmethod
    def allocate(
        cls, size: ScheduleSize, spec: AttentionSpec, tiles: Tiles, device: torch.device
    ) -> ScheduleBuffers:
        """Make uninitialised buffers: the plan kernel writes what the others read."""

        def int32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def float32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        pieces = size.short_units * spec.num_kv_heads
        rows, width = tiles.short.rows, padded_head_dim(spec.head_dim)
        return cls(
            size=size,
            header=int32(4),
            short_units=int32(size.short_units, 4),
            long_units=int32(size.long_units, 2),
            per_request=int32(3, size.batch_size),
            arrived=int32(pieces),
            piece_acc=float32(pieces, rows, width),
            piece_ml=float32(pieces, 2, rows),
        )

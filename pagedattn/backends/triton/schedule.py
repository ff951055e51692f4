"""The device memory of a schedule: what a step needs, and buffers that grow or stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.backends.triton.tiles import Tiles, padded_head_dim
from pagedattn.capacity import Capacity
from pagedattn.spec import AttentionSpec


class StepSize(NamedTuple):
    """Upper bounds of a step, the request of the padding rows included."""

    batch_size: int
    num_rows: int  # of q and out
    num_pages: int  # entries of kv_indices

    @classmethod
    def of_capacity(cls, capacity: Capacity) -> StepSize:
        """The size that holds every step which fits."""
        return cls(capacity.max_batch_size + 1, capacity.max_tokens, capacity.max_pages)

    def table_entries(self) -> list[int]:
        """Entries of qo_indptr, kv_indptr, kv_lens and kv_indices."""
        return [self.batch_size + 1, self.batch_size + 1, self.batch_size, self.num_pages]

    def covers(self, other: StepSize) -> bool:
        """Whether what holds every step of this size holds every one of the other."""
        return (
            self.batch_size >= other.batch_size
            and self.num_rows >= other.num_rows
            and self.num_pages >= other.num_pages
        )

    def grown_to(self, other: StepSize) -> StepSize:
        """This size, with room for `other` and later steps: pages grow by a few a step."""
        return StepSize(
            max(self.batch_size, 2 * other.batch_size),
            max(self.num_rows, 2 * other.num_rows),
            max(self.num_pages, other.num_pages * 5 // 4),
        )


def max_long_blocks(size: StepSize, group_size: int, tiles: Tiles) -> int:
    """Row blocks of all long requests, at most: entries of long_units."""
    return size.batch_size + size.num_rows * group_size // tiles.long.rows


def max_pieces(size: StepSize, spec: AttentionSpec, page_size: int, tiles: Tiles) -> int:
    """Pieces of a batch-invariant step's shared row blocks, at most, over all KV heads.

    A request of `t` tiles and `b` blocks has at most `t / (min_piece * b) + 1` pieces a block: over
    all requests the sum of `t / min_piece + b`. Its last tile may be used in part only.
    """
    num_tiles = size.num_pages * page_size // tiles.short.tile + size.batch_size
    num_blocks = size.batch_size + size.num_rows * spec.group_size // tiles.short.rows
    num_blocks = min(num_blocks, -(-tiles.max_short_rows // tiles.short.rows) * size.batch_size)
    return (num_tiles // tiles.min_piece + num_blocks) * spec.num_kv_heads


@dataclass(frozen=True, eq=False)
class ScheduleBuffers:
    """Device memory of a schedule, and of the pieces of shared row blocks.

    What is in the schedule says `kernels/plan.py`, what in which piece `kernels/merge.py`.
    """

    header: Tensor  # i32[4]
    short_ends: Tensor  # i32[batch + 1]
    short_begin: Tensor  # i32[short chunks + 1]
    short_first: Tensor  # i32[short chunks]
    piece_ends: Tensor  # i32[batch + 1]
    long_units: Tensor  # i32[long blocks, 2]
    long_ends: Tensor  # i32[batch + 1]  long blocks before each request: scratch of the plan
    turns: Tensor  # i32[3]  of the Gluon kernel, see there; 0 between launches
    arrived: Tensor  # i32[short chunks * heads, or pieces]  pieces that are there of a block
    slots: Tensor  # i64[rows]  of the new tokens
    piece_acc: Tensor  # f32[rows of all pieces, padded head_dim]
    piece_ml: Tensor  # f32[twice the rows of all pieces]

    @classmethod
    def allocate(
        cls,
        size: StepSize,
        num_pieces: int | None,
        spec: AttentionSpec,
        kinds: Sequence[Tiles],
        device: torch.device,
    ) -> ScheduleBuffers:
        """Make buffers: the plan kernel writes all that the others read, but for turns.

        Args:
            size: The largest step.
            num_pieces: As `max_pieces`, where batch-invariant; `None`: two for a chunk and head.
            spec: The layer kind.
            kinds: Its tiles, for each height of short blocks that steps may have.
            device: Where the buffers are.
        """

        def int32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def float32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        chunks = max(tiles.short_chunks for tiles in kinds)
        programs = chunks * spec.num_kv_heads
        piece_rows = max(
            (num_pieces or 2 * tiles.short_chunks * spec.num_kv_heads) * tiles.short.rows
            for tiles in kinds
        )
        return cls(
            header=int32(4),
            short_ends=int32(size.batch_size + 1),
            short_begin=int32(chunks + 1),
            short_first=int32(chunks),
            piece_ends=int32(size.batch_size + 1),
            long_units=int32(max_long_blocks(size, spec.group_size, kinds[0]), 2),
            long_ends=int32(size.batch_size + 1),
            turns=int32(3).zero_(),
            arrived=int32(programs if num_pieces is None else num_pieces),
            slots=torch.empty(size.num_rows, dtype=torch.int64, device=device),
            piece_acc=float32(piece_rows, padded_head_dim(spec.head_dim)),
            piece_ml=float32(2 * piece_rows),
        )

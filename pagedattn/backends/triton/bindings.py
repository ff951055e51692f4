"""Where an object's table and schedule are, described once for many launches.

They stay where they are until the buffers are made anew. What else launches of one kind of layer
have in common, the strides of its tensors, is described once for each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pagedattn.backends.triton.arguments import score_factors, window_of
from pagedattn.backends.triton.launch import MAX_REMEMBERED, Pointers
from pagedattn.backends.triton.schedule import ScheduleBuffers
from pagedattn.backends.triton.tiles import Tiles
from pagedattn.spec import AttentionSpec


class LayerArguments(NamedTuple):
    """Of each kernel, the arguments that layers with the same strides have in common."""

    short: Pointers
    long: Pointers
    hopper: Pointers


class Bindings:
    """Arguments of all launches that read or write the table and the schedule.

    Args:
        spec: The kind of layer.
        tiles: As chosen for steps of it that have long queries.
        table: qo_indptr, kv_indptr, kv_lens and kv_indices on the device.
        buffers: The schedule.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        tiles: Tiles,
        table: Sequence[Tensor],
        buffers: ScheduleBuffers,
    ) -> None:
        qo_indptr, kv_indptr, kv_lens, kv_indices = table
        self.table = Pointers.of(*table)
        self.schedule = Pointers.of(
            buffers.header, buffers.short_ends, buffers.short_begin, buffers.short_first,
            buffers.piece_ends, buffers.long_units, buffers.long_ends, buffers.slots,
            buffers.arrived,
        )  # fmt: skip
        read = (qo_indptr, kv_indptr, kv_indices, kv_lens, buffers.header)
        self._short = Pointers.of(
            *read, buffers.short_ends, buffers.short_begin, buffers.short_first,
            buffers.piece_ends, buffers.piece_acc, buffers.piece_ml, buffers.arrived,
        )  # fmt: skip
        self._long = Pointers.of(*read, buffers.long_units)
        self._hopper = Pointers.of(
            *read, buffers.short_ends, buffers.short_begin, buffers.short_first,
            buffers.long_units, buffers.piece_acc, buffers.piece_ml, buffers.arrived, buffers.turns,
        )  # fmt: skip
        numbers = (spec.num_kv_heads, window_of(spec))
        self._short_numbers = (*numbers, tiles.min_piece, *score_factors(spec))
        self._long_numbers = (*numbers, *score_factors(spec))
        chunks = tiles.short_chunks if tiles.joint else 0
        self._hopper_numbers = (chunks, tiles.long_share, tiles.programs)
        self._of_layers: dict[tuple[int, ...], LayerArguments] = {}

    def of_layer(self, strides: tuple[int, ...]) -> LayerArguments:
        """What launches of layers with these strides have in common.

        Args:
            strides: Of q and out, of pages and tokens of K, and of pages and tokens of V.
        """
        arguments = self._of_layers.get(strides)
        if arguments is None:
            if len(self._of_layers) >= MAX_REMEMBERED:
                self._of_layers.clear()
            arguments = self._of_layers[strides] = self._make(strides)
        return arguments

    def _make(self, strides: tuple[int, ...]) -> LayerArguments:
        return LayerArguments(
            self._short.before(*self._short_numbers, *strides),
            self._long.before(*self._long_numbers, *strides),
            self._hopper.before(*self._long_numbers, *strides, *self._hopper_numbers),
        )

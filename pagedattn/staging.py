"""Page-locked staging: host arrays to the device in one asynchronous copy that is safe to repeat.

A host buffer that a queued copy still reads must not be rewritten. Each buffer here has an event
that is recorded behind its copy and asked before the buffer is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: every array starts at a multiple of this, so any dtype up to 16 bytes may be viewed."""

INT_BYTES = 4


class PinnedRing:
    """Page-locked buffers, each with the event behind which it may be rewritten.

    A turn ends when the next step finds the buffer still read.

    Args:
        device: Where copies go; on a CPU the memory is ordinary.
        num_buffers: Buffers. One whose copies are still queued is waited for when its turn comes.
    """

    def __init__(self, device: torch.device, num_buffers: int = 4) -> None:
        self.device = device
        self.turn = 0
        self._on_gpu = device.type == "cuda"
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._copied: list[torch.Event | None] = [None] * num_buffers
        self._held = False  # the event of this turn is behind all that reads its buffer

    def next(self, num_bytes: int) -> Tensor:
        """Return u8[at least num_bytes] that no queued copy reads; `hold` says when copies are."""
        stays = self._may_stay(num_bytes)
        self._held = False
        if stays:
            return self._buffers[self.turn]
        self.turn = (self.turn + 1) % len(self._buffers)
        event = self._copied[self.turn]
        if event is not None:
            event.synchronize()
        if self._buffers[self.turn].numel() < num_bytes:
            self._buffers[self.turn] = torch.empty(
                -(-2 * num_bytes // ALIGNMENT) * ALIGNMENT,
                dtype=torch.uint8,
                pin_memory=self._on_gpu,
            )
        return self._buffers[self.turn]

    def hold(self) -> None:
        """Keep the buffer of the last `next` until all work queued so far is done."""
        if self._on_gpu:
            event = self._copied[self.turn]
            if event is None:
                event = self._copied[self.turn] = torch.Event(self.device, enable_timing=False)
            if torch.cuda.current_device() == self.device.index:
                event.record()  # on the current stream, in a quarter of the time of asking for it
            else:
                event.record(torch.cuda.current_stream(self.device))
            self._held = True

    def _may_stay(self, num_bytes: int) -> bool:
        """Whether this turn's buffer is free already: what was just used is in nearer caches.

        Only once the next buffer is there: making one may wait for the GPU, so that is not left
        for when copies queue up.
        """
        event = self._copied[self.turn]
        following = self._buffers[(self.turn + 1) % len(self._buffers)]
        if event is None or not self._held or following.numel() < num_bytes:
            return False
        return self._buffers[self.turn].numel() >= num_bytes and event.query()

    def wait(self) -> None:
        """Wait until every buffer may be rewritten."""
        for event in self._copied:
            if event is not None:
                event.synchronize()


class Staging:
    """Copies lists of int32 arrays to fixed places on a device, each list packed into one copy.

    Args:
        device: Where the arrays go. On a CPU the packed copy is an ordinary one.
        room: As for `make_room`.
        num_buffers: Host buffers in turn. A buffer whose copy is still queued is waited for, so
            this many uploads may be queued before one waits.
    """

    arrays: list[Tensor]
    """i32[room]: each array on the device, with the values of the last upload in front."""

    def __init__(self, device: torch.device, room: Sequence[int], num_buffers: int = 4) -> None:
        self.device = device
        self._ring = PinnedRing(device, num_buffers)
        self.make_room(room)

    def make_room(self, room: Sequence[int]) -> None:
        """Move the arrays to new memory; torch frees the old in stream order, after its copies.

        Args:
            room: Entries that each array of a list has room for. An upload is not checked against
                it: `Capacity` does that, or whoever calls this.
        """
        *starts, self._num_bytes = offsets_of([INT_BYTES * entries for entries in room])
        self._starts = [start // INT_BYTES for start in starts]
        size = self._num_bytes // INT_BYTES
        self._quantum = max(size // 64, 1)
        self._packed = torch.empty(size, dtype=torch.int32, device=self.device)
        self.arrays = [
            self._packed[start : start + entries]
            for start, entries in zip(self._starts, room, strict=True)
        ]
        self._hosts: dict[int, tuple[Tensor, Any]] = {}
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def upload(self, arrays: Sequence[NDArray[np.int32]], last: Sequence[int]) -> None:
        """Copy host arrays to the device, in the current stream's order, without waiting for it.

        Args:
            arrays: i32[n] each; read before this returns. The copy ends behind the last of them, so
                the one whose room is rarely used belongs there.
            last: For each array but the last, one value to follow the array's.
        """
        host, ints = self._next_host()
        for array, start, value in zip(arrays, self._starts, last, strict=False):
            end = start + len(array)
            ints[start:end] = array
            ints[end] = value
        start, ids = self._starts[-1], arrays[-1]
        end = start + len(ids)
        ints[start:end] = ids
        target, source = self._copy_of(host, end)
        target.copy_(source, non_blocking=True)
        self._ring.hold()

    def _next_host(self) -> tuple[Tensor, Any]:
        """A page-locked i32 buffer, and a memoryview of it: numpy writes slices slower."""
        buffer = self._ring.next(self._num_bytes)
        turn = self._ring.turn
        if turn not in self._hosts:
            ints = buffer.view(torch.int32)
            self._hosts[turn] = ints, ints.numpy().data
        return self._hosts[turn]

    def _copy_of(self, host: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The fronts of both buffers, at least `end` entries: few sizes, so that they are kept."""
        key = (self._ring.turn, -(-end // self._quantum))
        copy = self._copies.get(key)
        if copy is None:
            end = min(key[1] * self._quantum, self._packed.shape[0])
            copy = self._copies[key] = self._packed[:end], host[:end]
        return copy


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and last the size of all."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets

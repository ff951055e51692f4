"""A step's arrays in fixed places, on the host and on the device, uploaded in one copy.

FlashInfer's planners read some arrays on the host, and its kernels read them on the device; others
the device alone needs. All lie in page-locked memory here, and nothing is built anew for a step but
views of the lengths that changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.staging import PinnedRing, offsets_of

NUM_BUFFERS = 2
"""Page-locked buffers in turn: a step is planned while the one before it is queued."""

_COPY_SIZES = 64
"""Sizes that a copy may have, at least: views of so few are kept from step to step."""


class StepArrays:
    """Named arrays of a step.

    Args:
        device: Where they go.
        dtypes: One an array, by name. The copy of an upload ends behind the last entry of the last
            array, so the one whose capacity is rarely used belongs there.
        capacity: Entries of each array, in the same order: then no address ever changes. `None`:
            there is room for whatever comes, and addresses change when more room is made.
    """

    def __init__(
        self, device: torch.device, dtypes: dict[str, torch.dtype], capacity: Sequence[int] | None
    ) -> None:
        self.device = device
        self.ring = PinnedRing(device, NUM_BUFFERS)
        self._dtypes = dtypes
        self._lengths = dict.fromkeys(dtypes, 0)
        self._capacity = [0] * len(dtypes)
        self._make_room([1] * len(dtypes) if capacity is None else capacity)

    def upload(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Copy a step's arrays to the device, in the current stream's order, without waiting.

        `hold` must follow, behind all that FlashInfer queues of them.

        Args:
            arrays: In the order of `dtypes`; integers are converted to those dtypes.
        """
        lengths = [len(array) for array in arrays]
        if any(map(int.__gt__, lengths, self._capacity)):
            self._make_room([max(2 * n, c) for n, c in zip(lengths, self._capacity, strict=True)])
        buffer = self.ring.next(self._offsets[-1])
        turn = self.ring.turn
        if turn not in self._staged:
            self._host[turn] = self._views_of(buffer)
            self._staged[turn] = [tensor.numpy() for tensor in self._host[turn].values()]
        for staged, array, length in zip(self._staged[turn], arrays, lengths, strict=True):
            staged[:length] = array
        num_bytes = self._offsets[-2] + lengths[-1] * self._last_itemsize
        target, source = self._copy_of(buffer, num_bytes)
        target.copy_(source, non_blocking=True)
        self._lengths = dict(zip(self._dtypes, lengths, strict=True))

    def hold(self) -> None:
        """Keep the page-locked arrays of the last upload until all work queued so far is done."""
        self.ring.hold()

    def host(self, name: str) -> Tensor:
        """The page-locked array of the last upload."""
        return self._front(name, self.ring.turn, self._host[self.ring.turn])

    def on_device(self, name: str) -> Tensor:
        """The device's array of the last upload."""
        return self._front(name, -1, self._on_device)

    def fixed(self, name: str) -> Tensor:
        """The device's array at its full capacity."""
        return self._on_device[name]

    def _front(self, name: str, place: int, arrays: dict[str, Tensor]) -> Tensor:
        """As many entries as the last upload had; the same tensor while that number stays."""
        key, length = (name, place), self._lengths[name]
        front = self._fronts.get(key)
        if front is None or front.shape[0] != length:
            front = self._fronts[key] = arrays[name][:length]
        return front

    def _copy_of(self, buffer: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
        """The fronts of both buffers, at least `num_bytes` long."""
        size = self._offsets[-1]
        quantum = max(size // _COPY_SIZES, 1)
        end = min(-(-num_bytes // quantum) * quantum, size)
        key = (self.ring.turn, end)
        if key not in self._copies:
            self._copies[key] = self._buffer[:end], buffer[:end]
        return self._copies[key]

    def _make_room(self, capacity: Sequence[int]) -> None:
        """New memory; torch frees the device's old memory in stream order."""
        sizes = [
            n * dtype.itemsize for n, dtype in zip(capacity, self._dtypes.values(), strict=True)
        ]
        self._capacity = list(capacity)
        self._offsets = offsets_of(sizes)
        self._last_itemsize = list(self._dtypes.values())[-1].itemsize
        self._buffer = torch.empty(self._offsets[-1], dtype=torch.uint8, device=self.device)
        self._on_device = self._views_of(self._buffer)
        # of every page-locked buffer, by its turn: tensors to hand out, and the same to write
        self._host: dict[int, dict[str, Tensor]] = {}
        self._staged: dict[int, list[NDArray[Any]]] = {}
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._fronts: dict[tuple[str, int], Tensor] = {}

    def _views_of(self, buffer: Tensor) -> dict[str, Tensor]:
        """Every array at its full capacity, in a packed buffer."""
        views = {}
        for (name, dtype), offset, entries in zip(
            self._dtypes.items(), self._offsets[:-1], self._capacity, strict=True
        ):
            views[name] = buffer[offset : offset + entries * dtype.itemsize].view(dtype)
        return views

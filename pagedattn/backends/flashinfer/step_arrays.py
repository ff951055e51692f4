"""A step's arrays in fixed places, on the host and on the device, uploaded in one copy.

FlashInfer's planners read some arrays on the host, and copy them to the device themselves; others
the device alone needs. Both kinds lie in page-locked memory here, and nothing is built anew for a
step but views of its lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedattn.staging import PinnedRing, offsets_of


class StepArrays:
    """Named arrays of a step.

    Args:
        device: Where they go.
        dtypes: One an array, by name. The copy of an upload ends with the last entry of the last
            array, so the one whose capacity is rarely used belongs there.
        capacity: Entries of each array, in the same order: then no address ever changes. `None`:
            there is room for whatever comes, and addresses change when more room is made.
    """

    def __init__(
        self, device: torch.device, dtypes: dict[str, torch.dtype], capacity: Sequence[int] | None
    ) -> None:
        self.device = device
        self._dtypes = dtypes
        self._ring = PinnedRing(device)
        self._lengths = dict.fromkeys(dtypes, 0)
        self._capacity = [0] * len(dtypes)
        # of every page-locked buffer, by its turn: arrays to write, and tensors to hand out
        self._host: dict[int, tuple[list[NDArray[Any]], dict[str, Tensor]]] = {}
        self._make_room([1] * len(dtypes) if capacity is None else capacity)

    def upload(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Copy a step's arrays to the device, in the current stream's order, without waiting.

        Args:
            arrays: In the order of `dtypes`, with those dtypes.
        """
        lengths = [len(array) for array in arrays]
        if any(map(int.__gt__, lengths, self._capacity)):
            self._make_room([max(2 * n, c) for n, c in zip(lengths, self._capacity, strict=True)])
        buffer = self._ring.next(self._offsets[-1])
        if self._ring.turn not in self._host:
            tensors = self._views_of(buffer)
            self._host[self._ring.turn] = [t.numpy() for t in tensors.values()], tensors
        for staged, array in zip(self._host[self._ring.turn][0], arrays, strict=True):
            staged[: len(array)] = array
        num_bytes = self._offsets[-2] + arrays[-1].nbytes
        self._buffer[:num_bytes].copy_(buffer[:num_bytes], non_blocking=True)
        self._lengths = dict(zip(self._dtypes, lengths, strict=True))
        self.hold()

    def hold(self) -> None:
        """Keep the page-locked arrays of the last upload until all work queued so far is done.

        Called again behind FlashInfer's own copies of them.
        """
        self._ring.hold()

    def host(self, name: str) -> Tensor:
        """The page-locked array of the last upload."""
        return self._host[self._ring.turn][1][name][: self._lengths[name]]

    def on_device(self, name: str) -> Tensor:
        """The device's array of the last upload."""
        return self._device_tensors[name][: self._lengths[name]]

    def fixed(self, name: str) -> Tensor:
        """The device's array at its full capacity."""
        return self._device_tensors[name]

    def _make_room(self, capacity: Sequence[int]) -> None:
        """New memory; torch frees the old in stream order, and keeps account of its copies."""
        sizes = [
            n * dtype.itemsize for n, dtype in zip(capacity, self._dtypes.values(), strict=True)
        ]
        self._capacity = list(capacity)
        self._offsets = offsets_of(sizes)
        self._buffer = torch.empty(self._offsets[-1], dtype=torch.uint8, device=self.device)
        self._device_tensors = self._views_of(self._buffer)
        self._ring = PinnedRing(self.device)
        self._host.clear()

    def _views_of(self, buffer: Tensor) -> dict[str, Tensor]:
        """Every array at its full capacity, in a packed buffer."""
        views = {}
        for (name, dtype), offset, entries in zip(
            self._dtypes.items(), self._offsets[:-1], self._capacity, strict=True
        ):
            views[name] = buffer[offset : offset + entries * dtype.itemsize].view(dtype)
        return views

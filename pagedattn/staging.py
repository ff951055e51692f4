"""Page-locked staging: host arrays to the device in one asynchronous copy that is safe to repeat.

A host buffer that a queued copy still reads must not be rewritten. Each buffer here has an event
that is recorded behind its copy and asked before the buffer is used again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: every array starts at a multiple of this, so any dtype up to 16 bytes may be viewed."""


class PinnedRing:
    """Page-locked buffers in turn, each with the event behind which it may be rewritten.

    Args:
        device: Where copies go; on a CPU the memory is ordinary.
        num_buffers: Buffers. One whose copies are still queued is waited for when its turn comes.
    """

    def __init__(self, device: torch.device, num_buffers: int = 4) -> None:
        self.device = device
        self.turn = 0
        self._on_gpu = device.type == "cuda"
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers

    def next(self, num_bytes: int) -> Tensor:
        """Return u8[at least num_bytes] that no queued copy reads; the same one while it fits."""
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
                event = self._copied[self.turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))


class Staging:
    """Copies lists of host tensors to a device, each list packed into one copy.

    Args:
        device: Where the tensors go. On a CPU the packed copy is an ordinary one.
        capacity_bytes: Size in bytes of every tensor of a list, at most. When given, the device
            buffer is made once and the tensors' addresses never change; otherwise every `upload`
            returns fresh memory. Sizes are not checked against a step here: `Capacity` does that.
        num_buffers: Host buffers in turn. A buffer whose copy is still queued is waited for, so
            this many uploads may be queued before one waits.
    """

    def __init__(
        self,
        device: torch.device,
        capacity_bytes: Sequence[int] | None = None,
        num_buffers: int = 4,
    ) -> None:
        self.device = device
        self._ring = PinnedRing(device, num_buffers)
        self._offsets: list[int] | None = None
        self._fixed: Tensor | None = None
        if capacity_bytes is not None:
            self._offsets = offsets_of(capacity_bytes)
            self._fixed = torch.empty(self._offsets[-1], dtype=torch.uint8, device=device)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to the device, in the current stream's order, without waiting for it.

        Args:
            tensors: Contiguous host tensors of dtypes that numpy has; read before this returns.

        Returns:
            Device tensors of the same shapes and dtypes.
        """
        sizes = [t.numel() * t.element_size() for t in tensors]
        offsets = self._offsets or offsets_of(sizes)
        num_bytes = offsets[len(tensors) - 1] + sizes[-1]
        host = self._ring.next(offsets[-1])
        staged = host.numpy()  # numpy: a torch operation on a few bytes costs five times as much
        for tensor, offset, size in zip(tensors, offsets, sizes, strict=False):
            staged[offset : offset + size] = tensor.numpy().reshape(-1).view(np.uint8)
        if self._fixed is None:
            device_buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=self.device)
        else:
            device_buffer = self._fixed
        device_buffer[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
        self._ring.hold()
        return _views(device_buffer, list(zip(offsets, tensors, strict=False)))


def _views(buffer: Tensor, layout: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """What lies in a packed buffer, shaped like the tensors that were packed."""
    whole = {tensor.dtype: buffer.view(tensor.dtype) for _, tensor in layout}
    views = []
    for offset, tensor in layout:
        begin = offset // tensor.element_size()
        view = whole[tensor.dtype][begin : begin + tensor.numel()]
        views.append(view if tensor.ndim == 1 else view.view(tensor.shape))
    return views


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and last the size of all."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets

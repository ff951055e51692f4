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
        self._on_gpu = device.type == "cuda"
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0
        self._layout: list[tuple[int, Tensor]] = []  # of the last upload: offset and tensor
        self._offsets: list[int] | None = None
        self._fixed: Tensor | None = None
        if capacity_bytes is not None:
            self._offsets = _offsets_of(capacity_bytes)
            self._fixed = torch.empty(self._offsets[-1], dtype=torch.uint8, device=device)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to the device, in the current stream's order, without waiting for it.

        Args:
            tensors: Contiguous host tensors of dtypes that numpy has; read before this returns.

        Returns:
            Device tensors of the same shapes and dtypes.
        """
        sizes = [t.numel() * t.element_size() for t in tensors]
        offsets = self._offsets or _offsets_of(sizes)
        num_bytes = offsets[len(tensors) - 1] + sizes[-1]
        host = self._next_buffer(offsets[-1])
        staged = host.numpy()  # numpy: a torch operation on a few bytes costs five times as much
        for tensor, offset, size in zip(tensors, offsets, sizes, strict=False):
            staged[offset : offset + size] = tensor.numpy().reshape(-1).view(np.uint8)
        self._layout = list(zip(offsets, tensors, strict=False))
        if self._fixed is None:
            device_buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=self.device)
        else:
            device_buffer = self._fixed
        device_buffer[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
        self.hold()
        return _views(device_buffer, self._layout)

    @property
    def host(self) -> list[Tensor]:
        """Page-locked copies of the last uploaded tensors; see `hold`."""
        return _views(self._buffers[self._turn], self._layout)

    def fixed_buffers(self, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """The device tensors that uploads fill, each at its full capacity, one a dtype.

        Raises:
            ValueError: No `capacity_bytes` were given, so there are no fixed buffers.
        """
        if self._fixed is None or self._offsets is None:
            raise ValueError("fixed_buffers needs a Staging with capacity_bytes")
        bounds = zip(self._offsets[:-1], self._offsets[1:], dtypes, strict=True)
        return [self._fixed[begin:end].view(dtype) for begin, end, dtype in bounds]

    def hold(self) -> None:
        """Keep the buffer of the last upload until all work queued so far is done.

        For a library that queues further asynchronous copies of `host`: call this behind them.
        """
        if self._on_gpu:
            event = self._copied[self._turn]
            if event is None:
                event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))

    def _next_buffer(self, num_bytes: int) -> Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = torch.empty(
                -(-2 * num_bytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, pin_memory=self._on_gpu
            )
        return self._buffers[self._turn]


def _views(buffer: Tensor, layout: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """What lies in a packed buffer, shaped like the tensors that were packed."""
    whole = {tensor.dtype: buffer.view(tensor.dtype) for _, tensor in layout}
    views = []
    for offset, tensor in layout:
        begin = offset // tensor.element_size()
        view = whole[tensor.dtype][begin : begin + tensor.numel()]
        views.append(view if tensor.ndim == 1 else view.view(tensor.shape))
    return views


def _offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and last the size of all."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets

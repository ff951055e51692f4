"""Page-locked buffers for FlashInfer's schedules, in turn.

FlashInfer's plan writes its schedule into a page-locked buffer of its wrapper and queues a copy to
the device. A second plan would rewrite that buffer while the first copy is still queued, and the
first step would run on a mixture of both schedules. So each plan gets another buffer, and one whose
copy is still queued is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_pin_memory_int_workspace_buffer"  # the same in every supported version


class PinnedSchedules:
    """Gives one FlashInfer wrapper a free page-locked buffer before every plan.

    Args:
        wrapper: A FlashInfer wrapper; its own buffer becomes the first of the turn.
        device: Where its steps run.
        num_buffers: Plans whose copies may be queued before the next plan waits.

    Raises:
        RuntimeError: This version keeps its page-locked buffer elsewhere, so it cannot be
            exchanged.
    """

    def __init__(self, wrapper: Any, device: torch.device, num_buffers: int = 2) -> None:
        if not isinstance(getattr(wrapper, _ATTRIBUTE, None), Tensor):
            raise RuntimeError(
                f"this version of FlashInfer has no {type(wrapper).__name__}.{_ATTRIBUTE}: "
                "planning a step while another is queued would not be safe with it"
            )
        self._wrapper = wrapper
        self._device = device
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._buffers[0] = getattr(wrapper, _ATTRIBUTE)
        self._turn = -1

    def take(self) -> None:
        """Give the wrapper a buffer that no queued copy reads."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        size = self._wrapper._int_workspace_buffer.numel()
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < size:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._buffers[self._turn] = buffer
        setattr(self._wrapper, _ATTRIBUTE, buffer)

    def hold(self) -> None:
        """Keep the buffer of the last plan until the copy that it queued is done."""
        self._buffers[self._turn] = getattr(self._wrapper, _ATTRIBUTE)
        if self._device.type == "cuda":
            event = self._copied[self._turn]
            if event is None:
                event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))

    def replace_integer_workspace(self, num_bytes: int) -> None:
        """Give the wrapper a new integer workspace; never once a graph has captured the old.

        Waits for the copies that are queued: the allocator of page-locked memory knows nothing of
        them, and would give away what they still read.
        """
        for event in self._copied:
            if event is not None:
                event.synchronize()
        wrapper = self._wrapper
        fresh = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(wrapper._float_workspace_buffer, fresh)
        self._buffers = [None] * len(self._buffers)
        self._buffers[self._turn] = getattr(wrapper, _ATTRIBUTE)  # one of that size, of its own

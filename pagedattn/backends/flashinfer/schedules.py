"""Page-locked buffers for FlashInfer's schedules, in turn.

FlashInfer's plan writes its schedule into a page-locked buffer of its wrapper and queues a copy to
the device. A second plan would rewrite that buffer while the first copy is still queued, and the
first step would run on a mixture of both schedules. So each plan gets the buffer of its turn, and
turns are those of the ring that stages the step's own arrays: who has one may rewrite the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedattn.device import current_stream_handle
from pagedattn.staging import PinnedRing

_ATTRIBUTE = "_pin_memory_int_workspace_buffer"  # the same in every supported version


class PinnedSchedules:
    """Gives one FlashInfer wrapper a free page-locked buffer before every plan.

    Args:
        wrapper: A FlashInfer wrapper; its own buffer becomes the first.
        ring: Whose turn it is; whoever plans takes a turn before and holds it behind.

    Raises:
        RuntimeError: This version keeps its page-locked buffer elsewhere, so it cannot be
            exchanged.
    """

    def __init__(self, wrapper: Any, ring: PinnedRing) -> None:
        if not isinstance(getattr(wrapper, _ATTRIBUTE, None), Tensor):
            raise RuntimeError(
                f"this version of FlashInfer has no {type(wrapper).__name__}.{_ATTRIBUTE}: "
                "planning a step while another is queued would not be safe with it"
            )
        self._wrapper = wrapper
        self._ring = ring
        self._buffers: dict[int, Tensor] = {}  # by turn
        self._first_bytes = torch.empty(1, dtype=torch.uint8, device=ring.device)
        self._known: set[tuple[int, int]] = set()  # turns and streams that the allocator knows
        self._spare: Tensor | None = getattr(wrapper, _ATTRIBUTE)

    def take(self, *, clear: bool) -> None:
        """Give the wrapper the buffer of this turn, which no queued copy reads.

        Args:
            clear: Whether a plan must find nothing of earlier ones in it.
        """
        turn = self._ring.turn
        if turn not in self._buffers:
            self._buffers[turn] = self._make_buffer()
        buffer = self._buffers[turn]
        if clear:
            buffer.zero_()
        setattr(self._wrapper, _ATTRIBUTE, buffer)

    def keep_until_copied(self) -> None:
        """Have the allocator of page-locked memory know that a queued copy reads this buffer.

        It follows torch's copies alone. Were the wrapper dropped before FlashInfer's copy is done,
        the memory would go to somebody else, and the step would run on what they write there. So
        one byte of it is copied by torch. That once tells the allocator of the stream: when the
        buffer is dropped, it waits for all that the stream has queued by then.
        """
        if self._ring.device.type != "cuda":
            return
        use = (self._ring.turn, current_stream_handle(self._ring.device))
        if use not in self._known:
            buffer = getattr(self._wrapper, _ATTRIBUTE)
            self._first_bytes.copy_(buffer[:1], non_blocking=True)
            self._known.add(use)

    def replace_integer_workspace(self, num_bytes: int) -> None:
        """Give the wrapper a new integer workspace; never once a graph has captured the old.

        Waits for the copies that are queued: the allocator of page-locked memory knows nothing of
        them, and would give away what they still read.
        """
        self._ring.wait()
        wrapper = self._wrapper
        fresh = torch.empty(num_bytes, dtype=torch.uint8, device=self._ring.device)
        wrapper.reset_workspace_buffer(wrapper._float_workspace_buffer, fresh)
        self._buffers = {}
        self._known = set()
        self._spare = getattr(wrapper, _ATTRIBUTE)  # one of that size, of its own

    def _make_buffer(self) -> Tensor:
        """The wrapper's own buffer where no turn has it yet, else another one of its size."""
        buffer, self._spare = self._spare, None
        if buffer is None:
            size = self._wrapper._int_workspace_buffer.numel()
            pinned = self._ring.device.type == "cuda"
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return buffer

"""Reading FlashInfer's complaint that a workspace is too small.

Its planners reserve pieces of a float workspace (partial results) and of an integer workspace (the
schedule). Both overflow with one wording, so the name of the piece tells which one it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMPLAINT = re.compile(
    r"allocating memory for (?P<piece>\w+) with size (?P<size>\d+) "
    r"and alignment (?P<alignment>\d+), but only (?P<left>\d+) bytes available"
)
# Everything else that FlashInfer's attention planners reserve is part of a schedule.
_FLOAT_PIECES = frozenset(
    {
        "batch_prefill_tmp_v",
        "batch_prefill_tmp_s",
        "batch_decode_tmp_v",
        "batch_decode_tmp_s",
        "holistic_partial_o",
        "holistic_partial_lse",
        "mla_partial_o",
        "mla_partial_lse",
    }
)


@dataclass(frozen=True)
class Overflow:
    """One piece that did not fit."""

    piece: str  # FlashInfer's name of it
    size: int  # bytes that it needs
    alignment: int  # bytes
    left: int  # bytes that were free

    @property
    def is_integer(self) -> bool:
        """Whether the integer workspace ran short, not the float one."""
        return self.piece not in _FLOAT_PIECES


def read_overflow(error: BaseException) -> Overflow | None:
    """What did not fit; `None` for any other error.

    Example:
        >>> read_overflow(RuntimeError(
        ...     "Buffer overflow when allocating memory for batch_prefill_tmp_v with size 4096 and "
        ...     "alignment 16, but only 128 bytes available in AlignedAllocator."))
        Overflow(piece='batch_prefill_tmp_v', size=4096, alignment=16, left=128)
    """
    found = _COMPLAINT.search(str(error))
    if found is None:
        return None
    numbers = {name: int(found[name]) for name in ("size", "alignment", "left")}
    return Overflow(piece=found["piece"], **numbers)

"""FlashInfer's known wrong answers, and what is done instead.

Every row was measured against float64 on a GPU; `tests/test_flashinfer_defects.py` shows each on an
affected version, and the right answer of ours on every version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedattn.backends.flashinfer.library import Version

FIRST_SUPPORTED: Version = (0, 6, 18)
"""Older versions were never tried."""


@dataclass(frozen=True)
class Call:
    """What decides whether a call of FlashInfer is right."""

    version: Version
    kernel: str  # "fa2" or "fa3"
    causal: bool
    window_left: int


@dataclass(frozen=True)
class Defect:
    """One wrong answer.

    Attributes:
        name: For messages and tests.
        first_right: The first version known to be right; `None`: none is.
        affects: Whether a call of an affected version can be wrong.
        instead: What is done about it.
        report: The public report, or how it was found.
    """

    name: str
    first_right: Version | None
    affects: Callable[[Call], bool]
    instead: str
    report: str

    def hits(self, call: Call) -> bool:
        """Whether this call can be wrong."""
        old = self.first_right is None or call.version < self.first_right
        return old and self.affects(call)


FA2_WINDOW_WITHOUT_MASK = Defect(
    name="fa2 with a window and no causal mask",
    first_right=None,
    affects=lambda call: call.kernel == "fa2" and not call.causal and call.window_left >= 0,
    instead="fa2 with disable_split_kv=True: it is right where it may not split requests",
    report=(
        "https://github.com/flashinfer-ai/flashinfer/issues/4972: its planner cuts each request's "
        "keys to window_left and a tile, as if no key right of a query were visible"
    ),
)

FA3_ROWS_WITHOUT_KEYS = Defect(
    name="fa3 with a causal mask and more queries than keys",
    first_right=(0, 7, 4),
    affects=lambda call: call.kernel == "fa3" and call.causal,
    instead="rows that see no key are overwritten with 0, and -inf in the LSE, behind the kernel",
    report="found here: queries before a request's first key are not 0 (0.6.18, qo 40, kv 17)",
)

FA3_WINDOW_WITHOUT_MASK = Defect(
    name="fa3 with a window and no causal mask",
    first_right=None,
    affects=lambda call: call.kernel == "fa3" and not call.causal and call.window_left >= 0,
    instead="fa2, see above; a wrapper built for fa3 refuses",
    report=(
        "found here: NaN in slots that nobody owns reaches the output (0.7.4; 17, 70 and 100 keys "
        "with 1, 33 and 1 queries, windows 0 to 17)"
    ),
)

DEFECTS = (FA2_WINDOW_WITHOUT_MASK, FA3_ROWS_WITHOUT_KEYS, FA3_WINDOW_WITHOUT_MASK)

"""FlashInfer's known wrong answers, and what is done instead.

Every row was measured against float64 on a GPU; `tests/test_flashinfer_defects.py` shows each on an
affected version, and the right answer of ours on every version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from pagedattn.backends.flashinfer.library import Version

FIRST_SUPPORTED: Version = (0, 6, 18)
"""Older versions were never tried.

The floor is not raised for `FA2_LOW_SCORES`, the one defect without a way round: only models with
such scores are concerned, and whoever serves one can have the warning refuse the version.
"""


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

FA2_SMALLEST_TILE = 16
"""Keys of fa2's smallest tile: with fewer, `FA2_ROWS_WITHOUT_KEYS` does not show."""

FA2_GRAPH_WITHOUT_SPLIT = Defect(
    name="fa2 in a captured graph with disable_split_kv=True",
    first_right=(0, 7, 4),
    affects=lambda call: call.kernel == "fa2",
    instead=(
        "the schedule's buffer is cleared before every plan: what is launched beyond the schedule "
        "computes the first tile of request 0 once more"
    ),
    report=(
        "found here: the grid is that of the largest step, and without a split nothing tells the "
        "blocks beyond a smaller step that they have no work (0.6.18, illegal memory access)"
    ),
)

_AS_OWN_REQUESTS = "queries that see no key are computed as requests of their own, without keys"

FA2_ROWS_WITHOUT_KEYS = Defect(
    name="fa2 with a causal mask and more queries than keys",
    first_right=None,
    affects=lambda call: call.kernel == "fa2" and call.causal,
    instead=_AS_OWN_REQUESTS,
    report=(
        "found here: the first queries see every key (0.7.4; qo 65, kv 64, 10/2 heads: off by "
        "0.4). The first tile that needs no mask is kv_len - qo_len and more in unsigned "
        "arithmetic, which is huge where queries outnumber a tile of keys"
    ),
)

FA3_ROWS_WITHOUT_KEYS = Defect(
    name="fa3 with a causal mask and more queries than keys",
    first_right=(0, 7, 4),
    affects=lambda call: call.kernel == "fa3" and call.causal,
    instead=_AS_OWN_REQUESTS,
    report="found here: queries before a request's first key are not 0 (0.6.18, qo 40, kv 17)",
)

FA3_WINDOW = Defect(
    name="fa3 with a window",
    first_right=None,
    affects=lambda call: call.kernel == "fa3" and call.window_left >= 0,
    instead="fa2, see above; a wrapper built for fa3 refuses",
    report=(
        "found here: its tiles of keys begin left of the window, and NaN or infinity there, in "
        "slots that nobody owns any more, reach the output (0.7.4; 665 keys, 615 queries, window "
        "49: all NaN where key 0 is NaN)"
    ),
)

FINITE_INFINITY = -5e4
"""What the kernels of versions with the two defects below take for minus infinity."""

EMPTY_WARPS = 8.0
"""More than the base-2 logarithm of the warps whose empty sums an LSE without keys adds up."""

LSE_WITHOUT_KEYS = Defect(
    name="the LSE of a query that sees no key",
    first_right=(0, 7, 4),
    affects=lambda call: True,
    instead="an LSE of -50000, and up to 8 beside it, in base 2, becomes -inf behind the kernel",
    report=(
        "found here: it is the kernels' finite infinity plus the logarithm of how many warps "
        "counted an empty sum as 1 (0.6.18, any request without keys: -49997.68)"
    ),
)

FA2_LOW_SCORES = Defect(
    name="fa2 where every score of a query is below -50000 before sm_scale",
    first_right=(0, 7, 4),
    affects=lambda call: call.kernel == "fa2",
    instead=(
        "a KnownDefectWarning where such a kernel is made: scores are not known when planning, so "
        "that it can neither be refused nor avoided, and such a query gets what one without keys "
        "gets; use FlashInfer 0.7.4"
    ),
    report="https://github.com/flashinfer-ai/flashinfer/issues/4267",
)

DEFECTS = (
    FA2_WINDOW_WITHOUT_MASK,
    FA2_GRAPH_WITHOUT_SPLIT,
    FA2_ROWS_WITHOUT_KEYS,
    FA3_ROWS_WITHOUT_KEYS,
    FA3_WINDOW,
    LSE_WITHOUT_KEYS,
    FA2_LOW_SCORES,
)


class KnownDefectWarning(UserWarning):
    """The installed FlashInfer has a wrong answer that nothing can be done about but to replace it.

    To refuse such versions: `warnings.simplefilter("error", KnownDefectWarning)`.
    """


def warn_of_defects(kernel: str, version: Version) -> None:
    """Warn of the defects that nothing is done about, where a kernel that has one is made.

    Python shows a warning once a process, whatever is made later.

    Args:
        kernel: "fa2" or "fa3".
        version: FlashInfer's.
    """
    right = FA2_LOW_SCORES.first_right or ()
    if FA2_LOW_SCORES.hits(Call(version, kernel, causal=True, window_left=-1)):
        warnings.warn(
            f"FlashInfer {_dotted(version)} is wrong for {FA2_LOW_SCORES.name}: its output is that "
            f"of a query without keys. Models with such scores need {_dotted(right)} or newer: pip "
            f"install --upgrade flashinfer-python ({FA2_LOW_SCORES.report})",
            KnownDefectWarning,
            stacklevel=2,
        )


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))

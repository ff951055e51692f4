"""Colours that differ for colour-blind readers too, and what they are used for.

Okabe and Ito's palette (2008, Color Universal Design) without its black. Colour never stands alone:
every picture also says in letters who owns what.
"""

from __future__ import annotations

OWNERS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""One a request, in turn."""

SEEN = "#0072B2"
HIDDEN = "#F4F4F4"
UNSEEN = "#C8C8C8"
INK = "#222222"
FAINT_INK = "#666666"
LINE = "#999999"
FAINT_LINE = "#D0D0D0"
PAPER = "#FFFFFF"

_DARK = {"#009E73", "#0072B2", "#D55E00"}


def owner_colour(request: int) -> str:
    """The colour of a request."""
    return OWNERS[request % len(OWNERS)]


def ink_on(colour: str) -> str:
    """The colour of letters on one of these colours."""
    return PAPER if colour in _DARK else INK


def shade(share: float) -> str:
    """From nearly white for little to the full colour of what is seen for 1; `HIDDEN` for 0."""
    if share == 0:
        return HIDDEN
    weight = 0.2 + 0.8 * share
    parts = [int(SEEN[begin : begin + 2], 16) for begin in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - weight * (255 - part)):02X}" for part in parts)

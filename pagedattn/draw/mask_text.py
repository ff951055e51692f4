"""The mask of one request as text: a line for each query, a letter for each slot."""

from __future__ import annotations

from rich.text import Text

from pagedattn.draw.mask import Mask
from pagedattn.draw.palette import SEEN
from pagedattn.draw.words import clipped

WIDTH = 80
FAINT = "bright_black"
SEES, SEES_SOME, HIDDEN, UNUSED = "█", "▒", "·", "╱"


def mask_text(mask: Mask) -> Text:
    """Draw a mask, no line longer than 80 columns."""
    text = Text(no_wrap=True)
    text.append(clipped(mask.heading(), WIDTH) + "\n", style="bold")
    if mask.num_rows:
        text.append(mask.alignment() + "\n", style=FAINT)
    labels = [mask.query_label(row) for row in range(mask.num_rows)]
    margin = max([len("page"), *map(len, labels)]) + 1
    if mask.columns_per_page:
        text.append("page".rjust(margin - 1) + " │" + _page_titles(mask) + "\n", style=FAINT)
    for row, label in enumerate(labels):
        text.append(label.rjust(margin - 1) + " ")
        _append_columns(text, mask, row)
        if mask.sees_nothing(row):
            text.append(" no key", style=FAINT)
        text.append("\n")
    text.append(clipped(_meaning(mask), WIDTH), style=FAINT)
    return text


def _page_titles(mask: Mask) -> str:
    """Page ids above their columns, left out where they do not fit."""
    width = mask.columns_per_page
    titles = [str(page) if len(str(page)) <= width else "" for page in mask.page_ids]
    return "".join(title.ljust(width) + "│" for title in titles)


def _append_columns(text: Text, mask: Mask, row: int) -> None:
    text.append("│", style=FAINT)
    for column in range(mask.num_columns):
        letter = _letter(mask, row, column)
        text.append(letter, style=SEEN if letter in (SEES, SEES_SOME) else FAINT)
        if mask.columns_per_page and (column + 1) % mask.columns_per_page == 0:
            text.append("│", style=FAINT)
    if not mask.columns_per_page:
        text.append("│", style=FAINT)


def _letter(mask: Mask, row: int, column: int) -> str:
    visible, size = mask.visible[row, column], mask.sizes[row, column]
    if not size:
        return UNUSED
    if not visible:
        return HIDDEN
    return SEES if visible == size else SEES_SOME


def _meaning(mask: Mask) -> str:
    parts = [f"{SEES} sees the key"]
    if mask.queries_per_row > 1 or mask.slots_per_column > 1:
        queries = f"{mask.queries_per_row} queries by " if mask.queries_per_row > 1 else ""
        parts = [f"1 mark = {queries}{mask.slots_per_column} slots: {SEES} all visible"]
        parts.append(f"{SEES_SOME} some")
    parts.append(f"{HIDDEN} hidden")
    if mask.kv_len < len(mask.page_ids) * mask.page_size:
        parts.append(f"{UNUSED} unused slot")
    return "  ".join(parts)

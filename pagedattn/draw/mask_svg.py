"""The mask of one request as SVG: a row for each query, a square for each slot."""

from __future__ import annotations

from pagedattn.draw.mask import Mask
from pagedattn.draw.palette import HIDDEN, LINE, PAPER, SEEN, shade
from pagedattn.draw.svg import HATCH, MARGIN, WIDTH, box, document, faint, words

LABEL_WIDTH = 96
PAGE_GAP = 4
MAX_SQUARE = 20
TOP = 56
TITLE_HEIGHT = 34


def mask_svg(mask: Mask) -> str:
    """Draw a mask."""
    square = _square_size(mask)
    elements = [words(MARGIN, 20, mask.heading(), bold=True)]
    if mask.num_rows:
        elements.append(words(MARGIN, 38, mask.alignment()))
    elements += _titles(mask, square)
    top = TOP + TITLE_HEIGHT
    for row in range(mask.num_rows):
        elements += _row(mask, row, top + row * square, square)
    bottom = top + mask.num_rows * square + 12
    return document(WIDTH, bottom + 26, elements + _legend(mask, bottom), mask.heading())


def _square_size(mask: Mask) -> float:
    room = WIDTH - 2 * MARGIN - LABEL_WIDTH - 60  # 60: "no key" at the right
    if not mask.num_columns:
        return MAX_SQUARE
    gaps = len(mask.page_ids) * PAGE_GAP if mask.columns_per_page else 0
    return float(min(MAX_SQUARE, (room - gaps) // mask.num_columns))


def _left(mask: Mask, column: int, square: float) -> float:
    """Left edge of a column; pages stand a little apart."""
    gaps = column // mask.columns_per_page * PAGE_GAP if mask.columns_per_page else 0
    return MARGIN + LABEL_WIDTH + column * square + gaps


def _titles(mask: Mask, square: float) -> list[str]:
    """Page ids and, where there is room, the number of each key."""
    elements: list[str] = []
    if mask.columns_per_page:
        elements.append(faint(MARGIN + LABEL_WIDTH - 8, TOP + 12, "page", anchor="end"))
        for number, page in enumerate(mask.page_ids):
            left = _left(mask, number * mask.columns_per_page, square)
            width = mask.columns_per_page * square
            if len(str(page)) * 7 <= width:
                middle = left + width / 2
                elements.append(words(middle, TOP + 12, str(page), bold=True, anchor="middle"))
    elif mask.num_columns:
        right = _left(mask, mask.num_columns, square)
        elements.append(faint(MARGIN + LABEL_WIDTH, TOP + 28, "key 0"))
        elements.append(faint(right, TOP + 28, f"key {mask.kv_len - 1}", anchor="end"))
    if mask.slots_per_column == 1 and square >= 14:
        elements.append(faint(MARGIN + LABEL_WIDTH - 8, TOP + 28, "query, key", anchor="end"))
        for key in range(mask.kv_len):
            middle = _left(mask, key, square) + square / 2
            elements.append(words(middle, TOP + 28, str(key), size=9, anchor="middle"))
    return elements


def _row(mask: Mask, row: int, y: float, square: float) -> list[str]:
    label_y = y + square / 2 + 4
    elements = [faint(MARGIN + LABEL_WIDTH - 8, label_y, mask.query_label(row), anchor="end")]
    for column in range(mask.num_columns):
        left = _left(mask, column, square)
        elements.append(_mark(mask, row, column, left, y, square))
    if mask.sees_nothing(row):
        right = _left(mask, mask.num_columns, square)
        elements.append(faint(right + 8, label_y, "no key"))
    return elements


def _mark(mask: Mask, row: int, column: int, x: float, y: float, square: float) -> str:
    visible, size = int(mask.visible[row, column]), int(mask.sizes[row, column])
    if not size:
        return box(x, y, square, square, HATCH)
    if not visible:
        return box(x, y, square, square, HIDDEN)
    return box(x, y, square, square, shade(visible / size), PAPER)


def _legend(mask: Mask, top: float) -> list[str]:
    is_coarse = mask.queries_per_row > 1 or mask.slots_per_column > 1
    kinds = [(SEEN, "the query sees the key"), (HIDDEN, "it does not")]
    if is_coarse:
        size = f"{mask.queries_per_row} by {mask.slots_per_column}"
        kinds[0] = (SEEN, f"all of {size} (queries by slots) visible; paler: some")
        kinds[1] = (HIDDEN, "none")
    if mask.kv_len < len(mask.page_ids) * mask.page_size:
        kinds.append((HATCH, "unused slot"))
    x = float(MARGIN)
    elements = []
    for fill, meaning in kinds:
        elements.append(box(x, top, 13, 13, fill, LINE, 0.5))
        elements.append(faint(x + 19, top + 11, meaning))
        x += 19 + len(meaning) * 6.8 + 14
    return elements

"""Pages as SVG, one card each: its number, its owners, a square for each slot."""

from __future__ import annotations

import math

from pagedattn.draw.palette import (
    FAINT_LINE,
    HIDDEN,
    INK,
    LINE,
    PAPER,
    UNSEEN,
    ink_on,
    owner_colour,
)
from pagedattn.draw.pool import DrawnPage, Pool, SlotState, coarse, slots_per_mark
from pagedattn.draw.svg import HATCH, MARGIN, WIDTH, box, faint, group, words
from pagedattn.draw.words import label_meaning, owner_label, page_hint, slot_meanings

LETTER_WIDTH = 6.8
MAX_MARKS = 32
MARKS_PER_ROW = 8
SLOT = 20
HEADER = 20
GAP = 8
MIN_CARD = 84
MAX_STRIPES = 3


def cards(pool: Pool, pages: list[DrawnPage], top: float) -> tuple[list[str], float]:
    """Cards in lines and a legend below; the elements, and where the next thing may begin."""
    num_marks = -(-pool.page_size // slots_per_mark(pool.page_size, MAX_MARKS))
    width = max(MIN_CARD, min(num_marks, MARKS_PER_ROW) * SLOT + 8)
    height = HEADER + math.ceil(num_marks / MARKS_PER_ROW) * SLOT + 5
    per_line = (WIDTH - 2 * MARGIN + GAP) // (width + GAP)
    elements = []
    for number, page in enumerate(pages):
        line, column = divmod(number, per_line)
        x, y = MARGIN + column * (width + GAP), top + line * (height + GAP)
        card = _card(pool, page, (x, y), (width, height))
        elements.append(group(card, page_hint(page, pool.requests)))
    bottom = top + math.ceil(len(pages) / per_line) * (height + GAP)
    legend = _legend(pool, pages, bottom)
    return elements + legend, bottom + (44 if legend else 6)


def _card(
    pool: Pool, page: DrawnPage, at: tuple[float, float], size: tuple[float, float]
) -> list[str]:
    """One page, or a run of pages without owner."""
    (x, y), (width, height) = at, size
    is_shared = len(page.owners) > 1
    stroke, line_width = (INK, 2.5) if is_shared else (LINE if page.owners else FAINT_LINE, 1)
    fill = PAPER if page.owners and not page.is_unseen else HIDDEN
    title = str(page.first) if page.first == page.last else f"{page.first}-{page.last}"
    elements = [
        box(x, y, width, height, fill, stroke, line_width),
        words(x + 5, y + 15, title, size=11, bold=True),
    ]
    if not page.owners:
        elements.append(faint(x + 5, y + 34, owner_label(page, pool.requests, 12)))
        return elements
    room = int((width - 10) / LETTER_WIDTH) - len(title) - 1
    label = owner_label(page, pool.requests, max(room, 4))
    elements.append(faint(x + width - 5, y + 15, label, anchor="end"))
    return elements + _slots(pool, page, x + 4, y + HEADER)


def _slots(pool: Pool, page: DrawnPage, x: float, y: float) -> list[str]:
    """A square for each slot with its token's number, or for each few slots."""
    has_numbers = (
        slots_per_mark(pool.page_size, MAX_MARKS) == 1
        and len({owner.index for owner in page.owners}) == 1
    )
    first_token = page.owners[0].index * pool.page_size
    colours = _colours(page)
    elements = []
    for number, state in enumerate(coarse(page.slots, MAX_MARKS)):
        row, column = divmod(number, MARKS_PER_ROW)
        at = (x + column * SLOT, y + row * SLOT)
        elements += _slot(colours, state, *at)
        if has_numbers and state > SlotState.UNUSED:
            grounds = colours if state > SlotState.UNSEEN else [UNSEEN]
            elements.append(_number(first_token + number, at, grounds))
    return elements


def _number(token: int, at: tuple[float, float], grounds: list[str]) -> str:
    """A token's number on its square, which may have several colours."""
    return words(
        at[0] + SLOT / 2,
        at[1] + 13.5,
        str(token),
        size=9 if token < 1000 else 6.5,
        fill=ink_on(grounds[0]) if len(grounds) == 1 else INK,
        anchor="middle",
        halo=len(grounds) > 1,
    )


def _colours(page: DrawnPage) -> list[str]:
    """The colours of a page's first few owners."""
    return [owner_colour(owner.request) for owner in page.owners[:MAX_STRIPES]]


def _slot(colours: list[str], state: SlotState, x: float, y: float) -> list[str]:
    """One square, in stripes of its owners' colours."""
    if state == SlotState.UNUSED:
        return [box(x, y, SLOT, SLOT, HATCH)]
    if state == SlotState.UNSEEN:
        return [box(x, y, SLOT, SLOT, UNSEEN, PAPER)]
    stripe = SLOT / len(colours)
    elements = [
        box(x, y + number * stripe, SLOT, stripe, colour, "none")
        for number, colour in enumerate(colours)
    ]
    elements.append(box(x, y, SLOT, SLOT, "none", PAPER))
    if state == SlotState.NEW:
        elements.append(box(x + 2, y + 2, SLOT - 4, SLOT - 4, "none", INK, 2))
    return elements


def _legend(pool: Pool, pages: list[DrawnPage], top: float) -> list[str]:
    elements: list[str] = []
    x = float(MARGIN)
    step = slots_per_mark(pool.page_size, MAX_MARKS)
    if step > 1:
        text = f"1 square = {step} slots"
        elements.append(faint(x, top + 13, text))
        x += len(text) * LETTER_WIDTH + 12
    colour = next((_colours(page)[0] for page in pages if page.owners), UNSEEN)
    for state, meaning in slot_meanings(pages, pool.requests):
        elements += [f'<g transform="translate({x:g} {top:g}) scale(0.8)">']
        elements += [*_slot([colour], state, 0, 0), "</g>", faint(x + 21, top + 13, meaning)]
        x += 21 + len(meaning) * LETTER_WIDTH + 12
    if any(len(page.owners) > 1 for page in pages):
        elements.append(box(x + 2, top + 1, 15, 14, PAPER, INK, 2.5))
        elements.append(faint(x + 23, top + 13, "shared page"))
    meaning = label_meaning(pages, pool.requests)
    return [*elements, faint(MARGIN, top + 32, meaning)] if meaning else elements

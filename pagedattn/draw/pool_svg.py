"""A page pool as SVG: cards of single pages, or a map of many, and the requests below."""

from __future__ import annotations

import math

from pagedattn.draw.cards_svg import cards
from pagedattn.draw.palette import FAINT_LINE, HIDDEN, UNSEEN, ink_on, owner_colour, shade
from pagedattn.draw.pool import PageKind, Pool
from pagedattn.draw.pool_map import (
    MARKS_PER_LINE,
    PoolMap,
    letter_of,
    map_meaning,
    map_pool,
    page_letter,
)
from pagedattn.draw.svg import MARGIN, WIDTH, box, document, faint, words
from pagedattn.draw.words import pool_summary, request_rows, unlisted_requests

MAP_LEFT = 76
MAP_MARK = 10.5
LINE_HEIGHT = 18
COLUMN_ENDS = (150, 200, 262)
"""Right edges of the numbers of a request."""


def pool_svg(pool: Pool) -> str:
    """Draw a pool."""
    pages_line, tokens_line = pool_summary(pool)
    elements = [words(MARGIN, 20, pages_line, bold=True), words(MARGIN, 38, tokens_line)]
    pages = pool.drawn_pages()
    drawn, bottom = _map(pool, 52) if pages is None else cards(pool, pages, 52)
    listed, bottom = _requests(pool, bottom)
    return document(WIDTH, bottom, elements + drawn + listed, pages_line)


def _map(pool: Pool, top: float) -> tuple[list[str], float]:
    """A small square for each page, or for each few pages."""
    pool_map = map_pool(pool)
    elements = []
    for begin in range(0, len(pool_map.used), MARKS_PER_LINE):
        y = top + begin // MARKS_PER_LINE * MAP_MARK
        marks = range(begin, min(begin + MARKS_PER_LINE, len(pool_map.used)))
        elements.append(faint(MAP_LEFT - 6, y + 9, str(pool_map.first_page(begin)), anchor="end"))
        elements.append(box(MAP_LEFT, y, len(marks) * MAP_MARK, MAP_MARK, HIDDEN))
        for mark in marks:
            elements += _mark(pool, pool_map, mark, MAP_LEFT + (mark - begin) * MAP_MARK, y)
    bottom = top + math.ceil(len(pool_map.used) / MARKS_PER_LINE) * MAP_MARK
    meaning = map_meaning(pool, pool_map)
    if pool_map.pages_per_mark > 1:
        meaning = f"1 square = {pool_map.pages_per_mark} pages; the darker, the more are in use"
    return [*elements, faint(MARGIN, bottom + 18, meaning)], bottom + 30


def _mark(pool: Pool, pool_map: PoolMap, mark: int, x: float, y: float) -> list[str]:
    """The square of one mark; nothing for free pages, whose colour is there already."""
    if pool_map.pages_per_mark > 1:
        share = float(pool_map.used[mark])
        return [box(x, y, MAP_MARK, MAP_MARK, shade(share))] if share else []
    letter = page_letter(pool, mark)
    if letter == "·":
        return []
    fill = HIDDEN
    if pool.kinds[mark] == PageKind.OWNED:
        fill = UNSEEN if pool.is_unseen[mark] else owner_colour(int(pool.first_owner[mark]))
    return _lettered(letter, fill, (x, y), MAP_MARK)


def _lettered(letter: str, fill: str, at: tuple[float, float], size: float) -> list[str]:
    """A square with a letter, unless colour alone says it all."""
    x, y = at
    elements = [box(x, y, size, size, fill, FAINT_LINE, 0.5)]
    if letter not in "█░":
        ink = ink_on(fill)
        middle = (x + size / 2, y + size * 0.8)
        elements.append(words(*middle, letter, size=size - 2, fill=ink, anchor="middle"))
    return elements


def _requests(pool: Pool, top: float) -> tuple[list[str], float]:
    """The requests, one a line; the elements, and the bottom of the picture."""
    elements: list[str] = []
    y = top + 14
    is_map = pool.drawn_pages() is None
    for number, (name, *columns) in enumerate(request_rows(pool), start=-1):
        ends = [*COLUMN_ENDS, COLUMN_ENDS[-1] + 16]
        if number < 0:
            elements.append(faint(MARGIN + 18, y, name))
        else:
            letter = letter_of(pool, number) if is_map else "█"
            elements += _lettered(letter, owner_colour(number), (MARGIN, y - 10), 12)
            elements.append(words(MARGIN + 18, y, name))
        for end, column in zip(ends, columns, strict=True):
            anchor = "end" if end in COLUMN_ENDS else "start"
            elements.append(
                faint(end, y, column, anchor)
                if number < 0
                else words(end, y, column, anchor=anchor)
            )
        y += LINE_HEIGHT
    rest = unlisted_requests(pool)
    if rest:
        elements.append(faint(MARGIN + 18, y, rest))
        y += LINE_HEIGHT
    return elements, y

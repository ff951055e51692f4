"""A pool too large to draw page by page: one mark for each page, or for each few of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedattn.draw.pool import PageKind, Pool

MARKS_PER_LINE = 64
MAX_MARKS = 1024
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""What stands for a request, in their order, where there are no more requests than letters."""
SHADES = "·░▒▓█"
"""None, up to a third, up to two thirds, nearly all, all of a mark's pages are in use."""


@dataclass(frozen=True, eq=False)
class PoolMap:
    """Marks in the order of pages."""

    pages_per_mark: int
    used: NDArray[np.float64]  # f64[marks], share of a mark's pages that are owned

    def shade(self, mark: int) -> str:
        """The letter for how full a mark is; see `SHADES`."""
        used = self.used[mark]
        return SHADES[4] if used == 1 else SHADES[int(np.ceil(used * 3))]

    def first_page(self, mark: int) -> int:
        """The first page that a mark stands for."""
        return mark * self.pages_per_mark


def map_pool(pool: Pool) -> PoolMap:
    """Give each mark the smallest power of two of pages that keeps the map small."""
    pages_per_mark = 1
    while pool.num_pages > pages_per_mark * MAX_MARKS:
        pages_per_mark *= 2
    in_use = (pool.kinds == PageKind.OWNED) | (pool.kinds == PageKind.ELSEWHERE)
    begins = np.arange(0, pool.num_pages, pages_per_mark)
    counts = np.add.reduceat(in_use.astype(np.int64), begins)
    sizes = np.minimum(pages_per_mark, pool.num_pages - begins)
    return PoolMap(pages_per_mark, counts / sizes)


def page_letter(pool: Pool, page: int) -> str:
    """The letter for one page."""
    kind = pool.kinds[page]
    if kind != PageKind.OWNED:
        return {PageKind.FREE: "·", PageKind.SINK: "S"}.get(PageKind(int(kind)), "?")
    if pool.is_unseen[page]:
        return "░"
    if pool.num_owners[page] > 1:
        return "#"
    return letter_of(pool, int(pool.first_owner[page]))


def letter_of(pool: Pool, request: int) -> str:
    """The letter for a request; a full block where there are more requests than letters."""
    return LETTERS[request] if len(pool.requests.names) <= len(LETTERS) else "█"


def map_meaning(pool: Pool, pool_map: PoolMap) -> str:
    """What the letters mean, in one line."""
    if pool_map.pages_per_mark > 1:
        return (
            f"1 mark = {pool_map.pages_per_mark} pages; in use: "
            f"{SHADES[0]} none {SHADES[1]} a third {SHADES[2]} two thirds {SHADES[3]} nearly all "
            f"{SHADES[4]} all"
        )
    last = letter_of(pool, len(pool.requests.names) - 1)
    meanings = ["█ owned" if last == "█" else f"0 to {last} its owner, as listed below"]
    for shown, meaning in (
        ((pool.num_owners > 1).any(), "# shared"),
        (pool.is_unseen.any(), "░ seen by no query"),
        (pool.count(PageKind.ELSEWHERE), "? not shown requests'"),
        (pool.count(PageKind.FREE), "· free"),
        (pool.count(PageKind.SINK), "S sink"),
    ):
        if shown:
            meanings.append(meaning)
    return "1 mark = 1 page: " + "  ".join(meanings)

"""A page pool as text: cards of single pages, or a map of many, and the requests below."""

from __future__ import annotations

from rich.text import Text

from pagedattn.draw.palette import owner_colour
from pagedattn.draw.pool import DrawnPage, PageKind, Pool, SlotState, coarse, slots_per_mark
from pagedattn.draw.pool_map import (
    MARKS_PER_LINE,
    PoolMap,
    letter_of,
    map_meaning,
    map_pool,
    page_letter,
)
from pagedattn.draw.words import (
    clipped,
    label_meaning,
    owner_label,
    pool_summary,
    request_rows,
    slot_meanings,
    unlisted_requests,
)

WIDTH = 80
MAX_MARKS = 16
MIN_CARD_WIDTH = 8
FAINT = "bright_black"
LETTERS = {
    SlotState.UNUSED: "╱",
    SlotState.UNSEEN: "░",
    SlotState.HELD: "█",
    SlotState.NEW: "+",
}


def pool_text(pool: Pool) -> Text:
    """Draw a pool, no line longer than 80 columns."""
    text = Text(no_wrap=True)
    for line in pool_summary(pool):
        text.append(clipped(line, WIDTH) + "\n", style="bold")
    pages = pool.drawn_pages()
    if pages is None:
        _append_map(text, pool)
    else:
        _append_cards(text, pool, pages)
    _append_requests(text, pool, with_letters=pages is None)
    text.rstrip()
    return text


def _append_cards(text: Text, pool: Pool, pages: list[DrawnPage]) -> None:
    """Boxes side by side, as many in a line as fit."""
    num_marks = -(-pool.page_size // slots_per_mark(pool.page_size, MAX_MARKS))
    inner = max(num_marks, MIN_CARD_WIDTH)
    per_line = (WIDTH - 1) // (inner + 3)
    for begin in range(0, len(pages), per_line):
        cards = pages[begin : begin + per_line]
        titles = [f"─{page.first}".ljust(inner + 2, "─") for page in cards]
        _append_row(text, "┌", "┬", "┐", [Text(title, style=FAINT) for title in titles])
        labels = [_label(page, pool, inner) for page in cards]
        _append_row(text, "│", "│", "│", [_padded(label, inner) for label in labels])
        slots = [_slots(page) for page in cards]
        _append_row(text, "│", "│", "│", [_padded(marks, inner) for marks in slots])
        bottom = [Text("─" * (inner + 2), style=FAINT)] * len(cards)
        _append_row(text, "└", "┴", "┘", bottom)
    for legend in (_legend(pool, pages), label_meaning(pages, pool.requests)):
        if legend:
            text.append(clipped(legend, WIDTH) + "\n", style=FAINT)


def _legend(pool: Pool, pages: list[DrawnPage]) -> str:
    meanings = [(LETTERS[state], meaning) for state, meaning in slot_meanings(pages, pool.requests)]
    line = "  ".join(f"{letter} {meaning}" for letter, meaning in meanings)
    step = slots_per_mark(pool.page_size, MAX_MARKS)
    if step > 1:
        line = f"1 mark = {step} slots: {line}"
    return line


def _append_row(text: Text, left: str, between: str, right: str, cells: list[Text]) -> None:
    text.append(left, style=FAINT)
    for number, cell in enumerate(cells):
        text.append_text(cell)
        text.append(right if number == len(cells) - 1 else between, style=FAINT)
    text.append("\n")


def _padded(cell: Text, inner: int) -> Text:
    return Text.assemble(" ", cell, " " * (inner - len(cell) + 1))


def _label(page: DrawnPage, pool: Pool, inner: int) -> Text:
    label = clipped(owner_label(page, pool.requests, inner), inner)
    if not page.owners or page.is_unseen:
        return Text(label, style=FAINT)
    return Text(label, style="bold")


def _slots(page: DrawnPage) -> Text:
    """The marks of a page; owners of a shared one take turns in colouring them."""
    marks = Text()
    if page.first < page.last:
        return Text(f"to {page.last}", style=FAINT)
    for number, state in enumerate(coarse(page.slots, MAX_MARKS)):
        owner = page.owners[number % len(page.owners)]
        is_faint = state in (SlotState.UNUSED, SlotState.UNSEEN)
        marks.append(LETTERS[state], style=FAINT if is_faint else owner_colour(owner.request))
    return marks


def _append_map(text: Text, pool: Pool) -> None:
    pool_map = map_pool(pool)
    for begin in range(0, len(pool_map.used), MARKS_PER_LINE):
        text.append(f"{pool_map.first_page(begin):>10}  ", style=FAINT)
        for mark in range(begin, min(begin + MARKS_PER_LINE, len(pool_map.used))):
            _append_mark(text, pool, pool_map, mark)
        text.append("\n")
    text.append(clipped(map_meaning(pool, pool_map), WIDTH) + "\n", style=FAINT)


def _append_mark(text: Text, pool: Pool, pool_map: PoolMap, mark: int) -> None:
    if pool_map.pages_per_mark > 1:
        text.append(pool_map.shade(mark))
        return
    letter = page_letter(pool, mark)
    is_plain = pool.kinds[mark] == PageKind.OWNED and not pool.is_unseen[mark]
    owner = int(pool.first_owner[mark])
    text.append(letter, style=owner_colour(owner) if is_plain else FAINT)


def _append_requests(text: Text, pool: Pool, with_letters: bool) -> None:
    """A line for each of the first requests; in a map each begins with its letter."""
    heading, *rows = request_rows(pool)
    names = [row[0] for row in rows]
    if with_letters:
        names = [f"{letter_of(pool, number)} {name}" for number, name in enumerate(names)]
    width = max(map(len, [heading[0], *names]))
    _append_line(text, heading[0].ljust(width), heading[1:], "bold", "bold")
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        _append_line(text, name.ljust(width), row[1:], owner_colour(number), "")
    rest = unlisted_requests(pool)
    if rest:
        text.append(rest + "\n", style=FAINT)


def _append_line(
    text: Text, name: str, columns: tuple[str, ...], name_style: str, style: str
) -> None:
    *counts, place = columns
    rest = "".join(count.rjust(8) for count in counts) + "  " + place
    text.append(name, style=name_style)
    text.append(clipped(rest, WIDTH - len(name)) + "\n", style=style)

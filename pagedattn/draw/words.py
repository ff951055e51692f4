"""The words of pictures that text and SVG share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pagedattn.draw.pool import DrawnPage, PageKind, Pool, SlotState
from pagedattn.draw.requests import Requests, counted

MAX_LISTED_REQUESTS = 12
"""So many requests are listed below a picture; the others are counted."""
SHORTEST_SPAN = 4
"""So many consecutive page ids are written as one span."""


def pool_summary(pool: Pool) -> tuple[str, str]:
    """Two lines: the pages, the tokens."""
    num_shared = int((pool.num_owners > 1).sum())
    parts = [
        f"{pool.count(PageKind.OWNED)} in use" + (f" ({num_shared} shared)" if num_shared else "")
    ]
    for kind, word in (
        (PageKind.ELSEWHERE, "of other requests"),
        (PageKind.FREE, "free"),
        (PageKind.SINK, "sink"),
    ):
        if pool.count(kind):
            parts.append(f"{pool.count(kind)} {word}")
    pages = f"{counted(pool.num_pages, 'page')} of {counted(pool.page_size, 'slot')}: "
    num_tokens, num_slots = int(pool.requests.kv_lens.sum()), int(pool.num_tokens.sum())
    tokens = f"{counted(len(pool.requests.names), 'request')}, {counted(num_tokens, 'token')}"
    if num_slots < num_tokens:
        tokens += f" in {counted(num_slots, 'slot')} (shared)"
    num_owned = int((pool.num_owners > 0).sum())
    if num_owned:
        share = 100 * pool.num_unused / (num_owned * pool.page_size)
        tokens += f"; {counted(pool.num_unused, 'slot')} unused ({share:.0f} %)"
    return pages + ", ".join(parts), tokens


def owner_label(page: DrawnPage, requests: Requests, width: int) -> str:
    """Who owns a page, in at most `width` characters: `r0[2]` is page 2 of request r0."""
    if page.kind in (PageKind.FREE, PageKind.ELSEWHERE):
        return _unowned_label(page, width)
    prefix = "sink " if page.kind == PageKind.SINK else ""
    if not page.owners:
        return prefix.strip()
    names = [requests.names[owner.request] for owner in page.owners]
    indices = {owner.index for owner in page.owners}
    place = f"[{indices.pop()}]" if len(indices) == 1 else ""
    together = prefix + "+".join(names) + place
    if len(together) <= width:
        return together
    if len(names) > 1:
        return f"{prefix}×{len(names)}{place}"
    return prefix + clipped(names[0], max(1, width - len(prefix + place))) + place


def _unowned_label(page: DrawnPage, width: int) -> str:
    word = "free" if page.kind == PageKind.FREE else "others'"
    counted_word = f"{page.last - page.first + 1} {word}"
    return counted_word if page.first < page.last and len(counted_word) <= width else word


def label_meaning(pages: Sequence[DrawnPage], requests: Requests) -> str:
    """What the labels of cards mean; empty where no page has an owner."""
    owned = [page for page in pages if page.owners]
    if not owned:
        return ""
    name = requests.names[owned[0].owners[0].request]
    meaning = f"{name}[i]: page i of {name}"
    if any(len(page.owners) > 1 for page in owned):
        meaning += "  ×n[i]: page i of n requests, shared"
    return meaning


def page_hint(page: DrawnPage, requests: Requests) -> str:
    """A sentence about one page."""
    if not page.owners:
        return f"page {page.first}: {owner_label(page, requests, 40)}"
    owned = [f"page {o.index} of {requests.names[o.request]}" for o in page.owners]
    count = f"{page.num_tokens} of {counted(len(page.slots), 'slot')} used"
    return f"page {page.first}: {', '.join(owned)}; {count}"


def clipped(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def page_ids(ids: Sequence[int], width: int) -> str:
    """Page ids in order, long runs of consecutive ones as a span, as many as fit.

    Example:
        >>> page_ids([7, 2, 3, 4, 5, 9], width=40)
        '7 2-5 9'
    """
    cuts = [i for i, (a, b) in enumerate(pairwise(ids), start=1) if b != a + 1]
    bounds = [0, *cuts, len(ids)] if ids else [0]
    parts: list[str] = []
    for begin, end in pairwise(bounds):
        if end - begin >= SHORTEST_SPAN:
            parts.append(f"{ids[begin]}-{ids[end - 1]}")
        else:
            parts += map(str, ids[begin:end])
        if sum(len(part) + 1 for part in parts) > width + 1:
            return clipped(" ".join(parts), width)
    return " ".join(parts)


def request_rows(pool: Pool) -> list[tuple[str, ...]]:
    """Heading and a row for each listed request: name, tokens, new, unused, its pages."""
    requests, indptr = pool.requests, pool.table.kv_indptr.tolist()
    rows: list[tuple[str, ...]] = [
        ("request", "tokens", "new", "unused", "pages: kv_indices[begin:end], in order")
    ]
    most = len(f"[{max(indptr)}:{max(indptr)}]")
    for request, name in enumerate(requests.names[:MAX_LISTED_REQUESTS]):
        begin, end = indptr[request : request + 2]
        kv_len = int(requests.kv_lens[request])
        new = str(kv_len - int(requests.first_new[request])) if requests.has_queries else "-"
        unused = (end - begin) * pool.page_size - kv_len
        ids = page_ids(pool.table.kv_indices[begin:end].tolist(), 36)
        place = f"[{begin}:{end}]".ljust(most) + f"  {ids}"
        rows.append((clipped(name, 12), str(kv_len), new, str(unused), place))
    return rows


def unlisted_requests(pool: Pool) -> str:
    """What is said of the requests that are not listed; empty where all are."""
    kv_lens = pool.requests.kv_lens[MAX_LISTED_REQUESTS:]
    if not len(kv_lens):
        return ""
    return (
        f"and {counted(len(kv_lens), 'request')} more with {counted(int(kv_lens.sum()), 'token')}"
    )


def slot_meanings(pages: Sequence[DrawnPage], requests: Requests) -> list[tuple[SlotState, str]]:
    """The states that occur in these pages, with their meaning."""
    present = {slot for page in pages for slot in page.slots}
    window = f" (window_left={requests.window_left})" if requests.window_left >= 0 else ""
    meanings = (
        (SlotState.HELD, "token"),
        (SlotState.NEW, "new in this step"),
        (SlotState.UNSEEN, f"seen by no query{window}"),
        (SlotState.UNUSED, "unused"),
    )
    return [(state, meaning) for state, meaning in meanings if state in present]

"""The functions that draw: from a table or an allocator to a `Picture`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from xml.sax.saxutils import escape

from torch import Tensor

from pagedattn.draw.mask import build_mask
from pagedattn.draw.mask_svg import mask_svg
from pagedattn.draw.mask_text import mask_text
from pagedattn.draw.picture import Picture
from pagedattn.draw.pool import Pool, build_pool
from pagedattn.draw.pool_svg import pool_svg
from pagedattn.draw.pool_text import pool_text
from pagedattn.draw.requests import build_requests
from pagedattn.page_allocator import PageAllocator
from pagedattn.page_table import PageTable


def draw_pages(
    page_table: PageTable,
    *,
    qo_indptr: Tensor | None = None,
    window_left: int = -1,
    num_pages: int | None = None,
    sink_page: int | None = None,
    ref_counts: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Picture:
    """Draw who owns which page, and what is in its slots.

    Args:
        page_table: Whose pages to draw; from a GPU it is copied.
        qo_indptr: i32[batch + 1], where each request's queries begin. Their tokens are drawn as
            new. `None`: none is, and a window is that of one query at the end of each request.
        window_left: As in `AttentionSpec`; tokens that no query sees are greyed.
        num_pages: Pages of the cache. `None`: as many as `ref_counts`, or up to the highest id.
        sink_page: The page that only padding uses.
        ref_counts: Owners of each page of the cache, to show pages of requests that are not in the
            table.
        names: One for each request; by default r0, r1, ...

    Raises:
        ValueError: The table is wrong, or something contradicts it; the message names it.

    Example:
        >>> print(draw_pages(PageTable.from_lengths([5, 2], page_size=4), num_pages=4).text)
        4 pages of 4 slots: 3 in use, 1 free
        2 requests, 7 tokens; 5 slots unused (42 %)
        ┌─0────────┬─1────────┬─2────────┬─3────────┐
        │ r0[0]    │ r0[1]    │ r1[0]    │ free     │
        │ ████     │ █╱╱╱     │ ██╱╱     │          │
        └──────────┴──────────┴──────────┴──────────┘
        █ token  ╱ unused
        r0[i]: page i of r0
        request  tokens     new  unused  pages: kv_indices[begin:end], in order
        r0            5       -       3  [0:2]  0 1
        r1            2       -       2  [2:3]  2
    """
    table = page_table.to("cpu")
    qo_indptr = None if qo_indptr is None else qo_indptr.to("cpu")
    requests = build_requests(table, qo_indptr, window_left, names)
    return _picture_of_pool(build_pool(table, requests, num_pages, sink_page, ref_counts))


def draw_allocator(
    allocator: PageAllocator,
    requests: Sequence[Hashable] | None = None,
    *,
    qo_indptr: Tensor | None = None,
    window_left: int = -1,
) -> Picture:
    """Draw the pages of an allocator, named after its requests.

    Args:
        allocator: Whose pages to draw.
        requests: Those to tell apart; by default all. Pages of the others are marked as theirs.
        qo_indptr: As for `draw_pages`.
        window_left: As for `draw_pages`.

    Raises:
        ValueError: A request does not exist, or `qo_indptr` or the window is wrong.
    """
    shown = allocator.requests if requests is None else requests
    return draw_pages(
        allocator.page_table(shown),
        qo_indptr=qo_indptr,
        window_left=window_left,
        num_pages=allocator.num_pages,
        sink_page=allocator.sink_page,
        ref_counts=[allocator.ref_count(page) for page in range(allocator.num_pages)],
        names=[str(request) for request in shown],
    )


def draw_mask(
    page_table: PageTable,
    request: int = 0,
    *,
    qo_indptr: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
) -> Picture:
    """Draw which query of one request sees which slot of its pages.

    Args:
        page_table: The step's table; from a GPU it is copied.
        request: A row of the table.
        qo_indptr: i32[batch + 1], where each request's queries begin; `None`: one query a request.
        causal: As in `AttentionSpec`.
        window_left: As in `AttentionSpec`.

    Raises:
        ValueError: The table or an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> table = PageTable.from_lengths([6], page_size=4, page_ids=[7, 2])
        >>> qo_indptr = torch.tensor([0, 3], dtype=torch.int32)
        >>> print(draw_mask(table, qo_indptr=qo_indptr, window_left=2).text)
        request 0: 3 queries, 6 keys in 2 pages of 4; causal, window_left=2
        query i is at position i + 3, the last query at the last key
          page │7   │2   │
        0 at 3 │·███│··╱╱│
        1 at 4 │··██│█·╱╱│
        2 at 5 │···█│██╱╱│
        █ sees the key  · hidden  ╱ unused slot
    """
    table = page_table.to("cpu")
    qo_indptr = None if qo_indptr is None else qo_indptr.to("cpu")
    mask = build_mask(table, request, qo_indptr, causal, window_left)
    return Picture(mask_text(mask), mask_svg(mask))


def page_table_html(page_table: PageTable) -> str:
    """What a notebook shows of a table: its picture, or what is wrong with it."""
    try:
        return draw_pages(page_table).svg
    except ValueError as error:
        return f"<pre>This page table is wrong: {escape(str(error))}</pre>"


def _picture_of_pool(pool: Pool) -> Picture:
    return Picture(pool_text(pool), pool_svg(pool))

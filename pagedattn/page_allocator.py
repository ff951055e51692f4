"""Which request owns which page: bookkeeping on the host, no tensors of keys or values.

Requests that begin alike share pages by reference counts. A page that two requests share is only
read; the first of them to write into it gets a copy of its own.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedattn.page_table import PageTable


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; the allocator is as it was before the call."""

    def __init__(self, num_asked: int, num_free: int) -> None:
        self.num_asked = num_asked
        self.num_free = num_free
        super().__init__(f"{num_asked} pages were asked for and {num_free} are free")


@dataclass
class _Owned:
    pages: array[int]  # i32: physical ids in the order of the request's tokens
    kv_len: int


class PageAllocator:
    """Hands pages to requests and takes them back.

    The free page with the lowest id is always the next to be handed out, so the same calls give the
    same pages.

    Args:
        num_pages: Pages of the cache.
        page_size: Tokens in one page.
        sink_page: A page that no request can ever own, for padding rows to read and write; `None`:
            all pages can be owned.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> allocator = PageAllocator(num_pages=5, page_size=4)
        >>> allocator.extend("a", 6), allocator.pages_of("a")
        ([], (1, 2))
        >>> allocator.fork("a", "b")
        >>> allocator.extend("b", 1), allocator.pages_of("b")
        ([(2, 3)], (1, 3))
    """

    def __init__(self, num_pages: int, page_size: int, sink_page: int | None = 0) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if sink_page is not None and not 0 <= sink_page < num_pages:
            raise ValueError(f"sink_page must be 0 to {num_pages - 1} or None, got {sink_page}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.sink_page = sink_page
        self._free = [page for page in range(num_pages) if page != sink_page]  # sorted: a heap
        self._ref_counts = [0] * num_pages
        self._requests: dict[Hashable, _Owned] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that no request owns, the sink page not counted."""
        return len(self._free)

    @property
    def requests(self) -> list[Hashable]:
        """The requests that exist, oldest first."""
        return list(self._requests)

    def kv_len(self, request: Hashable) -> int:
        """Tokens of a request."""
        return self._owned(request).kv_len

    def pages_of(self, request: Hashable) -> tuple[int, ...]:
        """Physical pages of a request, in the order of its tokens."""
        return tuple(self._owned(request).pages)

    def ref_count(self, page: int) -> int:
        """How many requests own `page`."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page must be 0 to {self.num_pages - 1}, got {page}")
        return self._ref_counts[page]

    def extend(self, request: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for `num_tokens` more tokens of a request, which is created on first use.

        Args:
            request: Any hashable id.
            num_tokens: Tokens to add, at least 0.

        Returns:
            (source page, destination page) of each copy to do before the new tokens are written:
            the request's last page, where it is partly filled and shared.

        Raises:
            OutOfPages: Too few pages are free. Nothing has changed.
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        owned = self._requests.get(request) or _Owned(array("i"), 0)
        is_partly_filled = owned.kv_len % self.page_size > 0
        copies = num_tokens > 0 and is_partly_filled and self._ref_counts[owned.pages[-1]] > 1
        num_new = self._num_pages_for(owned.kv_len + num_tokens) - len(owned.pages)
        if num_new + copies > len(self._free):
            raise OutOfPages(num_new + copies, len(self._free))
        self._requests[request] = owned
        owned.kv_len += num_tokens
        copied = [(owned.pages.pop(), self._take_free_page())] if copies else []
        for source, destination in copied:
            self._drop(source)
            owned.pages.append(destination)
        owned.pages.extend(self._take_free_page() for _ in range(num_new))
        return copied

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int | None = None) -> None:
        """Create `child` with the first tokens of `parent`, sharing the pages that hold them.

        Args:
            parent: A request.
            child: An id that no request has.
            num_tokens: Tokens to share; `None`: all of them.

        Raises:
            ValueError: `child` exists, or `parent` has fewer tokens.
        """
        source = self._owned(parent)
        num_tokens = source.kv_len if num_tokens is None else num_tokens
        if child in self._requests:
            raise ValueError(f"request {child!r} exists already")
        self._check_prefix(parent, num_tokens)
        pages = source.pages[: self._num_pages_for(num_tokens)]
        for page in pages:
            self._ref_counts[page] += 1
        self._requests[child] = _Owned(pages, num_tokens)

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens, as after rejected speculation.

        Raises:
            ValueError: The request has fewer tokens.
        """
        owned = self._owned(request)
        self._check_prefix(request, num_tokens)
        num_kept = self._num_pages_for(num_tokens)
        for page in owned.pages[num_kept:]:
            self._drop(page)
        del owned.pages[num_kept:]
        owned.kv_len = num_tokens

    def free(self, request: Hashable) -> None:
        """Forget a request; pages that no other request owns become free."""
        self.truncate(request, 0)
        del self._requests[request]

    def page_table(self, requests: Sequence[Hashable]) -> PageTable:
        """The table of these requests, in this order, on the host."""
        owned = [self._owned(request) for request in requests]
        # joined as bytes: a list of 32 thousand ids would take longer than the step that it is for
        page_ids = np.frombuffer(bytearray().join(entry.pages for entry in owned), np.int32)
        kv_lens = [entry.kv_len for entry in owned]
        return PageTable.from_lengths(kv_lens, self.page_size, torch.from_numpy(page_ids))

    def _owned(self, request: Hashable) -> _Owned:
        if request not in self._requests:
            raise ValueError(f"there is no request {request!r}")
        return self._requests[request]

    def _check_prefix(self, request: Hashable, num_tokens: int) -> None:
        kv_len = self._owned(request).kv_len
        if not 0 <= num_tokens <= kv_len:
            raise ValueError(
                f"num_tokens must be 0 to {kv_len}, the tokens of request {request!r}, "
                f"got {num_tokens}"
            )

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _take_free_page(self) -> int:
        page = heapq.heappop(self._free)
        self._ref_counts[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._ref_counts[page] -= 1
        if not self._ref_counts[page]:
            heapq.heappush(self._free, page)

"""What the state machine asks of a page allocator: the few lines to write around your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pagedattn.page_allocator import OutOfPages

__all__ = ["AllocatorAdapter", "Copies", "OutOfPages"]

Copies = Sequence[tuple[int, int]]
"""(source page, destination page) of each copy that the engine does before new tokens arrive."""


class AllocatorAdapter(ABC):
    """A page allocator, in the words of `PageAllocatorMachine`.

    Requests are small integers, which come again after they were freed. A call that finds too few
    pages raises `OutOfPages` and changes nothing. Leave out `fork` or `truncate` if yours has no
    such thing: the machine then never asks for it.

    Example:
        >>> from pagedattn import PageAllocator
        >>> class Ours(AllocatorAdapter):
        ...     def __init__(self, num_pages: int, page_size: int) -> None:
        ...         self.num_pages, self.page_size, self.sink_page = num_pages, page_size, 0
        ...         self.pages = PageAllocator(num_pages, page_size, sink_page=0)
        ...     @property
        ...     def num_free_pages(self) -> int:
        ...         return self.pages.num_free_pages
        ...     def pages_of(self, request: int) -> Sequence[int]:
        ...         return self.pages.pages_of(request)
        ...     def allocate(self, request: int, num_tokens: int) -> Copies:
        ...         return self.pages.extend(request, num_tokens)
        ...     def append(self, request: int, num_tokens: int) -> Copies:
        ...         return self.pages.extend(request, num_tokens)
        ...     def free(self, request: int) -> None:
        ...         self.pages.free(request)
        >>> ours = Ours(num_pages=4, page_size=2)
        >>> ours.allocate(0, num_tokens=3), ours.pages_of(0), ours.can_fork
        ([], (1, 2), False)

    Attributes:
        num_pages: Pages in all.
        page_size: Tokens in one page.
        sink_page: A page that no request may ever own; None where there is none.
    """

    num_pages: int
    page_size: int
    sink_page: int | None = None

    @property
    @abstractmethod
    def num_free_pages(self) -> int:
        """Pages that could be handed out now, the sink page not counted."""

    @abstractmethod
    def pages_of(self, request: int) -> Sequence[int]:
        """Physical pages of a request, in the order of its tokens."""

    @abstractmethod
    def allocate(self, request: int, num_tokens: int) -> Copies:
        """Create a request with room for `num_tokens` tokens, perhaps none."""

    @abstractmethod
    def append(self, request: int, num_tokens: int) -> Copies:
        """Make room for `num_tokens` more tokens, perhaps none."""

    @abstractmethod
    def free(self, request: int) -> None:
        """Forget a request that has ended."""

    def evict(self, request: int) -> None:
        """Take all pages from a request that has not ended; it is allocated anew later.

        Override it where yours is not the same as `free`.
        """
        self.free(request)

    def fork(self, parent: int, child: int, num_tokens: int) -> Copies:
        """Create `child` with the first `num_tokens` tokens of `parent`, whose pages it may share.

        The first of them to write into a shared page must get a copy: now, or when it appends.
        """
        raise NotImplementedError

    def truncate(self, request: int, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens, as after rejected speculation."""
        raise NotImplementedError

    @property
    def can_fork(self) -> bool:
        """Whether `fork` is there."""
        return type(self).fork is not AllocatorAdapter.fork

    @property
    def can_truncate(self) -> bool:
        """Whether `truncate` is there."""
        return type(self).truncate is not AllocatorAdapter.truncate

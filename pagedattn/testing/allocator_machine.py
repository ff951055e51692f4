"""A stateful test of page allocators, ours or anybody's, against a model of what memory holds.

Every token is a number of its own, written where the allocator says; a request must read back the
tokens that it was given, whatever was allocated, forked, freed and evicted meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pagedattn.testing.allocator_adapter import AllocatorAdapter, Copies, OutOfPages

NUM_TOKENS = st.integers(0, 12)

NewRequest = int | MultipleResults[int]
"""A request for the bundle, or none."""


class PageAllocatorMachine(RuleBasedStateMachine):
    """Allocates, appends, forks, truncates, frees and evicts; checks after each call.

    No page is lost, none is owned twice, the sink page is never owned, every request reads its own
    tokens, and a call that is refused had to be and changes nothing. A failure shrinks to few calls
    with few tokens, in a small pool.

    To test an allocator, say how to make one; pytest and unittest run the `TestCase`:

        class MyMachine(PageAllocatorMachine):
            def make_allocator(self, num_pages, page_size):
                return MyAdapter(num_pages, page_size)

        TestMyAllocator = MyMachine.TestCase

    A subclass may add invariants and rules, and override `create` to draw more.
    """

    requests = Bundle("requests")

    def make_allocator(self, num_pages: int, page_size: int) -> AllocatorAdapter:
        """Make an allocator in which no page is owned; the one thing to override."""
        raise NotImplementedError("override make_allocator: return an AllocatorAdapter of yours")

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 5))
    def create(self, num_pages: int, page_size: int) -> None:
        """Begin with an allocator of some size."""
        self.begin(self.make_allocator(num_pages, page_size))

    def begin(self, adapter: AllocatorAdapter) -> None:
        """Begin with this allocator."""
        self.adapter = adapter
        self.memory: list[list[int | None]] = [
            [None] * adapter.page_size for _ in range(adapter.num_pages)
        ]
        self.tokens: dict[int, list[int]] = {}  # of each request, as they should be read
        self.evicted: list[list[int]] = []
        self.num_written = 0

    @rule(target=requests, num_tokens=NUM_TOKENS)
    def allocate(self, num_tokens: int) -> NewRequest:
        """A request arrives."""
        return self._allocate(self._new_tokens(num_tokens))

    @rule(request=requests, num_tokens=NUM_TOKENS)
    def append(self, request: int, num_tokens: int) -> None:
        """A request gets more tokens."""
        num_before = len(self.tokens[request])
        needed = self._num_pages(num_before + num_tokens) - self._num_pages(num_before)
        needed += num_tokens > 0 and self._must_copy(request)
        if self._try(needed, lambda: self.adapter.append(request, num_tokens)):
            self._write(request, self._new_tokens(num_tokens))

    @precondition(lambda self: self.adapter.can_fork)
    @rule(target=requests, parent=requests, num_tokens=NUM_TOKENS)
    def fork(self, parent: int, num_tokens: int) -> NewRequest:
        """A request begins as another one does."""
        child = self._unused()
        tokens = self.tokens[parent][:num_tokens]
        needed = len(tokens) % self.adapter.page_size > 0  # for those that copy at once
        if not self._try(needed, lambda: self.adapter.fork(parent, child, len(tokens))):
            return multiple()
        self.tokens[child] = tokens
        return child

    @precondition(lambda self: self.adapter.can_truncate)
    @rule(request=requests, num_tokens=NUM_TOKENS)
    def truncate(self, request: int, num_tokens: int) -> None:
        """The last tokens of a request are taken back."""
        kept = min(num_tokens, len(self.tokens[request]))
        self.adapter.truncate(request, kept)
        del self.tokens[request][kept:]

    @rule(request=consumes(requests))
    def free(self, request: int) -> None:
        """A request ends."""
        self.adapter.free(request)
        del self.tokens[request]

    @rule(request=consumes(requests))
    def evict(self, request: int) -> None:
        """A request gives up its pages for now."""
        self.adapter.evict(request)
        self.evicted.append(self.tokens.pop(request))

    @precondition(lambda self: self.evicted)
    @rule(target=requests)
    def resume(self) -> NewRequest:
        """The request that was evicted first comes back with its tokens."""
        request = self._allocate(self.evicted[0])
        if isinstance(request, int):
            del self.evicted[0]
        return request

    @invariant()
    def no_page_is_lost_or_owned_twice(self) -> None:
        """Every page is free or owned; pages are shared by what began alike and nothing else."""
        owners: dict[int, list[int]] = defaultdict(list)
        held: dict[int, tuple[int, list[int]]] = {}  # place in the request, and its first token
        for request in self.tokens:
            for place, page in enumerate(self._pages_of(request)):
                first = place * self.adapter.page_size
                holds = place, self.tokens[request][first : first + 1]
                owners[page].append(request)
                _require(
                    len(owners[page]) == 1 or (held[page] == holds and bool(holds[1])),
                    f"page {page} is owned twice, by requests {owners[page]}",
                )
                held[page] = holds
        ownable = self.adapter.num_pages - (self.adapter.sink_page is not None)
        free = self.adapter.num_free_pages
        _require(
            len(owners) + free == ownable,
            f"{ownable} pages can be owned, but {len(owners)} are and {free} are free",
        )

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        """What was written for a request is still there."""
        for request, tokens in self.tokens.items():
            pages = self._pages_of(request)
            read = [token for page in pages for token in self.memory[page]][: len(tokens)]
            _require(
                read == tokens,
                f"request {request} in pages {pages} reads {read}, expected {tokens}",
            )

    def _allocate(self, tokens: list[int]) -> NewRequest:
        request = self._unused()
        needed = self._num_pages(len(tokens))
        if not self._try(needed, lambda: self.adapter.allocate(request, len(tokens))):
            return multiple()
        self.tokens[request] = []
        self._write(request, tokens)
        return request

    def _try(self, needed: int, call: Callable[[], Copies]) -> bool:
        """Make a call that takes `needed` pages and do its copies; False if it was refused."""
        before = self._ownership()
        try:
            copies = call()
        except OutOfPages:
            after, free = self._ownership(), self.adapter.num_free_pages
            _require(after == before, f"a refused call changed {before} to {after}")
            _require(needed > free, f"{needed} pages were refused while {free} are free")
            return False
        for source, destination in copies:
            self._check_page(destination, "copied to")
            self.memory[destination] = list(self.memory[source])
        return True

    def _ownership(self) -> tuple[dict[int, list[int]], int]:
        owned = {request: list(self.adapter.pages_of(request)) for request in self.tokens}
        return owned, self.adapter.num_free_pages

    def _write(self, request: int, tokens: Sequence[int]) -> None:
        held, pages = self.tokens[request], self._pages_of(request)
        needed = self._num_pages(len(held) + len(tokens))
        _require(
            len(pages) >= needed,
            f"request {request} has {len(pages)} pages, its tokens need {needed}",
        )
        for token in tokens:
            place, offset = divmod(len(held), self.adapter.page_size)
            self.memory[pages[place]][offset] = token
            held.append(token)

    def _pages_of(self, request: int) -> list[int]:
        pages = list(self.adapter.pages_of(request))
        for page in pages:
            self._check_page(page, f"owned by request {request}")
        return pages

    def _check_page(self, page: int, what: str) -> None:
        known = 0 <= page < self.adapter.num_pages
        _require(known, f"page {page} is {what}, of {self.adapter.num_pages} pages")
        _require(page != self.adapter.sink_page, f"page {page} is {what}: it is the sink page")

    def _must_copy(self, request: int) -> bool:
        """Whether a request's last page has room and other owners."""
        if len(self.tokens[request]) % self.adapter.page_size == 0:
            return False
        last = self._pages_of(request)[self._num_pages(len(self.tokens[request])) - 1]
        return any(last in self._pages_of(other) for other in self.tokens if other != request)

    def _new_tokens(self, num_tokens: int) -> list[int]:
        self.num_written += num_tokens
        return list(range(self.num_written - num_tokens, self.num_written))

    def _unused(self) -> int:
        """The lowest number that no request has: numbers of ended requests come again."""
        return next(n for n in range(len(self.tokens) + 1) if n not in self.tokens)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.adapter.page_size)


def _require(condition: bool, message: str) -> None:
    """What an allocator must do; unlike `assert` it is there under `python -O`."""
    if not condition:
        raise AssertionError(message)

"""The allocator against a model: every request's tokens, written to and read back from pages."""

import copy
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pagedattn import OutOfPages, PageAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Each token is a number of its own; a request reads back exactly the tokens it was given."""

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 5), sink=st.integers(-1, 11))
    def create(self, num_pages, page_size, sink):
        self.sink = None if sink < 0 else sink % num_pages
        self.allocator = PageAllocator(num_pages, page_size, self.sink)
        self.memory = [[None] * page_size for _ in range(num_pages)]
        self.tokens = {}  # request -> its tokens
        self.num_written = 0
        self.num_requests = 0

    def pick(self, data):
        return data.draw(st.sampled_from(list(self.tokens)))

    def write(self, request, num_tokens):
        """Extend, do the copies, write the new tokens to their slots."""
        before = copy.deepcopy(vars(self.allocator))
        copies, refusal = [], None
        try:
            copies = self.allocator.extend(request, num_tokens)
        except OutOfPages as error:
            refusal = error
        if refusal:
            assert vars_equal(before, vars(self.allocator))
            assert refusal.num_free == self.allocator.num_free_pages < refusal.num_asked
            return
        for source, destination in copies:
            self.memory[destination] = list(self.memory[source])
        tokens = self.tokens.setdefault(request, [])
        pages = self.allocator.pages_of(request)
        for _ in range(num_tokens):
            page, offset = divmod(len(tokens), self.allocator.page_size)
            self.memory[pages[page]][offset] = self.num_written
            tokens.append(self.num_written)
            self.num_written += 1

    @rule(num_tokens=st.integers(0, 12))
    def start(self, num_tokens):
        self.num_requests += 1
        self.write(self.num_requests, num_tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def extend(self, data, num_tokens):
        self.write(self.pick(data), num_tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data, whole):
        parent = self.pick(data)
        self.num_requests += 1
        kept = len(self.tokens[parent])
        if whole:
            self.allocator.fork(parent, self.num_requests)
        else:
            kept = data.draw(st.integers(0, kept))
            self.allocator.fork(parent, self.num_requests, kept)
        self.tokens[self.num_requests] = self.tokens[parent][:kept]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        request = self.pick(data)
        kept = data.draw(st.integers(0, len(self.tokens[request])))
        self.allocator.truncate(request, kept)
        del self.tokens[request][kept:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        request = self.pick(data)
        self.allocator.free(request)
        del self.tokens[request]

    @invariant()
    def every_request_reads_its_own_tokens(self):
        table = self.allocator.page_table(list(self.tokens))
        assert self.allocator.requests == list(self.tokens)
        assert table.kv_lens.tolist() == [len(tokens) for tokens in self.tokens.values()]
        for row, tokens in enumerate(self.tokens.values()):
            read = [token for page in table.pages_of(row).tolist() for token in self.memory[page]]
            assert read[: len(tokens)] == tokens
            assert len(read) - len(tokens) < self.allocator.page_size

    @invariant()
    def no_page_is_lost_or_owned_without_a_count(self):
        owned = Counter(p for r in self.tokens for p in self.allocator.pages_of(r))
        num_pages = self.allocator.num_pages
        assert [self.allocator.ref_count(p) for p in range(num_pages)] == [
            owned[p] for p in range(num_pages)
        ]
        num_ownable = num_pages - (self.sink is not None)
        assert len(owned) + self.allocator.num_free_pages == num_ownable
        assert self.sink not in owned


def vars_equal(before, after):
    """Equality of two states; the records of requests are compared by their fields."""

    def plain(state):
        return {
            **state,
            "_requests": {key: vars(value) for key, value in state["_requests"].items()},
        }

    return plain(before) == plain(after)


TestAllocator = AllocatorMachine.TestCase


def test_pages_are_handed_out_lowest_first_whatever_was_freed_before():
    allocator = PageAllocator(num_pages=6, page_size=2)
    for request in ("a", "b", "c"):
        allocator.extend(request, 2)
    allocator.free("b")
    allocator.free("a")
    allocator.extend("d", 6)
    assert allocator.pages_of("d") == (1, 2, 4)


def test_extending_either_side_of_a_shared_part_page_copies_it_once():
    allocator = PageAllocator(num_pages=9, page_size=4)
    allocator.extend("parent", 6)
    allocator.fork("parent", "child")
    assert allocator.extend("parent", 1) == [(2, 3)]
    assert allocator.extend("child", 1) == []  # it owns the page alone by now
    assert allocator.pages_of("child") == (1, 2)
    assert [allocator.ref_count(page) for page in range(4)] == [0, 2, 1, 1]


def test_a_full_shared_page_is_never_copied():
    allocator = PageAllocator(num_pages=9, page_size=4)
    allocator.extend("parent", 8)
    allocator.fork("parent", "child", 4)
    assert allocator.extend("child", 3) == []
    assert allocator.extend("parent", 3) == []


def test_out_of_pages_says_what_was_asked_and_what_is_free_and_counts_the_copy():
    allocator = PageAllocator(num_pages=4, page_size=4)
    allocator.extend("parent", 6)
    allocator.fork("parent", "child")
    with pytest.raises(OutOfPages, match="2 pages were asked for and 1 are free"):
        allocator.extend("child", 3)
    with pytest.raises(OutOfPages, match="3 pages were asked for"):
        allocator.extend("new", 9)
    assert allocator.requests == ["parent", "child"]
    assert allocator.extend("child", 2) == [(2, 3)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.extend("a", -1), "num_tokens must not be negative, got -1"),
        (lambda a: a.free("b"), "no request 'b'"),
        (lambda a: a.kv_len("b"), "no request 'b'"),
        (lambda a: a.page_table(["a", "b"]), "no request 'b'"),
        (lambda a: a.fork("b", "c"), "no request 'b'"),
        (lambda a: a.fork("a", "a"), "request 'a' exists already"),
        (lambda a: a.fork("a", "c", 6), "num_tokens must be 0 to 5"),
        (lambda a: a.truncate("a", 6), "num_tokens must be 0 to 5"),
        (lambda a: a.truncate("a", -1), "num_tokens must be 0 to 5"),
        (lambda a: a.ref_count(8), "page must be 0 to 7, got 8"),
        (lambda _: PageAllocator(0, 4), "num_pages must be at least 1, got 0"),
        (lambda _: PageAllocator(4, 0), "page_size must be at least 1, got 0"),
        (lambda _: PageAllocator(4, 4, 4), "sink_page must be 0 to 3 or None, got 4"),
    ],
)
def test_bad_calls_say_what_was_wrong_and_change_nothing(call, message):
    allocator = PageAllocator(num_pages=8, page_size=4)
    allocator.extend("a", 5)
    before = copy.deepcopy(vars(allocator))
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert vars_equal(before, vars(allocator))

"""The allocator against a model of memory, and what it says of bad calls."""

import copy
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from pagedattn import OutOfPages, PageAllocator
from pagedattn.testing import AllocatorAdapter, PageAllocatorMachine


class Adapter(AllocatorAdapter):
    """`PageAllocator` in the machine's words, and a closer look at what it refuses."""

    def __init__(self, allocator: PageAllocator):
        self.allocator = allocator
        self.num_pages, self.page_size = allocator.num_pages, allocator.page_size
        self.sink_page = allocator.sink_page

    @property
    def num_free_pages(self):
        return self.allocator.num_free_pages

    def pages_of(self, request):
        return self.allocator.pages_of(request)

    def free(self, request):
        self.allocator.free(request)

    def allocate(self, request, num_tokens):
        return self.append(request, num_tokens)

    def append(self, request, num_tokens):
        before = copy.deepcopy(vars(self.allocator))
        try:
            return self.allocator.extend(request, num_tokens)
        except OutOfPages as error:
            refusal = error
        assert vars_equal(before, vars(self.allocator))
        assert refusal.num_free == self.num_free_pages < refusal.num_asked
        raise refusal

    def fork(self, parent, child, num_tokens):
        kv_len = self.allocator.kv_len(parent)
        self.allocator.fork(parent, child, None if num_tokens == kv_len else num_tokens)
        return []

    def truncate(self, request, num_tokens):
        self.allocator.truncate(request, num_tokens)


class AllocatorMachine(PageAllocatorMachine):
    """Ours, whose tables and counts must agree with it too."""

    allocator_class = PageAllocator

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 5), sink=st.integers(-1, 11))
    def create(self, num_pages, page_size, sink):
        sink_page = None if sink < 0 else sink % num_pages
        self.allocator = self.allocator_class(num_pages, page_size, sink_page)
        self.begin(Adapter(self.allocator))

    @invariant()
    def tables_are_those_of_the_requests(self):
        table = self.allocator.page_table(list(self.tokens))
        assert sorted(self.allocator.requests) == sorted(self.tokens)
        assert table.kv_lens.tolist() == [len(tokens) for tokens in self.tokens.values()]
        for row, request in enumerate(self.tokens):
            pages = table.pages_of(row).tolist()
            assert pages == list(self.allocator.pages_of(request))
            assert len(pages) == -(-len(self.tokens[request]) // table.page_size)

    @invariant()
    def counts_are_numbers_of_owners(self):
        owned = Counter(p for r in self.tokens for p in self.allocator.pages_of(r))
        pages = range(self.allocator.num_pages)
        assert [self.allocator.ref_count(page) for page in pages] == [owned[p] for p in pages]


def vars_equal(before, after):
    """Equality of two states; the records of requests are compared by their fields."""

    def plain(state):
        return {
            **state,
            "_requests": {key: vars(value) for key, value in state["_requests"].items()},
        }

    return plain(before) == plain(after)


TestAllocator = AllocatorMachine.TestCase


class HandsOutTheSink(PageAllocator):
    def __init__(self, num_pages, page_size, sink_page):
        super().__init__(num_pages, page_size, sink_page)
        self._free = list(range(num_pages - 1))


class ForkCountsNothing(PageAllocator):
    def fork(self, parent, child, num_tokens=None):
        counts = list(self._ref_counts)
        super().fork(parent, child, num_tokens)
        self._ref_counts = counts


class WritesIntoSharedPages(PageAllocator):
    def extend(self, request, num_tokens):
        for source, destination in super().extend(request, num_tokens):
            pages = self._requests[request].pages
            pages[pages.index(destination)] = source
            self._ref_counts[source] += 1
            self._drop(destination)
        return []


class ForgetsToCopy(PageAllocator):
    def extend(self, request, num_tokens):
        super().extend(request, num_tokens)
        return []


class LosesTheLastPageOfWhatIsFreed(PageAllocator):
    def free(self, request):
        owned = self._requests[request]
        del owned.pages[-1:]
        super().free(request)


class TakesPagesBeforeItRefuses(PageAllocator):
    def extend(self, request, num_tokens):
        try:
            return super().extend(request, num_tokens)
        except OutOfPages:
            self._free.clear()
            raise


class KeepsAPageBack(PageAllocator):
    def extend(self, request, num_tokens):
        before = copy.deepcopy(vars(self))
        copies = super().extend(request, num_tokens)
        if num_tokens and not self._free:
            vars(self).update(before)
            raise OutOfPages(1, 0)
        return copies


class FreesAPageTwice(PageAllocator):
    def truncate(self, request, num_tokens):
        pages = self.pages_of(request)
        super().truncate(request, num_tokens)
        self._free += [page for page in pages[-1:] if num_tokens and page not in self._free]


class MixesUpTwoRequests(PageAllocator):
    def pages_of(self, request):
        return super().pages_of(self.requests[0])


class GivesOnePageTooFew(PageAllocator):
    def _num_pages_for(self, num_tokens):
        return num_tokens // self.page_size


FAULTS = {
    HandsOutTheSink: "it is the sink page",
    ForkCountsNothing: "can be owned, but|owned twice",
    WritesIntoSharedPages: "reads .* expected",
    ForgetsToCopy: "reads .* expected",
    LosesTheLastPageOfWhatIsFreed: "can be owned, but",
    TakesPagesBeforeItRefuses: "a refused call changed",
    KeepsAPageBack: "were refused while",
    FreesAPageTwice: "can be owned, but|owned twice",
    MixesUpTwoRequests: "pages, its tokens need|owned twice",
    GivesOnePageTooFew: "pages, its tokens need",
}


class Bare(PageAllocatorMachine):
    """The public machine alone, without what only ours must do."""

    def make_allocator(self, num_pages, page_size):
        return BareAdapter(self.allocator_class(num_pages, page_size, 0))


class BareAdapter(Adapter):
    def append(self, request, num_tokens):
        return self.allocator.extend(request, num_tokens)


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda faulty: faulty.__name__)
def test_the_machine_finds_a_planted_fault_and_says_what_is_wrong(faulty):
    machine = type("Machine", (Bare,), {"allocator_class": faulty})
    quiet = settings(
        max_examples=500, phases=[Phase.generate], database=None, derandomize=True, deadline=None
    )
    with pytest.raises(AssertionError, match=FAULTS[faulty]):
        run_state_machine_as_test(machine, settings=quiet)


def test_a_machine_without_an_allocator_says_what_to_override():
    with pytest.raises(NotImplementedError, match="override make_allocator"):
        run_state_machine_as_test(PageAllocatorMachine)


class WithoutForks(BareAdapter):
    """An allocator that shares nothing and takes nothing back."""

    fork, truncate = AllocatorAdapter.fork, AllocatorAdapter.truncate


def test_an_allocator_is_not_asked_for_what_it_does_not_have():
    class Machine(PageAllocatorMachine):
        def make_allocator(self, num_pages, page_size):
            return WithoutForks(PageAllocator(num_pages, page_size, None))

    assert not WithoutForks(PageAllocator(2, 1)).can_fork
    assert BareAdapter(PageAllocator(2, 1)).can_truncate
    run_state_machine_as_test(Machine)


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

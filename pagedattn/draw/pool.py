"""What a picture of a page pool shows, as numbers and names: no letters, no colours.

Knows page tables; knows nothing of how they are drawn. Per-page facts are arrays, so that a pool of
a million pages costs little; single pages become objects only where they are drawn one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pagedattn.draw.requests import Requests
from pagedattn.page_table import PageTable

MAX_DRAWN_PAGES = 48
"""Drawn one by one up to so many, a run of pages that nobody owns counting as one."""
MAX_PAGES = 1 << 24
"""What is kept of each page must fit in memory."""
SHORTEST_RUN = 4
"""So many neighbouring pages that nobody owns are drawn as one."""


class SlotState(IntEnum):
    """What is in a slot. Where owners differ, the highest is drawn."""

    UNUSED = 0  # behind the last token
    UNSEEN = 1  # a token that no query of the step sees
    HELD = 2
    NEW = 3  # written in this step


class PageKind(IntEnum):
    """Whose a page is."""

    FREE = 0
    ELSEWHERE = 1  # owned by requests that are not in the table
    SINK = 2
    OWNED = 3


@dataclass(frozen=True)
class Owner:
    """A request, and which of its pages this is."""

    request: int
    index: int


@dataclass(frozen=True)
class DrawnPage:
    """One page, or a run of pages of one kind that nobody in the table owns."""

    first: int
    last: int
    kind: PageKind
    owners: tuple[Owner, ...]
    slots: tuple[SlotState, ...]  # page_size of them where there are owners

    @property
    def num_tokens(self) -> int:
        """Slots that hold a token."""
        return sum(slot > SlotState.UNUSED for slot in self.slots)

    @property
    def is_unseen(self) -> bool:
        """Whether no query sees any token of the page."""
        return bool(self.owners) and max(self.slots) <= SlotState.UNSEEN


@dataclass(frozen=True, eq=False)
class Pool:
    """All pages of a cache, and who owns them."""

    table: PageTable  # on the host
    requests: Requests
    kinds: NDArray[np.uint8]  # u8[num_pages], of PageKind
    num_owners: NDArray[np.int64]  # i64[num_pages]
    first_owner: NDArray[np.int64]  # i64[num_pages], -1 where there is none
    num_tokens: NDArray[np.int64]  # i64[num_pages], slots that hold a token
    is_unseen: NDArray[np.bool_]  # bool[num_pages], owned, and no query sees any of its tokens

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.table.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return len(self.kinds)

    @property
    def num_unused(self) -> int:
        """Slots behind the last token, in pages that a request owns."""
        return int((self.page_size - self.num_tokens[self.num_owners > 0]).sum())

    def count(self, kind: PageKind) -> int:
        """How many pages are of a kind."""
        return int((self.kinds == kind).sum())

    def drawn_pages(self) -> list[DrawnPage] | None:
        """Every page in order, long runs without owner as one; `None`: too many for one by one."""
        starts = self._starts() if self.num_pages else []
        if len(starts) > MAX_DRAWN_PAGES:
            return None
        ends = [*starts, self.num_pages][1:]
        return [self._drawn_page(first, end - 1) for first, end in zip(starts, ends, strict=True)]

    def _starts(self) -> list[int]:
        """First page of everything that is drawn; cut off where there are too many."""
        alone = (self.num_owners > 0) | (self.kinds == PageKind.SINK)
        begins = np.ones(self.num_pages, dtype=bool)
        begins[1:] = alone[1:] | alone[:-1] | (self.kinds[1:] != self.kinds[:-1])
        runs = np.flatnonzero(begins)
        if len(runs) > MAX_DRAWN_PAGES:
            return [int(run) for run in runs]
        starts: list[int] = []
        for begin, end in zip(runs, [*runs[1:], self.num_pages], strict=True):
            is_short = end - begin < SHORTEST_RUN
            starts += range(int(begin), int(end)) if is_short else [int(begin)]
        return starts

    def _drawn_page(self, first: int, last: int) -> DrawnPage:
        kind = PageKind(int(self.kinds[first]))
        indptr = self.table.kv_indptr.numpy()
        owners = []
        for at in np.flatnonzero(self.table.kv_indices.numpy() == first):
            request = int(np.searchsorted(indptr, at, side="right")) - 1
            owners.append(Owner(request, int(at - indptr[request])))
        slots = np.max([self._slot_states(owner) for owner in owners], axis=0) if owners else []
        return DrawnPage(first, last, kind, tuple(owners), tuple(SlotState(s) for s in slots))

    def _slot_states(self, owner: Owner) -> NDArray[np.int64]:
        """What the slots of a page are to one of its owners."""
        requests, request = self.requests, owner.request
        token = owner.index * self.page_size + np.arange(self.page_size)
        states = np.where(
            token < requests.first_seen[request], int(SlotState.UNSEEN), int(SlotState.HELD)
        )
        states[token >= requests.first_new[request]] = SlotState.NEW
        states[token >= requests.kv_lens[request]] = SlotState.UNUSED
        return states


def build_pool(
    table: PageTable,
    requests: Requests,
    num_pages: int | None,
    sink_page: int | None,
    ref_counts: Sequence[int] | None,
) -> Pool:
    """Collect what is known of every page.

    Raises:
        ValueError: Something contradicts the table; the message names it.
    """
    ids = table.kv_indices.numpy()
    num_needed = int(ids.max()) + 1 if len(ids) else 0
    if num_pages is None:
        num_pages = num_needed if sink_page is None else max(num_needed, sink_page + 1)
        num_pages = num_pages if ref_counts is None else max(num_pages, len(ref_counts))
    if num_pages > MAX_PAGES:
        raise ValueError(f"{num_pages} pages are too many to draw, expected {MAX_PAGES} at most")
    if num_pages < num_needed:
        raise ValueError(f"num_pages is {num_pages}, but page_table holds page id {num_needed - 1}")
    if sink_page is not None and not 0 <= sink_page < num_pages:
        raise ValueError(f"sink_page must be 0 to {num_pages - 1} or None, got {sink_page}")
    num_owners = np.bincount(ids, minlength=num_pages)
    kinds = np.where(num_owners > 0, int(PageKind.OWNED), int(PageKind.FREE)).astype(np.uint8)
    if ref_counts is not None:
        counts = _checked_counts(ref_counts, num_owners)
        kinds[(counts > 0) & (num_owners == 0)] = PageKind.ELSEWHERE
    if sink_page is not None:
        kinds[sink_page] = PageKind.SINK

    pages_each = np.diff(table.kv_indptr.numpy())
    request = np.repeat(np.arange(table.batch_size), pages_each)
    index = np.arange(len(ids)) - np.repeat(table.kv_indptr.numpy()[:-1], pages_each)
    tokens = np.minimum(requests.kv_lens[request] - index * table.page_size, table.page_size)
    num_tokens = np.zeros(num_pages, dtype=np.int64)
    np.maximum.at(num_tokens, ids, tokens)
    first_owner = np.full(num_pages, -1, dtype=np.int64)
    first_owner[ids[::-1]] = request[::-1]  # the last write stays: the first owner
    is_unseen = num_owners > 0
    is_seen = index * table.page_size + tokens > requests.first_seen[request]
    is_unseen[ids[is_seen]] = False
    return Pool(table, requests, kinds, num_owners, first_owner, num_tokens, is_unseen)


def _checked_counts(ref_counts: Sequence[int], num_owners: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.asarray(ref_counts, dtype=np.int64)
    if counts.shape != num_owners.shape:
        raise ValueError(f"ref_counts has {len(counts)} entries, expected {len(num_owners)} pages")
    wrong = counts < num_owners
    if wrong.any():
        page = int(wrong.argmax())
        raise ValueError(
            f"ref_counts[{page}] is {counts[page]}, but page_table names page {page} "
            f"{num_owners[page]} times"
        )
    return counts


def coarse(slots: Sequence[SlotState], max_marks: int) -> list[SlotState]:
    """One mark for each slot, or for several neighbours where there are more than `max_marks`.

    A mark of several slots shows the highest of their states.

    Example:
        >>> [int(mark) for mark in coarse([SlotState.HELD] * 5 + [SlotState.UNUSED] * 3, 4)]
        [2, 2, 2, 0]
    """
    step = slots_per_mark(len(slots), max_marks)
    return [max(slots[begin : begin + step]) for begin in range(0, len(slots), step)]


def slots_per_mark(page_size: int, max_marks: int) -> int:
    """How many slots one mark stands for."""
    return max(1, -(-page_size // max_marks))

"""The strategies: `pagedattn.checking.drawing` with hypothesis making the choices.

Arguments are checked when something is drawn, as hypothesis's own strategies do; what is wrong then
raises its `InvalidArgument`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from pagedattn.capacity import Capacity
from pagedattn.checking import drawing
from pagedattn.checking.batch import Batch
from pagedattn.checking.drawing import MODES, SpecLimits, StepLimits
from pagedattn.checking.sequence import ReplaySequence, draw_sequence
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

T = TypeVar("T")


class _HypothesisChoices:
    """Choices that hypothesis makes, remembers and shrinks."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def one_of(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


def _check_bounds(name: str, low: int, high: int, least: int) -> None:
    """Require `least <= low <= high`."""
    if not least <= low <= high:
        raise InvalidArgument(
            f"min_{name}={low} and max_{name}={high}: expected {least} <= min_{name} <= max_{name}"
        )


def _check_at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise InvalidArgument(f"{name} must be at least {least}, got {value}")


def _check_mode(mode: str, max_batch_size: int) -> None:
    """Require a known mode, and room for the two requests of a mixed step."""
    if mode not in MODES:
        raise InvalidArgument(f"mode must be one of {MODES}, got {mode!r}")
    if mode == "mixed" and max_batch_size < 2:
        raise InvalidArgument(f"a mixed step has at least 2 requests, got {max_batch_size}")


@st.composite
def page_sizes(draw: st.DrawFn, *, min_page_size: int = 1, max_page_size: int = 256) -> int:
    """Page sizes, usual and odd ones. Shrinks to 4, or to the smallest in bounds."""
    _check_bounds("page_size", min_page_size, max_page_size, least=1)
    return drawing.draw_page_size(
        _HypothesisChoices(draw), min_page_size=min_page_size, max_page_size=max_page_size
    )


@st.composite
def windows(
    draw: st.DrawFn, *, page_size: int = 16, min_window_left: int = -1, max_window_left: int = 300
) -> int:
    """Values of `window_left`, many next to edges of pages and tiles. Shrinks to -1.

    Args:
        draw: Hypothesis's.
        page_size: Windows are drawn near multiples of it.
        min_window_left: The smallest window, which it shrinks to; -1 means none.
        max_window_left: The largest window.
    """
    _check_bounds("window_left", min_window_left, max_window_left, least=-1)
    choices = _HypothesisChoices(draw)
    if min_window_left >= 0:
        return drawing.draw_near_edge(choices, min_window_left, max_window_left, page_size)
    return drawing.draw_window(choices, page_size, max_window_left=max_window_left)


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    page_size: int = 16,
    max_qo_heads: int = SpecLimits.max_qo_heads,
    head_dims: Sequence[int] = SpecLimits.head_dims,
    dtypes: Sequence[torch.dtype] = SpecLimits.dtypes,
    max_window_left: int = SpecLimits.max_window_left,
    max_soft_cap: float = SpecLimits.max_soft_cap,
) -> AttentionSpec:
    """Layer kinds. Shrinks to one head of the first of `head_dims`, causal, without options.

    Args:
        draw: Hypothesis's.
        page_size: Windows are drawn near multiples of it.
        max_qo_heads: Query heads at most.
        head_dims: To choose from, simplest first.
        dtypes: To choose from, simplest first.
        max_window_left: The largest window; -1 draws none.
        max_soft_cap: The largest soft cap; 0 draws none.
    """
    _check_at_least("max_qo_heads", max_qo_heads, 1)
    _check_at_least("max_window_left", max_window_left, -1)
    _check_at_least("max_soft_cap", max_soft_cap, 0)
    limits = SpecLimits(
        max_qo_heads, tuple(head_dims), tuple(dtypes), max_window_left, max_soft_cap
    )
    return drawing.draw_spec(_HypothesisChoices(draw), page_size, limits)


@st.composite
def kv_lengths(
    draw: st.DrawFn,
    *,
    page_size: int = 16,
    min_batch_size: int = 1,
    max_batch_size: int = 4,
    min_kv_len: int = 0,
    max_kv_len: int = 300,
) -> tuple[int, ...]:
    """Keys of each request, many next to page and tile edges. Shrinks to one request of one key."""
    _check_bounds("batch_size", min_batch_size, max_batch_size, least=0)
    _check_bounds("kv_len", min_kv_len, max_kv_len, least=0)
    choices = _HypothesisChoices(draw)
    batch_size = choices.integer(min_batch_size, max_batch_size)
    return tuple(
        drawing.draw_kv_lens(
            choices, batch_size, page_size, min_kv_len=min_kv_len, max_kv_len=max_kv_len
        )
    )


@st.composite
def query_lengths(
    draw: st.DrawFn, kv_lens: Sequence[int], *, mode: str = "prefill", max_qo_len: int = 300
) -> tuple[int, ...]:
    """Queries of each request of the given lengths. Shrinks to whole prompts, or to one each.

    Args:
        draw: Hypothesis's.
        kv_lens: Keys of each request; for "mixed" at least two.
        mode: "prefill", "decode" (one query each) or "mixed" (both in one step).
        max_qo_len: Queries of a request at most; at least 2.
    """
    _check_mode(mode, len(kv_lens))
    _check_at_least("max_qo_len", max_qo_len, 2)
    most = [max_qo_len] * len(kv_lens)
    return tuple(drawing.draw_qo_lens(_HypothesisChoices(draw), mode, kv_lens, most))


@st.composite
def page_tables(
    draw: st.DrawFn,
    *,
    page_size: int | None = None,
    min_batch_size: int = 0,
    max_batch_size: int = 4,
    min_kv_len: int = 0,
    max_kv_len: int = 300,
    max_spare_pages: int = 8,
) -> PageTable:
    """Page tables. Shrinks to the smallest batch, one token on page 0, and pages in order.

    Args:
        draw: Hypothesis's.
        page_size: Tokens in one page; drawn where it is None.
        min_batch_size: Requests at least.
        max_batch_size: Requests at most.
        min_kv_len: Keys of a request at least.
        max_kv_len: Keys of a request at most.
        max_spare_pages: Page ids go as high as the pages needed and this many more.
    """
    _check_bounds("batch_size", min_batch_size, max_batch_size, least=0)
    _check_bounds("kv_len", min_kv_len, max_kv_len, least=0)
    _check_at_least("max_spare_pages", max_spare_pages, 0)
    choices = _HypothesisChoices(draw)
    page_size = drawing.draw_page_size(choices) if page_size is None else page_size
    batch_size = choices.integer(min_batch_size, max_batch_size)
    kv_lens = drawing.draw_kv_lens(
        choices, batch_size, page_size, min_kv_len=min_kv_len, max_kv_len=max_kv_len
    )
    pages, _ = drawing.draw_pages(choices, kv_lens, page_size, max_spare_pages)
    ids = [page for request in pages for page in request]
    return PageTable.from_lengths(kv_lens, page_size, ids)


def _specs_near(page_size: int) -> st.SearchStrategy[AttentionSpec]:
    return specs(page_size=page_size)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    mode: str | None = None,
    specs: st.SearchStrategy[AttentionSpec] | None = None,
    page_sizes: st.SearchStrategy[int] | None = None,
    min_batch_size: int = StepLimits.min_batch_size,
    max_batch_size: int = StepLimits.max_batch_size,
    max_kv_len: int = StepLimits.max_kv_len,
    max_work: int = StepLimits.max_work,
) -> Batch:
    """Whole steps. Shrinks to one request with one token on page 0, in float32.

    Requests without keys, without queries, and with more queries than keys are among them; where a
    kernel never gets those, `.filter` leaves them out.

    Args:
        draw: Hypothesis's.
        mode: "prefill", "decode" or "mixed" (two requests at least); drawn where it is None.
        specs: Layer kinds; by default any, with windows near multiples of the page size.
        page_sizes: Page sizes; by default any up to 256.
        min_batch_size: Requests at least.
        max_batch_size: Requests at most.
        max_kv_len: Keys of a request at most.
        max_work: Bounds the queries of a request: tiles of 64 by 64 scores, over all query heads.
            The default suits Triton's interpreter.
    """
    _check_bounds("batch_size", min_batch_size, max_batch_size, least=0)
    _check_at_least("max_kv_len", max_kv_len, 0)
    _check_at_least("max_work", max_work, 0)
    choices = _HypothesisChoices(draw)
    mode = drawing.draw_mode(choices, max_batch_size) if mode is None else mode
    _check_mode(mode, max_batch_size)
    page_size = drawing.draw_page_size(choices) if page_sizes is None else draw(page_sizes)
    any_spec = _specs_near(page_size) if specs is None else specs
    limits = StepLimits(min_batch_size, max_batch_size, max_kv_len, max_work)
    return drawing.draw_batch_of(choices, mode, draw(any_spec), page_size, limits)


def mixed_batches(
    *,
    specs: st.SearchStrategy[AttentionSpec] | None = None,
    page_sizes: st.SearchStrategy[int] | None = None,
    max_batch_size: int = StepLimits.max_batch_size,
    max_kv_len: int = StepLimits.max_kv_len,
    max_work: int = StepLimits.max_work,
) -> st.SearchStrategy[Batch]:
    """Steps with at least one decode row and one prompt. Shrinks to one of each.

    Args:
        specs: As in `batches`.
        page_sizes: As in `batches`.
        max_batch_size: Requests at most.
        max_kv_len: Keys of a request at most.
        max_work: As in `batches`.
    """
    return batches(
        mode="mixed",
        specs=specs,
        page_sizes=page_sizes,
        min_batch_size=2,
        max_batch_size=max_batch_size,
        max_kv_len=max_kv_len,
        max_work=max_work,
    )


@st.composite
def replay_sequences(
    draw: st.DrawFn,
    *,
    specs: st.SearchStrategy[AttentionSpec] | None = None,
    page_sizes: st.SearchStrategy[int] | None = None,
    capacity: Capacity | None = None,
    max_steps: int = 5,
    max_batch_size: int = StepLimits.max_batch_size,
    max_kv_len: int = StepLimits.max_kv_len,
    max_work: int = StepLimits.max_work,
) -> ReplaySequence:
    """Steps for one captured graph or one live object. Shrinks to two of one token on page 0.

    A step is unlike the one before it in lengths, pages and number of requests; or all its requests
    are one token later; or some of them are gone; or all.

    Args:
        draw: Hypothesis's.
        specs: As in `batches`; all steps have one.
        page_sizes: As in `batches`; all steps have one.
        capacity: What your object was built for; by default it is drawn, close to what is needed.
        max_steps: Steps at most; there are at least two.
        max_batch_size: Requests of a step at most.
        max_kv_len: Keys of a request at most.
        max_work: As in `batches`.
    """
    _check_at_least("max_steps", max_steps, 2)
    _check_at_least("max_batch_size", max_batch_size, 1)
    _check_at_least("max_kv_len", max_kv_len, 0)
    _check_at_least("max_work", max_work, 0)
    choices = _HypothesisChoices(draw)
    page_size = drawing.draw_page_size(choices) if page_sizes is None else draw(page_sizes)
    spec = draw(_specs_near(page_size) if specs is None else specs)
    limits = StepLimits(1, max_batch_size, max_kv_len, max_work)
    num_steps = choices.integer(2, max_steps)
    return draw_sequence(choices, spec, page_size, num_steps, limits, capacity)

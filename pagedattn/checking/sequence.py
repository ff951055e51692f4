"""Steps that one object serves one after another, and drawing them.

For what keeps something from step to step: a captured graph that is replayed after each plan, or a
live object with buffers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagedattn.capacity import Capacity
from pagedattn.checking.batch import Batch
from pagedattn.checking.drawing import (
    Choices,
    StepLimits,
    draw_lens,
    draw_mode,
    draw_pages_of_pool,
    draw_values,
    num_pages_of,
)
from pagedattn.checking.step import Step
from pagedattn.spec import AttentionSpec

STEP_KINDS = ("another", "another", "another", "next", "next", "fewer", "nothing")
MAX_SPARE_PAGES = 8
MAX_SLACK = 3

Lens = tuple[tuple[int, ...], tuple[int, ...]]
"""Keys and queries of each request."""


@dataclass(frozen=True)
class ReplaySequence:
    """Steps of one layer kind over one pool of pages, none larger than a capacity.

    Args:
        capacity: What an object must be built for to serve every step.
        batches: The steps, in order; they have one `spec`, `page_size` and `num_pages`.
    """

    capacity: Capacity
    batches: tuple[Batch, ...]

    @property
    def spec(self) -> AttentionSpec:
        """The layer kind of every step."""
        return self.batches[0].spec

    @property
    def page_size(self) -> int:
        """Tokens in one page."""
        return self.batches[0].page_size

    @property
    def num_pages(self) -> int:
        """Pages of the cache of every step."""
        return self.batches[0].num_pages

    def materialise(self, device: torch.device | str = "cpu") -> Iterator[Step]:
        """Make the tensors of one step after another.

        Every step has a cache of its own, all of one shape: a captured graph's is filled with
        `cache.copy_(step.kv_cache)` before the replay. `q` has the step's rows alone.
        """
        return (batch.materialise(device) for batch in self.batches)


def draw_sequence(
    choices: Choices,
    spec: AttentionSpec,
    page_size: int,
    num_steps: int,
    limits: StepLimits,
    capacity: Capacity | None = None,
) -> ReplaySequence:
    """Draw steps that follow one another; the simplest have one request with one token on page 0.

    A step is unlike the one before it, or its requests one token later, or some of its requests,
    or without any.

    Args:
        choices: Where decisions come from.
        spec: The layer kind.
        page_size: Tokens in one page.
        num_steps: How many, at least 1.
        limits: Of each step.
        capacity: What the steps must fit, to which they are cut; by default the steps' own, and at
            most 3 more of everything.
    """
    steps: list[Lens] = []
    for _ in range(num_steps):
        lens = _draw_step(choices, spec, page_size, limits, steps[-1] if steps else None)
        steps.append(lens if capacity is None else _cut(lens, page_size, capacity))
    if capacity is None:
        capacity = _capacity_of(steps, page_size, slack=choices.integer(0, MAX_SLACK))
    needed = max(num_pages_of(kv_lens, page_size) for kv_lens, _ in steps)
    num_pages = max(1, needed) + choices.integer(0, MAX_SPARE_PAGES)
    batches = []
    for kv_lens, qo_lens in steps:
        pages = draw_pages_of_pool(choices, kv_lens, page_size, num_pages)
        batch = Batch(spec, page_size, num_pages, kv_lens, qo_lens, pages)
        batches.append(draw_values(choices, batch))
    return ReplaySequence(capacity, tuple(batches))


def _draw_step(
    choices: Choices,
    spec: AttentionSpec,
    page_size: int,
    limits: StepLimits,
    before: Lens | None,
) -> Lens:
    """Draw the lengths of a step that follows another."""
    mode = draw_mode(choices, limits.max_batch_size)
    another = draw_lens(choices, mode, spec, page_size, limits)
    # chosen last: the simplest is the one with fewest choices, which should not be "nothing"
    kind = choices.one_of(STEP_KINDS)
    if kind == "nothing":
        return (), ()
    if kind == "another" or before is None or not before[0]:
        return another
    kv_lens, qo_lens = before
    if kind == "next":
        kv_lens = tuple(min(kv_len + 1, limits.max_kv_len) for kv_len in kv_lens)
        return kv_lens, (1,) * len(kv_lens)
    kept = choices.integer(1, len(kv_lens))
    return kv_lens[-kept:], qo_lens[-kept:]


def _cut(lens: Lens, page_size: int, capacity: Capacity) -> Lens:
    """The largest part of a step that fits: fewer requests, then shorter ones."""
    pages, tokens = capacity.max_pages, capacity.max_tokens
    kv_lens, qo_lens = [], []
    for kv_len, qo_len in list(zip(*lens, strict=True))[: capacity.max_batch_size]:
        kv_lens.append(min(kv_len, pages * page_size))
        qo_lens.append(min(qo_len, tokens))
        pages -= num_pages_of(kv_lens[-1:], page_size)
        tokens -= qo_lens[-1]
    return tuple(kv_lens), tuple(qo_lens)


def _capacity_of(steps: list[Lens], page_size: int, slack: int) -> Capacity:
    """The smallest capacity for these steps, and so much more of everything."""
    batch_size = max(1, *(len(kv_lens) for kv_lens, _ in steps))
    num_tokens = max(batch_size, *(sum(qo_lens) for _, qo_lens in steps))
    num_pages = max(1, *(num_pages_of(kv_lens, page_size) for kv_lens, _ in steps))
    return Capacity(batch_size + slack, num_tokens + slack, num_pages + slack)

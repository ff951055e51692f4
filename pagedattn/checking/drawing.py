"""Drawing steps: what to choose and which edges to prefer, over any source of choices.

`RandomChoices` makes the choices from a seed (the check command); `pagedattn.testing` makes them
with hypothesis. Every draw is valid as it is made: nothing is drawn and thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from pagedattn.checking.batch import VALUE_KINDS, Batch
from pagedattn.spec import AttentionSpec

T = TypeVar("T")

MODES = ("decode", "prefill", "mixed")
PAGE_SIZES = (4, 1, 3, 5, 16, 64, 256)
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 24, 48)
HEAD_DIMS = (16, 64, 40, 128, 256)
TILES = (16, 64, 128)
SOFT_CAPS = (0.0, 0.0, 0.0, 1.0, 30.0)
SM_SCALES = (None, 0.3)
HOSTILE_GARBAGE = ("nan", "infinity", "junk")
TILE_WORK = 64 * 64


class Choices(Protocol):
    """Where decisions come from."""

    def integer(self, low: int, high: int) -> int:
        """An integer in `[low, high]`; the simplest is `low`."""
        ...

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options; the simplest is the first."""
        ...


class RandomChoices:
    """Choices from a seeded random generator: the same seed gives the same draws."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """An integer in `[low, high]`."""
        return self._random.randint(low, high)

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self._random.choice(options)


@dataclass(frozen=True)
class SpecLimits:
    """What layer kinds may be drawn.

    Args:
        max_qo_heads: Query heads at most.
        head_dims: Head dims to choose from; simplest first.
        dtypes: Dtypes to choose from; simplest first.
        max_window_left: The largest window; -1 draws none.
        max_soft_cap: The largest soft cap; 0 draws none.
    """

    max_qo_heads: int = 12
    head_dims: tuple[int, ...] = HEAD_DIMS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    max_window_left: int = 300
    max_soft_cap: float = 50.0


@dataclass(frozen=True)
class StepLimits:
    """How large a step may be drawn.

    Args:
        min_batch_size: Requests at least; a mixed step has two at least.
        max_batch_size: Requests at most.
        max_kv_len: Keys of a request at most.
        max_work: Bounds the queries of a request: tiles of 64 by 64 scores, over all query heads.
            The default suits Triton's interpreter.
    """

    min_batch_size: int = 1
    max_batch_size: int = 4
    max_kv_len: int = 300
    max_work: int = 12


def draw_batch(
    choices: Choices,
    mode: str,
    spec_limits: SpecLimits | None = None,
    limits: StepLimits | None = None,
) -> Batch:
    """Draw a whole step; the simplest is one request with one token on page 0, in float32."""
    page_size = draw_page_size(choices)
    spec = draw_spec(choices, page_size, spec_limits or SpecLimits())
    return draw_batch_of(choices, mode, spec, page_size, limits or StepLimits())


def draw_batch_of(
    choices: Choices, mode: str, spec: AttentionSpec, page_size: int, limits: StepLimits
) -> Batch:
    """Draw a step of a given layer kind and page size."""
    kv_lens, qo_lens = draw_lens(choices, mode, spec, page_size, limits)
    pages, num_pages = draw_pages(choices, kv_lens, page_size)
    return draw_values(choices, Batch(spec, page_size, num_pages, kv_lens, qo_lens, pages))


def draw_mode(choices: Choices, max_batch_size: int) -> str:
    """Draw the mode of a step; a mixed one has two requests at least. The simplest is "decode"."""
    return choices.one_of(MODES if max_batch_size > 1 else ("decode", "prefill"))


def draw_lens(
    choices: Choices, mode: str, spec: AttentionSpec, page_size: int, limits: StepLimits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the keys and the queries of each request of a step."""
    fewest = max(limits.min_batch_size, 2 if mode == "mixed" else 0)
    batch_size = choices.integer(fewest, max(fewest, limits.max_batch_size))
    kv_lens = draw_kv_lens(choices, batch_size, page_size, max_kv_len=limits.max_kv_len)
    most = [most_queries(spec, kv_len, limits.max_work) for kv_len in kv_lens]
    return tuple(kv_lens), tuple(draw_qo_lens(choices, mode, kv_lens, most))


def draw_values(choices: Choices, batch: Batch) -> Batch:
    """Draw what a step's tensors hold: a kind of values, hostile garbage, and a seed of both."""
    return replace(
        batch,
        values=choices.one_of(VALUE_KINDS),
        garbage=choices.one_of(HOSTILE_GARBAGE),
        seed=choices.integer(0, 2**16),
    )


def draw_page_size(choices: Choices, *, min_page_size: int = 1, max_page_size: int = 256) -> int:
    """Draw a page size: mostly a usual or an odd one; the simplest is 4 where it is in bounds."""
    usual = [size for size in PAGE_SIZES if min_page_size <= size <= max_page_size]
    if usual and choices.integer(0, 7) < 7:
        return choices.one_of(usual)
    return choices.integer(min_page_size, max_page_size)


def draw_spec(choices: Choices, page_size: int, limits: SpecLimits) -> AttentionSpec:
    """Draw a layer kind; the simplest has one head of 16 elements, causal, and no options."""
    group_size = choices.one_of([g for g in GROUP_SIZES if g <= limits.max_qo_heads])
    num_kv_heads = choices.integer(1, max(1, min(limits.max_qo_heads // group_size, 4)))
    return AttentionSpec(
        num_qo_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=choices.one_of(limits.head_dims),
        dtype=choices.one_of(limits.dtypes),
        causal=choices.one_of((True, True, False)),
        window_left=draw_window(choices, page_size, max_window_left=limits.max_window_left),
        sm_scale=choices.one_of(SM_SCALES),
        logits_soft_cap=choices.one_of([c for c in SOFT_CAPS if c <= limits.max_soft_cap]),
    )


def draw_window(choices: Choices, page_size: int, *, max_window_left: int = 300) -> int:
    """Draw `window_left`: often none, else small, any, or near an edge; the simplest is -1."""
    if max_window_left < 0 or choices.integer(0, 1) == 0:
        return -1
    return draw_near_edge(choices, 0, max_window_left, page_size)


def draw_near_edge(choices: Choices, low: int, high: int, page_size: int) -> int:
    """Draw an integer in `[low, high]`: small, any, or next to an edge of a page or of a tile."""
    match choices.integer(0, 3):
        case 0:
            return choices.integer(low, min(high, low + 7))
        case 1:
            return choices.integer(low, high)
        case _:
            return choices.one_of(edges(low, high, page_size))


def edges(low: int, high: int, page_size: int) -> list[int]:
    """Integers in `[low, high]` next to the first and last multiples of a page and of tiles."""
    near = {low, high}
    for step in (page_size, *TILES):
        for multiple in (step, 2 * step, 3 * step, high // step * step):
            near |= {multiple - 1, multiple, multiple + 1}
    return sorted(n for n in near if low <= n <= high)


def draw_kv_lens(
    choices: Choices, batch_size: int, page_size: int, *, min_kv_len: int = 0, max_kv_len: int = 300
) -> list[int]:
    """Draw the keys of each request; the simplest is one key each, where that is in bounds."""
    low = max(min_kv_len, min(1, max_kv_len))
    kv_lens = []
    for _ in range(batch_size):
        kv_len = draw_near_edge(choices, low, max_kv_len, page_size)
        # now and then a request without keys, but never as the simplest choice
        empty = min_kv_len == 0 and choices.integer(0, 9) == 9
        kv_lens.append(0 if empty else kv_len)
    return kv_lens


def most_queries(spec: AttentionSpec, kv_len: int, max_work: int) -> int:
    """How many queries over `kv_len` keys are at most `max_work` tiles; at least 2."""
    if spec.dtype == torch.float32:
        max_work //= 2  # it is computed in smaller tiles
    return max(2, max_work * TILE_WORK // (spec.num_qo_heads * max(kv_len, 1)))


def draw_qo_lens(
    choices: Choices, mode: str, kv_lens: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Draw the queries of each request.

    Args:
        choices: Where decisions come from.
        mode: "decode": one each. "prefill": whole prompts, chunks, drafts of a few tokens, none, or
            more than there are keys. "mixed": both, at least one of each.
        kv_lens: Keys of each request.
        most: Queries of each request at most; at least 2.

    Raises:
        ValueError: There is no such mode, or too few requests for it.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if mode == "mixed" and len(kv_lens) < 2:
        raise ValueError(f"a mixed step has at least 2 requests, got {len(kv_lens)}")
    if mode == "decode":
        return [1] * len(kv_lens)
    prompts = [_draw_prompt(choices, *request) for request in zip(kv_lens, most, strict=True)]
    if mode == "prefill":
        return prompts
    qo_lens = [choices.one_of((1, prompt)) for prompt in prompts]
    decode = choices.integer(0, len(kv_lens) - 1)
    prompt = (decode + choices.integer(1, len(kv_lens) - 1)) % len(kv_lens)
    qo_lens[decode] = 1
    qo_lens[prompt] = max(2, prompts[prompt])
    return qo_lens


def _draw_prompt(choices: Choices, kv_len: int, most: int) -> int:
    """Draw the queries of a request in prefill, `most` at most."""
    match choices.one_of(("whole", "whole", "chunk", "chunk", "draft", "longer", "none")):
        case "whole":
            return min(max(kv_len, 1), most)
        case "chunk":
            return draw_near_edge(choices, 1, max(1, min(kv_len, most)), TILES[0])
        case "draft":
            return choices.integer(2, max(2, min(8, most)))
        case "longer":
            return min(kv_len + choices.integer(1, 20), most)
        case _:
            return 0


def draw_pages(
    choices: Choices, kv_lens: Sequence[int], page_size: int, max_spare_pages: int = 8
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Draw the pages of each request, and the size of the pool; the simplest are 0, 1, 2, ..."""
    total = num_pages_of(kv_lens, page_size)
    num_pages = max(1, total) + choices.integer(0, max_spare_pages)
    return draw_pages_of_pool(choices, kv_lens, page_size, num_pages), num_pages


def num_pages_of(kv_lens: Sequence[int], page_size: int) -> int:
    """Pages that requests of these lengths need where they share none."""
    return sum(-(-kv_len // page_size) for kv_len in kv_lens)


def draw_pages_of_pool(
    choices: Choices, kv_lens: Sequence[int], page_size: int, num_pages: int
) -> tuple[tuple[int, ...], ...]:
    """Draw the pages of each request from a pool that holds `num_pages`, enough for all.

    Pages come from the bottom of the pool, from its top, or from anywhere, and now and then the
    first pages of a request are those of an earlier one.
    """
    total = num_pages_of(kv_lens, page_size)
    match choices.integer(0, 2):
        case 0:
            ids = list(range(total))
        case 1:
            ids = list(range(num_pages - 1, num_pages - 1 - total, -1))
        case _:
            ids = random.Random(choices.integer(0, 2**16)).sample(range(num_pages), total)
    pages: list[tuple[int, ...]] = []
    for request, kv_len in enumerate(kv_lens):
        count = num_pages_of([kv_len], page_size)
        own, ids = ids[:count], ids[count:]
        if request and choices.integer(0, 3) == 3:
            other = pages[choices.integer(0, request - 1)]
            shared = choices.integer(0, min(count, len(other)))
            own = [*other[:shared], *own[shared:]]
        pages.append(tuple(own))
    return tuple(pages)

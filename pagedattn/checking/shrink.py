"""Making a failing step small: a greedy walk over simpler batches, in a bounded number of tries.

Knows nothing of backends: it asks whether a simpler batch still fails, and keeps it if so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from pagedattn.checking.batch import Batch

MAX_TRIES = 120


def shrink_batch(
    batch: Batch, still_fails: Callable[[Batch], bool], max_tries: int = MAX_TRIES
) -> Batch:
    """Find a simpler batch that fails too.

    Fewer requests first, then plain options and page numbers, then fewer keys and queries; and
    again, until nothing helps. Every step taken makes the batch simpler, and none is tried twice.

    Args:
        batch: One that fails.
        still_fails: Whether a batch fails in the same way.
        max_tries: Calls of `still_fails` at most.

    Returns:
        A batch for which `still_fails` was true, or `batch` itself.

    Example:
        >>> from pagedattn.spec import AttentionSpec
        >>> spec = AttentionSpec(2, 1, 64, window_left=9)
        >>> batch = Batch(spec, 4, 9, (5, 12), (2, 3), ((8, 0), (3, 4, 5)))
        >>> small = shrink_batch(batch, lambda b: max(b.kv_lens) >= 6)
        >>> small.kv_lens, small.qo_lens, small.pages, small.spec.window_left
        ((6,), (1,), ((0, 1),), -1)
    """
    tried = {batch}
    shrunk = True
    while shrunk:
        shrunk = False
        # each kind of change goes on from what the last one left, and all come again
        for simpler in (_fewer_requests, _plainer, _shorter):
            candidates = simpler(batch)
            while len(tried) <= max_tries and (candidate := next(candidates, None)) is not None:
                if candidate in tried:
                    continue
                tried.add(candidate)
                if still_fails(candidate):
                    batch, shrunk = candidate, True
                    candidates = simpler(batch)
    return batch


def _fewer_requests(batch: Batch) -> Iterator[Batch]:
    """One request alone; then all but one."""
    requests = range(len(batch.kv_lens))
    if len(requests) > 1:
        yield from (_select(batch, [r]) for r in requests)
    if len(requests) > 2:
        yield from (_select(batch, [r for r in requests if r != left]) for left in requests)


def _shorter(batch: Batch) -> Iterator[Batch]:
    """Fewer keys of a request with its queries, fewer keys alone, fewer queries alone."""
    for request, (kv_len, qo_len) in enumerate(zip(batch.kv_lens, batch.qo_lens, strict=True)):
        for fewer in _lower(kv_len):
            # queries stay at their places where the request keeps any
            yield _resized(batch, request, fewer, min(qo_len, max(1, qo_len - (kv_len - fewer))))
            if qo_len > 1:
                yield _resized(batch, request, fewer, qo_len)
        for fewer in _lower(qo_len):
            yield _resized(batch, request, kv_len, fewer)


def _plainer(batch: Batch) -> Iterator[Batch]:
    """One option less, a smaller window, fewer heads, plainer values, or pages in order."""
    spec = batch.spec
    plain = (
        replace(spec, window_left=-1),
        *(replace(spec, window_left=smaller) for smaller in _lower(spec.window_left)),
        replace(spec, logits_soft_cap=0.0),
        replace(spec, sm_scale=None),
        replace(spec, causal=True),
        replace(spec, num_qo_heads=1, num_kv_heads=1),
        replace(spec, num_qo_heads=spec.group_size, num_kv_heads=1),
        replace(spec, num_qo_heads=spec.num_kv_heads),
        replace(spec, head_dim=min(spec.head_dim, 16)),
        replace(spec, head_dim=min(spec.head_dim, 64)),
        replace(spec, dtype=torch.float32),
    )
    candidates = [replace(batch, spec=each) for each in plain]
    candidates += [
        replace(batch, values="normal"),
        replace(batch, garbage="zeros"),
        replace(batch, garbage="nan" if batch.garbage != "zeros" else "zeros"),
        replace(batch, seed=0),
        _pages_in_order(batch),
    ]
    yield from (candidate for candidate in candidates if candidate != batch)


def _lower(length: int) -> Iterator[int]:
    """Lengths from 1 up, each as near to `length` again by half: the way of a binary search."""
    if length > 1:
        yield 1
    gap = length // 2
    while gap and length - gap > 1:
        yield length - gap
        gap //= 2


def _select(batch: Batch, requests: Sequence[int]) -> Batch:
    return replace(
        batch,
        kv_lens=tuple(batch.kv_lens[r] for r in requests),
        qo_lens=tuple(batch.qo_lens[r] for r in requests),
        pages=tuple(batch.pages[r] for r in requests),
    )


def _resized(batch: Batch, request: int, kv_len: int, qo_len: int) -> Batch:
    kv_lens, qo_lens, pages = list(batch.kv_lens), list(batch.qo_lens), list(batch.pages)
    kv_lens[request], qo_lens[request] = kv_len, qo_len
    pages[request] = pages[request][: -(-kv_len // batch.page_size)]
    return replace(batch, kv_lens=tuple(kv_lens), qo_lens=tuple(qo_lens), pages=tuple(pages))


def _pages_in_order(batch: Batch) -> Batch:
    """Pages numbered by their first use, in a pool without others; sharing stays."""
    numbers: dict[int, int] = {}
    pages = tuple(
        tuple(numbers.setdefault(page, len(numbers)) for page in row) for row in batch.pages
    )
    return replace(batch, pages=pages, num_pages=max(1, len(numbers)))

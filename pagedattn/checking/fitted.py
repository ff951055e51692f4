"""Hypotheses with a number in them that is read off the wrong answer: a scale, a missing piece."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagedattn.checking.case import Candidate, Case
from pagedattn.checking.dense import visible_mask
from pagedattn.checking.misread import ranked, scaled
from pagedattn.checking.step import Step
from pagedattn.checking.variant import Variant, read_slots, right_mask

PIECE = 16
"""Keys; pieces of split keys begin and end at multiples of it."""
MAX_FITS = 4


def fitted_scale(case: Case) -> Iterator[Candidate]:
    """A factor of `sm_scale` that makes the row which is furthest off right."""
    found = _furthest_row(case)
    if found is None:
        return
    row, head = found
    scores = _uncapped_scores(case, row)[head]
    cap = case.step.spec.logits_soft_cap
    target = case.got.lse[row, head]

    def excess(factor: Tensor) -> Tensor:
        scaled_scores = scores * factor[:, None]
        if cap > 0:
            scaled_scores = cap * torch.tanh(scaled_scores / cap)
        return torch.logsumexp(scaled_scores, 1) - target

    grid = torch.logspace(-6, 6, 385, base=2, dtype=torch.float64)
    sign = excess(grid).sign()
    for i in (sign[:-1] != sign[1:]).nonzero().flatten().tolist()[:MAX_FITS]:
        low, high = grid[i : i + 1], grid[i + 1 : i + 2]
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle).sign() == sign[i] else (low, middle)
        factor = float(low)
        yield scaled(case.step, factor, f"{factor:.6g} times as large, fitted")


def missing_piece(case: Case) -> Iterator[Candidate]:
    """Some keys in a row are missing: the first or last of each row, or a piece of a request."""
    found = _furthest_row(case)
    if found is None:
        return
    row, _ = found
    request = case.request_of(row)
    scores, keys = _visible_scores(case, row)
    # weights in the row's own scale, summed from the left: [num_qo_heads, keys + 1]
    top = scores.amax(1, keepdim=True)
    sums = torch.nn.functional.pad(torch.exp(scores - top).cumsum(1), (1, 0))
    missing = sums[:, -1:] - torch.exp(case.got.lse[row][:, None] - top)
    slack = 4 * case.bound.lse[row][:, None] * sums[:, -1:] + 1e-12

    def fits(removed: Tensor) -> list[int]:
        """Which of the removals make all heads right; `removed` is [num_qo_heads, removals]."""
        near = ((removed - missing).abs() <= slack).all(0)
        return near.nonzero().flatten().tolist()[:MAX_FITS]

    step, num = case.step, len(keys)
    name = "a piece of the keys is missing"
    for count in fits(sums[:, 1:-1]):
        first = ranked(step, lambda left, _, n=count + 1: left >= n)  # type: ignore[misc]
        yield Candidate(name, f"the first {count + 1} of each row", first)
    for count in fits((sums[:, -1:] - sums)[:, 1:-1].flip(1)):
        last = ranked(step, lambda _, right, n=count + 1: right >= n)  # type: ignore[misc]
        yield Candidate(name, f"the last {count + 1} of each row", last)
    edges = sorted({0, num, *(i for i in range(num) if int(keys[i]) % PIECE == 0)})
    pairs = torch.combinations(torch.tensor(edges), 2)
    for i in fits(sums[:, pairs[:, 1]] - sums[:, pairs[:, 0]]):
        begin, last_key = int(keys[pairs[i, 0]]), int(keys[pairs[i, 1] - 1])
        detail = f"keys {begin} to {last_key} of request {request}"
        yield Candidate(name, detail, _without(step, request, begin, last_key))


def _without(step: Step, request: int, first: int, last: int) -> Variant:
    def mask(step: Step, other: int) -> Tensor:
        visible = right_mask(step, other)
        key = torch.arange(visible.shape[1])
        return visible & ((key < first) | (key > last)) if other == request else visible

    return Variant(step, mask)


def _furthest_row(case: Case) -> tuple[int, int] | None:
    """Row and head of the largest finite difference in `lse` that is wrong, if there is one."""
    error = (case.got.lse - case.expected.lse).abs()
    error = torch.where(case.wrong[1] & error.isfinite(), error, -1)
    if not error.numel() or float(error.max()) < 0:
        return None
    row, head = divmod(int(error.argmax()), error.shape[1])
    return row, head


def _visible_scores(case: Case, row: int) -> tuple[Tensor, Tensor]:
    """f64[num_qo_heads, keys] and i64[keys]: a row's scores, capped, and the keys it sees."""
    scores = _uncapped_scores(case, row)
    cap = case.step.spec.logits_soft_cap
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    return scores, _keys_of(case, row)


def _uncapped_scores(case: Case, row: int) -> Tensor:
    step, request = case.step, case.request_of(row)
    keys = _keys_of(case, row)
    k, _ = read_slots(step, request, int(keys[-1]) + 1)
    k = k[keys].repeat_interleave(step.spec.group_size, dim=1)
    return torch.einsum("hd,khd->hk", step.q[row].double().cpu(), k) * step.spec.scale


def _keys_of(case: Case, row: int) -> Tensor:
    step, request = case.step, case.request_of(row)
    kv_len = step.kv_lens[request]
    # the mask of the queries from this one on, whose first row is this one's
    rows = int(step.qo_indptr[request + 1]) - row
    return visible_mask(step.spec, rows, kv_len)[0].nonzero().flatten()

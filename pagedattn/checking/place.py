"""Where an answer is wrong, in words of requests, positions and pages."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagedattn.checking.batch import Batch
from pagedattn.checking.case import Case
from pagedattn.checking.compare import Difference
from pagedattn.checking.step import Step
from pagedattn.checking.variant import read_slots

MIN_COSINE = 0.99
MIN_LEAD = 1e-3
"""Of the likeliest key over the next."""


@dataclass(frozen=True)
class Place:
    """A wrong element, whose it is, and the key that its row's error points to."""

    difference: Difference
    request: int
    query: int  # of the request
    position: int  # of the query, among the request's keys
    key: int | None  # that the error points to or, where it is NaN, that is not finite
    page: int | None
    slot: int | None

    def __str__(self) -> str:
        whose = f"request {self.request}, query {self.query} at position {self.position}"
        text = f"{self.difference}; {whose}, head {self.difference.head}"
        if self.key is None:
            return text
        where = f"key {self.key} in page {self.page} slot {self.slot}"
        if math.isfinite(self.difference.got):
            return f"{text}; points to {where}"
        return f"{text}; the first NaN or infinity in its pages is {where}"


def first_and_worst(case: Case) -> tuple[Place, Place]:
    """The first wrong element in the order of rows, and the one furthest above its bound."""
    found = []
    for i, tensor in enumerate(("out", "lse")):
        wrong = case.wrong[i].nonzero()
        if len(wrong):
            excess = _excess(case, i)[case.wrong[i]]
            places = wrong[torch.tensor([0, int(excess.argmax())])].tolist()
            found.append([_difference(case, i, tensor, place) for place in places])
    first = min((pair[0] for pair in found), key=lambda d: (d.row, d.tensor != "out"))
    worst = max((pair[1] for pair in found), key=lambda d: d.excess)
    return _place(case, first), _place(case, worst)


def _excess(case: Case, i: int) -> Tensor:
    error = (case.got[i] - case.expected[i]).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return (error / case.bound[i]).nan_to_num(nan=torch.inf)


def _difference(case: Case, i: int, tensor: str, place: list[int]) -> Difference:
    at = tuple(place)
    got, expected = float(case.got[i][at]), float(case.expected[i][at])
    error = abs(got - expected)
    return Difference(
        tensor,
        row=place[0],
        head=place[1],
        element=place[2] if len(place) > 2 else None,
        got=got,
        expected=expected,
        error=error if error == error else torch.inf,
        allowed=float(case.bound[i][at]),
    )


def _place(case: Case, difference: Difference) -> Place:
    step = case.step
    request = case.request_of(difference.row)
    query = difference.row - int(step.qo_indptr[request])
    position = step.kv_lens[request] - step.qo_lens[request] + query
    key = _suspect_key(case, request, difference)
    page = slot = None
    if key is not None:
        page = int(step.page_table.pages_of(request)[key // step.page_size])
        slot = key % step.page_size
    return Place(difference, request, query, position, key, page, slot)


def _suspect_key(case: Case, request: int, difference: Difference) -> int | None:
    """The key whose value the error of a row and head lies along, or that is not finite.

    A key `j` too many or too few moves an output `o` along `v_j - o`, and nowhere else.
    """
    step = case.step
    num_slots = len(step.page_table.pages_of(request)) * step.page_size
    _, v = read_slots(step, request, num_slots)
    v = v[:, difference.head // step.spec.group_size]
    got = case.got.out[difference.row, difference.head]
    right = case.expected.out[difference.row, difference.head]
    if not bool(got.isfinite().all()):
        bad = ~v.isfinite().all(1)
        return int(bad.nonzero()[0]) if bool(bad.any()) else None
    if not bool(case.wrong[0][difference.row, difference.head].any()):
        return None
    away = (v - right).nan_to_num(nan=0, posinf=0, neginf=0)
    cosine = torch.nn.functional.cosine_similarity(away, (got - right)[None], dim=1).abs()
    best, keys = cosine.topk(min(2, len(cosine)))
    unlikely = not len(best) or float(best[0]) < MIN_COSINE
    if unlikely or (len(best) > 1 and float(best[1]) > float(best[0]) - MIN_LEAD):
        return None
    return int(keys[0])


def describe_row(batch: Batch | Step, row: int) -> str:
    """Say whose query a row of `q` is.

    Example:
        >>> from pagedattn.spec import AttentionSpec
        >>> pages = ((0, 1), (2,))
        >>> describe_row(Batch(AttentionSpec(1, 1, 16), 4, 3, (7, 4), (2, 3), pages), row=3)
        'request 1 of 2, query 1 of 3, kv_len 4'
    """
    begins = [0, *accumulate(batch.qo_lens)]
    request = bisect_right(begins, row) - 1
    return (
        f"request {request} of {len(batch.kv_lens)}, query {row - begins[request]} of "
        f"{batch.qo_lens[request]}, kv_len {batch.kv_lens[request]}"
    )

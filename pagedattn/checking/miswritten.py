"""Hypotheses about what was written: the right numbers, changed, leaked into or in other places."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Bound
from pagedattn.checking.case import Candidate, Case
from pagedattn.checking.step import Step
from pagedattn.checking.variant import Prediction, read_slots, right_mask

FINITE_MINUS_INFINITY = -5e4
"""What some kernels start a running maximum with; scores below it never replace it."""
MAX_OFFSET = 2**31
"""Elements; an offset of 32 bits ends here."""
MAX_ROWS_TO_MATCH = 4096


def lse_in_another_base(case: Case) -> Iterator[Candidate]:
    """LSE that was not converted, or twice."""
    out, lse = case.expected
    for name, factor in (("LSE in base 2", 1 / math.log(2)), ("LSE times ln(2)", math.log(2))):
        bound = case.bound._replace(lse=case.bound.lse * factor)
        yield Candidate(name, "", Prediction(AttentionOutput(out, lse * factor), bound))


def nan_leak(case: Case) -> Iterator[Candidate]:
    """V of a slot with weight 0 enters the product: NaN and infinity come through."""
    if bool(case.got.out.isfinite().all()):
        return
    for where in (
        "unused slots of the last page",
        "keys left of the window",
        "keys right of the diagonal",
        "all slots of a request's pages",
    ):
        out = case.expected.out.clone()
        origin = ""
        for request, (begin, end) in enumerate(pairwise(case.step.qo_indptr.tolist())):
            if bool(case.got.out[begin:end].isfinite().all()):
                continue  # another kernel may compute other requests, and have no leak
            source = _slots_with_weight_0(case.step, request, where)
            _, v = read_slots(case.step, request, source.shape[1])
            bad = ~v.isfinite().repeat_interleave(case.step.spec.group_size, dim=1)
            leaks = torch.einsum("rk,khd->rhd", source.double(), bad.double()) > 0
            out[begin:end][leaks] = torch.nan
            if not origin and bool((leaks & ~case.got.out[begin:end].isfinite()).any()):
                key = int((source.any(0) & bad.flatten(1).any(1)).nonzero()[0])
                page = int(case.step.page_table.pages_of(request)[key // case.step.page_size])
                offset = key % case.step.page_size
                origin = f"from {where}, first page {page} slot {offset} of request {request}"
        if origin:
            leaked = AttentionOutput(out, case.expected.lse)
            yield Candidate("NaN leak", origin, Prediction(leaked, case.bound))


def rows_without_keys(case: Case) -> Iterator[Candidate]:
    """A query that sees no key gives something else than 0 and minus infinity."""
    yield _whatever_it_is(case, "wrong where no key is visible", case.expected.lse == -torch.inf)


def finite_minus_infinity(case: Case) -> Iterator[Candidate]:
    """Scores below a finite "minus infinity" never become the running maximum."""
    low = (case.expected.lse < FINITE_MINUS_INFINITY) & case.expected.lse.isfinite()
    out = case.expected.out.masked_fill(low[..., None], 0)
    lse = torch.where(low, case.got.lse, case.expected.lse)
    detail = f"out is 0 where every score is below {FINITE_MINUS_INFINITY:g}"
    made = Prediction(AttentionOutput(out, lse), case.bound)
    yield Candidate("finite minus infinity", detail, made, copies_the_answer=True)


def rows_in_another_order(case: Case) -> Iterator[Candidate]:
    """Each wrong row is the right answer of another row."""
    num_rows = case.step.q.shape[0]
    if not 1 < num_rows <= MAX_ROWS_TO_MATCH:
        return
    # minus infinity and NaN become numbers that nothing but their like is close to
    got, expected = (
        torch.cat([a.out.flatten(1), a.lse], 1).nan_to_num(nan=1e30, posinf=1e30, neginf=-1e20)
        for a in (case.got, case.expected)
    )
    distance = torch.cdist(got, expected, compute_mode="donot_use_mm_for_euclid_dist")
    row = torch.arange(num_rows)
    row[case.wrong_rows] = distance[case.wrong_rows].argmin(1)
    moved = AttentionOutput(case.expected.out[row], case.expected.lse[row])
    bound = Bound(case.bound.out[row], case.bound.lse[row])
    first = int(case.wrong_rows[0])
    detail = f"row {first} holds the answer of row {int(row[first])}"
    yield Candidate("rows in another order", detail, Prediction(moved, bound))


def rows_never_written(case: Case) -> Iterator[Candidate]:
    """Whole rows of `out`, or of all, are NaN, as the buffer may have been before."""
    out, lse = (x.clone() for x in case.expected)
    rows = case.got.out.isnan().flatten(1).all(1)
    out[rows] = torch.nan
    lse[rows & case.got.lse.isnan().all(1)] = torch.nan
    if bool(rows.any()):
        which = f"{int(rows.sum())} of {len(rows)} rows are all NaN"
        made = Prediction(AttentionOutput(out, lse), case.bound)
        yield Candidate("rows never written", which, made, copies_the_answer=True)


def offsets_beyond_32_bits(case: Case) -> Iterator[Candidate]:
    """Exactly the rows that see a key beyond 32-bit offsets are wrong."""
    step = case.step
    num_reachable = MAX_OFFSET // max(1, step.kv_cache.stride(0))  # pages
    beyond = torch.zeros(step.q.shape[0], dtype=torch.bool)
    for request, (begin, end) in enumerate(pairwise(step.qo_indptr.tolist())):
        far = step.page_table.pages_of(request).long().cpu() >= num_reachable
        mask = right_mask(step, request)
        keys = far.repeat_interleave(step.page_size)[: mask.shape[1]]
        beyond[begin:end] = (mask & keys).any(1)
    if torch.equal(beyond.nonzero().flatten(), case.wrong_rows):
        everywhere = beyond[:, None].expand(-1, step.q.shape[1])
        name = "keys beyond 32-bit offsets"
        detail = f"from page {num_reachable} on, judged by which rows are wrong"
        yield _whatever_it_is(case, name, everywhere, detail)


def _whatever_it_is(case: Case, name: str, rows: Tensor, detail: str = "") -> Candidate:
    """What was got in these rows and heads, the right answer elsewhere."""
    # NaN is predicted where NaN was got
    out = torch.where(rows[..., None], case.got.out, case.expected.out)
    lse = torch.where(rows, case.got.lse, case.expected.lse)
    made = Prediction(AttentionOutput(out, lse), case.bound)
    return Candidate(name, detail, made, copies_the_answer=True)


def _slots_with_weight_0(step: Step, request: int, where: str) -> Tensor:
    """bool[qo_len, slots of the request's pages]: those that must not count."""
    mask = right_mask(step, request)
    qo_len, kv_len = mask.shape
    slots = torch.arange(-(-kv_len // step.page_size) * step.page_size)
    position = torch.arange(kv_len - qo_len, kv_len)[:, None]
    unused = (slots >= kv_len).expand(qo_len, -1)
    match where:
        case "unused slots of the last page":
            return unused
        case "keys left of the window":
            window_left = step.spec.window_left
            return (slots < position - window_left) & (window_left >= 0) & ~unused
        case "keys right of the diagonal":
            return (slots > position) & step.spec.causal & ~unused
        case _:
            return torch.ones_like(unused)

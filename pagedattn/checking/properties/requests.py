"""Requests do not know of one another: order, company, twins, and NaN in a neighbour's pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from pagedattn.checking.dense import visible_mask
from pagedattn.checking.properties.base import Answer, Finding, Property, Trial, pick, related
from pagedattn.checking.transforms import rows_of, select_requests


def _request_order(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    order = list(range(len(step.kv_lens)))
    random.Random(trial.choices.integer(0, 2**16)).shuffle(order)
    kept = order[: trial.choices.integer(0, len(order))]
    everyone, fewer = trial.answer(step), trial.answer(select_requests(step, kept))
    index = rows_of(step, kept)
    bound = pick(trial.bound(step), index)
    what = f"requests {kept} alone, in this order, vs among all {len(order)}"
    answers = (fewer, everyone)
    yield related(what, fewer.got, pick(everyone.got, index), answers, bound, bound)


def _isolation(trial: Trial) -> Iterator[Finding]:
    batch = trial.batch
    if not batch.kv_lens:
        return
    victim = trial.choices.integer(0, len(batch.kv_lens) - 1)
    others = [r for r in range(len(batch.kv_lens)) if r != victim]
    own = set(batch.pages[victim]) - {page for r in others for page in batch.pages[r]}
    step = trial.step()
    poisoned = replace(step, kv_cache=step.kv_cache.clone())
    pages = torch.tensor(sorted(own), dtype=torch.int64, device=trial.device)
    poisoned.kv_cache[pages] = torch.nan
    before, after = trial.answer(step), trial.answer(poisoned)
    kept = rows_of(step, others)
    what = f"the other requests with NaN in the pages of request {victim} vs without"
    yield trial.same(
        what,
        pick(after.got, kept),
        pick(before.got, kept),
        (after, before),
        lambda: pick(trial.bound(step), kept),
    )
    if own == set(batch.pages[victim]):
        yield _reads_its_own(victim, after)


def _reads_its_own(victim: int, after: Answer) -> Finding:
    """A request whose pages are all NaN gets NaN, but for rows that see no key: those get 0."""
    step, spec = after.step, after.step.spec
    out = pick(after.got, rows_of(step, [victim])).out
    seen = visible_mask(spec, step.qo_lens[victim], step.kv_lens[victim]).any(1).to(out.device)
    right = torch.where(seen[:, None, None], out.isnan(), out == 0)
    problem = None
    if not bool(right.all()):
        problem = f"request {victim} with all its pages NaN vs NaN, or 0 where it sees no key"
    return Finding((after,), problem=problem)


def _identical_requests(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    if not step.kv_lens:
        return
    twins = select_requests(step, [0, *range(len(step.kv_lens)), 0])
    answer, bound = trial.answer(twins), trial.bound(twins)
    first = rows_of(twins, [0])
    for other in (1, len(twins.kv_lens) - 1):
        # within rounding: a schedule may cut the same keys in other places
        rows = rows_of(twins, [other])
        yield related(
            f"request {other} of {len(twins.kv_lens)} vs request 0, which is the same",
            pick(answer.got, rows),
            pick(answer.got, first),
            (answer,),
            pick(bound, first),
            pick(bound, rows),
        )


REQUEST_ORDER = Property(
    "request order", "some requests in another order vs among all", _request_order
)
ISOLATION = Property(
    "isolation", "all other requests with NaN in one request's pages vs without", _isolation
)
IDENTICAL_REQUESTS = Property(
    "identical requests", "copies of a request in one step vs one another", _identical_requests
)

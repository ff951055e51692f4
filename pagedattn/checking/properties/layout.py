"""Where keys lie does not matter: page numbers, page sizes, and what is in slots nobody may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from pagedattn.checking.drawing import RandomChoices
from pagedattn.checking.properties.base import Finding, Property, Trial, related
from pagedattn.checking.transforms import rename_pages, repack

OTHER_PAGE_SIZES = (1, 2, 3, 5, 7, 16, 64)
MAX_SPARE_PAGES = 9


def _page_renaming(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    num_pages = step.kv_cache.shape[0]
    pool = num_pages + trial.choices.integer(1, MAX_SPARE_PAGES)
    generator = torch.Generator().manual_seed(trial.choices.integer(0, 2**16))
    new_ids = torch.randperm(pool, generator=generator)[:num_pages].tolist()
    before = trial.answer(step)
    after = trial.answer(rename_pages(step, new_ids, pool))
    what = "keys moved to other page numbers vs where they were"
    yield trial.same(what, after.got, before.got, (after, before), lambda: trial.bound(step))


def _page_size(trial: Trial) -> Iterator[Finding]:
    spec, device = trial.batch.spec, trial.device
    sizes = [
        size
        for size in OTHER_PAGE_SIZES
        if size != trial.batch.page_size
        and not trial.subject.unsupported_reasons(spec, size, device)
    ]
    # one other size for each layer kind: each is a kernel to compile
    page_size = RandomChoices(f"{spec} {trial.batch.page_size}").one_of(sizes or [1])
    step = trial.step()
    before, after = trial.answer(step), trial.answer(repack(step, page_size))
    what = f"pages of {page_size} tokens vs pages of {step.page_size}"
    bound = trial.bound(step)
    yield related(what, after.got, before.got, (after, before), bound, bound)


def _poison(trial: Trial) -> Iterator[Finding]:
    garbage = trial.batch.garbage if trial.batch.garbage != "zeros" else "nan"
    clean = trial.answer(trial.step(replace(trial.batch, garbage="zeros")))
    dirty = trial.answer(trial.step(replace(trial.batch, garbage=garbage)))
    what = f"{garbage} in slots that no query may see vs zeros there"
    answers = (dirty, clean)
    yield trial.same(what, dirty.got, clean.got, answers, lambda: trial.bound(clean.step))


PAGE_RENAMING = Property(
    "page renaming", "keys moved to other page numbers vs where they were", _page_renaming
)
PAGE_SIZE = Property("page size", "the same keys in pages of two sizes", _page_size)
POISON = Property("poison", "NaN, infinity or junk in slots nobody sees vs zeros there", _poison)

"""What the formula says of special inputs: shifted scores, one value for all, no query, copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Bound
from pagedattn.checking.dense import visible_mask
from pagedattn.checking.properties.base import Finding, Property, Trial, related
from pagedattn.checking.step import Step
from pagedattn.checking.transforms import repack, rows_of, select_requests

SHIFTS = (3.0, -1000.0, 1000.0, -60000.0)  # the last are low scores
LOUD_QUERY = 64.0
MAX_KEY = 6e4  # what float16 holds


def _score_shift(trial: Trial) -> Iterator[Finding]:
    batch = replace(
        trial.batch, spec=replace(trial.batch.spec, logits_soft_cap=0.0), values="normal"
    )
    step, shifted = trial.step(batch), trial.step(batch)
    shifts = SHIFTS if trial.subject.no_low_scores is None else SHIFTS[:-1]
    scale = step.spec.scale
    for each, key in ((step, 0.0), (shifted, trial.choices.one_of(shifts) / LOUD_QUERY / scale)):
        each.q[..., -1] = LOUD_QUERY
        each.kv_cache[:, 0, ..., -1] = min(max(key, -MAX_KEY), MAX_KEY)
    shift = shifted.kv_cache[0, 0, 0, 0, -1].item() * LOUD_QUERY * scale  # rounded by the dtype
    answer, (out, lse) = trial.answer(shifted), trial.subject.truth(step).expected
    expected = AttentionOutput(out, lse + shift)
    what = f"all scores {shift:g} higher vs float64 without, the LSE {shift:g} higher"
    yield related(what, answer.got, expected, (answer,), trial.bound(shifted))


def _constant_values(trial: Trial) -> Iterator[Finding]:
    step = trial.step(replace(trial.batch, values="constant_values"))
    answer, (expected, bound) = trial.answer(step), trial.subject.truth(step)
    value = _one_value(step)
    sees_key = (expected.lse > -torch.inf)[..., None]
    value = value.repeat_interleave(step.spec.group_size, dim=0).to(expected.out)
    right = AttentionOutput(torch.where(sees_key, value, 0), expected.lse)
    what = "the output where V is the same everywhere vs that V"
    yield related(what, answer.got, right, (answer,), bound)


def _one_value(step: Step) -> Tensor:
    """dtype[num_kv_heads, head_dim]: V of a key that some query sees; 0 where there is none."""
    for request, (qo_len, kv_len) in enumerate(zip(step.qo_lens, step.kv_lens, strict=True)):
        if qo_len and kv_len:
            page = int(step.page_table.pages_of(request)[-1])
            return step.kv_cache[page, 1, (kv_len - 1) % step.page_size]
    return step.kv_cache.new_zeros(step.kv_cache.shape[3:])


def _zero_query(trial: Trial) -> Iterator[Finding]:
    step = trial.step(replace(trial.batch, values="zero_query"))
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    lse = torch.full(step.q.shape[:2], -torch.inf, dtype=torch.float64)
    for request, (qo_len, kv_len) in enumerate(zip(step.qo_lens, step.kv_lens, strict=True)):
        seen = visible_mask(step.spec, qo_len, kv_len)
        alone = repack(select_requests(step, [request]), max(kv_len, 1))  # one page holds all
        v = alone.kv_cache[0, 1, :kv_len].cpu().double()
        v = torch.where(seen.any(0)[:, None, None], v, 0)
        count = seen.sum(1)
        total = (seen.double() @ v.flatten(1)).view(-1, *v.shape[1:])
        rows = rows_of(step, [request])
        mean = total / count.clamp(min=1)[:, None, None]
        out[rows] = mean.repeat_interleave(step.spec.group_size, dim=1)
        lse[rows] = count.double().log()[:, None].expand(-1, lse.shape[1])
    answer, bound = trial.answer(step), trial.bound(step)
    where = bound.out.device
    what = "the output for a query of zeros vs the mean of the V that it sees"
    expected = AttentionOutput(out.to(where), lse.to(where))
    yield related(what, answer.got, expected, (answer,), bound)


def _repeated_heads(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    spec = step.spec
    repeated = replace(
        step,
        spec=replace(spec, num_kv_heads=spec.num_qo_heads),
        kv_cache=step.kv_cache.repeat_interleave(spec.group_size, dim=3),
    )
    shared, own = trial.answer(step), trial.answer(repeated)
    bound: Bound = trial.bound(step)
    what = f"{spec.group_size} query heads on each KV head vs each on a copy of it"
    yield related(what, shared.got, own.got, (shared, own), bound, bound)


SCORE_SHIFT = Property(
    "score shift", "scores plus a constant vs float64 without, the LSE plus it", _score_shift
)
CONSTANT_VALUES = Property(
    "constant V", "the output where V is the same everywhere vs that V", _constant_values
)
ZERO_QUERY = Property(
    "zero query", "the output for q = 0 vs the mean of the visible V", _zero_query
)
REPEATED_HEADS = Property(
    "repeated heads", "query heads that share a KV head vs each on its copy", _repeated_heads
)

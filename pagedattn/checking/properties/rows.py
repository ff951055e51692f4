"""Rows and keys in pieces: a decode row is a prefill's last, and chunks of keys merge into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Bound
from pagedattn.checking.properties.base import Finding, Property, Trial, pick, related
from pagedattn.checking.transforms import (
    last_queries,
    last_rows,
    rows_of,
    select_requests,
    split_keys,
)


def _decode_row(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    whole, bound = trial.answer(step), trial.bound(step)
    decode, index = trial.answer(last_queries(step, 1)), last_rows(step, 1)
    allowed, expected = pick(bound, index), pick(whole.got, index)
    what = "one decode row a request vs the last rows of the whole step"
    yield related(what, decode.got, expected, (decode, whole), allowed, allowed)
    decodes = [r for r, qo_len in enumerate(step.qo_lens) if qo_len == 1]
    if not decodes or len(decodes) == len(step.qo_lens):
        return
    alone, index = trial.answer(select_requests(step, decodes)), rows_of(step, decodes)
    allowed, expected = pick(bound, index), pick(whole.got, index)
    what = "decode rows alone vs in a step with prompts"
    yield related(what, alone.got, expected, (alone, whole), allowed, allowed)


def _merged_chunks(trial: Trial) -> Iterator[Finding]:
    plain = replace(trial.batch.spec, window_left=-1)  # a window's left edge is no chunk's
    step = trial.step(replace(trial.batch, spec=plain))
    most = []
    for kv_len, qo_len in zip(step.kv_lens, step.qo_lens, strict=True):
        visible_to_all = max(0, kv_len - qo_len + 1) if step.spec.causal else kv_len
        most.append(min(visible_to_all, kv_len) // step.page_size)
    cuts = [trial.choices.integer(0, pages) for pages in most]
    first, rest = (trial.answer(part) for part in split_keys(step, cuts))
    whole = trial.answer(step)
    merged, allowed = merge(first.got, trial.bound(first.step), rest.got, trial.bound(rest.step))
    what = f"keys in two chunks, cut after {cuts} pages and merged by their LSE, vs in one pass"
    bound = trial.bound(step)
    yield related(what, merged, whole.got, (first, rest, whole), allowed, bound)


def merge(
    a: AttentionOutput, a_bound: Bound, b: AttentionOutput, b_bound: Bound
) -> tuple[AttentionOutput, Bound]:
    """Merge two answers over disjoint keys, in float64, with the error that theirs allow.

    The weights are `exp(lse - merged lse)`; errors `x` and `y` of the two LSEs move the output by
    at most `(exp(x + y) - 1) w_a w_b |a - b|` to first order.
    """
    where = a_bound.out.device
    (a_out, a_lse), (b_out, b_lse) = ([t.to(where).double() for t in part] for part in (a, b))
    lse = torch.logaddexp(a_lse, b_lse)
    empty = lse == -torch.inf
    w_a, w_b = (torch.exp(part - lse).masked_fill(empty, 0)[..., None] for part in (a_lse, b_lse))
    out = w_a * a_out + w_b * b_out
    moved = torch.expm1(a_bound.lse + b_bound.lse)[..., None] * w_a * w_b * (a_out - b_out).abs()
    out_bound = w_a * a_bound.out + w_b * b_bound.out + moved
    lse_bound = w_a[..., 0] * a_bound.lse + w_b[..., 0] * b_bound.lse
    tiny = 1e-12 * (1 + lse.masked_fill(empty, 0).abs())
    return AttentionOutput(out, lse), Bound(out_bound + 1e-12, lse_bound + tiny)


DECODE_ROW = Property(
    "decode row",
    "decode rows vs the last rows of a prefill, and alone vs in a mixed step",
    _decode_row,
    modes=("prefill", "mixed"),
)
MERGED_CHUNKS = Property(
    "merged chunks", "keys in two chunks, merged by their LSE, vs in one pass", _merged_chunks
)

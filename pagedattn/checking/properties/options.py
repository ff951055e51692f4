"""Every option of a layer kind is honoured, and none leaves a trace in what comes after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pagedattn.checking.batch import Batch
from pagedattn.checking.compare import compare
from pagedattn.checking.properties.base import Answer, Finding, Property, Trial
from pagedattn.checking.step import Step
from pagedattn.spec import AttentionSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": False},
    "window_left": {"window_left": 5},
    "sm_scale": {"sm_scale": 0.5},
    "logits_soft_cap": {"logits_soft_cap": 1.0},
}
KV_LENS, QO_LENS = (14, 11), (1, 4)
PAGES = ((7, 6, 5, 4), (2, 1, 0))
PAGE_SIZE = 4


def _option_effect(trial: Trial) -> Iterator[Finding]:
    step = _probe(trial)
    plain, bound = trial.answer(step), trial.bound(step)
    for name, answer in _with_options(trial, step):
        out, without = (a.got.out.to(bound.out.device).double() for a in (answer, plain))
        changed = ((out - without).abs() > 4 * bound.out).flatten(1).any(1).cpu()
        same = [row for row in _rows_that_change(name) if not changed[row]]
        problem = None
        if same:
            value = getattr(answer.step.spec, name)
            problem = f"{name}={value} vs without: rows {same} are the same, it is ignored"
        yield Finding((answer, plain), problem=problem)


def _rows_that_change(name: str) -> range:
    """The last query of a request sees the same keys, causal or not."""
    return range(1, sum(QO_LENS) - 1) if name == "causal" else range(sum(QO_LENS))


def _options_in_turn(trial: Trial) -> Iterator[Finding]:
    step = _probe(trial)
    first = trial.answer(step)
    for name, answer in _with_options(trial, step):
        value = getattr(answer.step.spec, name)
        comparison = compare(answer.got, *trial.subject.truth(answer.step))
        problem = None if comparison.ok else f"{name}={value} vs float64: {comparison.worst}"
        yield Finding((answer,), comparison.worst, problem)
        again = trial.answer(step)
        what = f"without options, after {name}={value} in the same process, vs before it"
        answers = (again, first)
        yield trial.same(what, again.got, first.got, answers, lambda: trial.bound(step))


def _with_options(trial: Trial, step: Step) -> Iterator[tuple[str, Answer]]:
    """The answer with each option in turn; those that the subject declines are left out."""
    num_declined = 0
    for name, option in OPTIONS.items():
        spec = replace(step.spec, **option)
        if trial.subject.unsupported_reasons(spec, PAGE_SIZE, trial.device):
            continue
        try:
            answer = trial.answer(replace(step, spec=spec))
        except NotImplementedError:
            num_declined += 1
            if not trial.subject.may_decline or num_declined == len(OPTIONS):
                raise
            continue
        yield name, answer


def _probe(trial: Trial) -> Step:
    """A step on which every option shows, without options. Backends share one layer kind."""
    spec = AttentionSpec(4, 2, 64, _half(trial.subject.backend))
    if trial.subject.backend is None:
        drawn = trial.batch.spec
        spec = AttentionSpec(drawn.num_qo_heads, drawn.num_kv_heads, drawn.head_dim, drawn.dtype)
    batch = Batch(spec, PAGE_SIZE, 9, KV_LENS, QO_LENS, PAGES, seed=trial.batch.seed)
    return trial.step(batch)


def _half(backend: str | None) -> torch.dtype:
    """FlashInfer compiles a family of kernels for minutes for each dtype and option."""
    return torch.bfloat16 if backend == "flashinfer" else torch.float16


OPTION_EFFECT = Property(
    "option effect",
    "the answer with each option vs without: it must differ",
    _option_effect,
    own_step=True,
)
OPTIONS_IN_TURN = Property(
    "options in turn",
    "one option after another in one process vs float64",
    _options_in_turn,
    own_step=True,
)

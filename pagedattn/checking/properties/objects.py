"""What `PagedAttention` promises beyond numbers: it refuses bad tables and waits for no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagedattn.attention import PagedAttention
from pagedattn.checking.properties.base import Answer, Finding, Property, Trial
from pagedattn.checking.step import Step, run_hostile
from pagedattn.checking.subject import Subject
from pagedattn.page_table import PageTable

Spoil = Callable[[PageTable, Tensor], tuple[PageTable, Tensor]]


def no_object(subject: Subject, device: torch.device) -> str | None:
    """Why a subject has no object to plan."""
    return "a function has no plan" if subject.backend is None else None


def no_gpu(subject: Subject, device: torch.device) -> str | None:
    """Why nothing can be waited for."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, got device {device}"
    if subject.backend == "reference":
        return "the reference waits for its device on purpose"
    return no_object(subject, device)


def _bad_metadata(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    attn = build(trial, step)
    before = Answer(step, run_hostile(attn, step))
    for what, spoil in SPOILED.items():
        yield _refusal(attn, before, what, spoil)
    after = Answer(step, run_hostile(attn, step))
    what = f"the answer after {len(SPOILED)} refused plans vs before"
    yield trial.same(what, after.got, before.got, (after, before), lambda: trial.bound(step))


def _refusal(attn: PagedAttention, good: Answer, what: str, spoil: Spoil) -> Finding:
    """Planning bad metadata raises `ValueError`, and so does running without a good plan."""
    step = good.step
    try:
        attn.plan(*spoil(step.page_table, step.qo_indptr))
    except ValueError:
        try:
            attn.run(step.q, step.kv_cache)
        except RuntimeError:
            return Finding((good,))
        return Finding((good,), problem=f"run after a refused plan ({what}) vs RuntimeError")
    return Finding((good,), problem=f"plan of a bad table ({what}) vs ValueError: nothing raised")


def _no_host_sync(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    attn = build(trial, step)
    before = Answer(step, run_hostile(attn, step))  # buffers grow, kernels are compiled
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = Answer(step, run_hostile(attn, step))
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        yield Finding((before,), problem=f"plan and run vs no wait for the GPU: {error}")
        return
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    what = "a step under torch's sync detection vs before it"
    yield trial.same(what, after.got, before.got, (after, before), lambda: trial.bound(step))


def build(trial: Trial, step: Step) -> PagedAttention:
    """An object of the subject's backend for a step's layer kind."""
    backend = str(trial.subject.backend)
    return PagedAttention(step.spec, step.page_size, backend=backend, device=trial.device)


def _table(**change: Callable[[PageTable], object]) -> Spoil:
    """Replace fields of the table."""

    def spoil(table: PageTable, qo_indptr: Tensor) -> tuple[PageTable, Tensor]:
        changed = {name: make(table) for name, make in change.items()}
        return replace(table, **changed), qo_indptr  # type: ignore[arg-type]

    return spoil


def _with_last(values: Tensor, last: int) -> Tensor:
    return torch.cat([values, values.new_tensor([last])])


SPOILED: dict[str, Spoil] = {
    "int64 lengths": _table(kv_lens=lambda t: t.kv_lens.long()),
    "negative length": _table(kv_lens=lambda t: t.kv_lens - 2**30),
    "more keys than pages": _table(kv_lens=lambda t: t.kv_lens + t.page_size),
    "another page size": _table(page_size=lambda t: t.page_size + 1),
    "kv_indptr from 1": _table(kv_indptr=lambda t: t.kv_indptr + 1),
    "a page too many": _table(kv_indices=lambda t: _with_last(t.kv_indices, 0)),
    "qo_indptr too short": lambda table, qo_indptr: (table, qo_indptr[:-1]),
    "qo_indptr from 1": lambda table, qo_indptr: (table, qo_indptr + 1),
    "qo_indptr that decreases": lambda table, qo_indptr: (table, _with_last(qo_indptr[:-1], -1)),
}

BAD_METADATA = Property(
    "bad metadata",
    "plan of a bad table vs ValueError, and answers after it vs before",
    _bad_metadata,
    reason_against=no_object,
)
NO_HOST_SYNC = Property(
    "no host sync", "plan and run vs no wait for the GPU", _no_host_sync, reason_against=no_gpu
)

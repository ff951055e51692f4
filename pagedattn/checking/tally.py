"""Many random steps through one backend: how close to float64 it stays, and which it gets wrong."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from pagedattn.backends import unsupported_reasons
from pagedattn.checking.batch import Batch
from pagedattn.checking.compare import Difference, check_backend
from pagedattn.checking.drawing import RandomChoices, SpecLimits, StepLimits, draw_batch
from pagedattn.checking.step import Step

GPU_SPECS = SpecLimits(max_qo_heads=48, max_window_left=5000)
GPU_STEPS = StepLimits(max_batch_size=8, max_kv_len=5000, max_work=2000)


@dataclass(frozen=True)
class Failure:
    """One step that a backend got wrong."""

    seed: int
    batch: Batch
    problem: str  # the worst difference and its place, or the error that was raised
    raised: str | None = None  # the error's type, where one was raised


@dataclass(frozen=True)
class Tally:
    """What came out for one backend in one mode."""

    backend: str
    mode: str
    num_examples: int
    worst: Difference | None  # the nearest to its allowed error, or the furthest above it
    failures: tuple[Failure, ...]


def batch_of_seed(mode: str, seed: int, device: torch.device) -> Batch:
    """The step that the check command draws from a seed, larger for a GPU."""
    on_gpu = device.type == "cuda"
    specs, steps = (GPU_SPECS, GPU_STEPS) if on_gpu else (SpecLimits(), StepLimits())
    return draw_batch(RandomChoices(f"{mode} {seed}"), mode, specs, steps)


def supported_batches(
    backend: str, mode: str, seeds: range, device: torch.device
) -> Iterator[tuple[int, Batch]]:
    """Draw one step a seed; yield those that the backend supports, with their seeds."""
    for seed in seeds:
        batch = batch_of_seed(mode, seed, device)
        if not unsupported_reasons(backend, batch.spec, batch.page_size, device):
            yield seed, batch


def check_batches(
    backend: str, mode: str, batches: Iterator[tuple[int, Batch]], device: torch.device
) -> Tally:
    """Compute every step with the backend and compare it; an error that it raises is a failure."""
    worst: Difference | None = None
    failures = []
    num_examples = 0
    for seed, batch in batches:
        num_examples += 1
        try:
            comparison = check_backend(backend, batch.materialise(device))
        except Exception as error:  # whatever a backend may raise: the other steps still count
            raised = type(error).__name__
            failures.append(Failure(seed, batch, f"raised {raised}: {error}", raised))
            continue
        found = comparison.worst
        if found is not None and (worst is None or found.excess > worst.excess):
            worst = found
        if found is not None and not comparison.ok:
            failures.append(Failure(seed, batch, f"{found} ({describe_row(batch, found.row)})"))
    return Tally(backend, mode, num_examples, worst, tuple(failures))


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

"""What is left of a failed check: its smallest case, as a picture and as a capsule to replay."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from pagedattn.attention import AttentionOutput
from pagedattn.backends import unsupported_reasons
from pagedattn.checking.batch import Batch
from pagedattn.checking.bound import allowed_error
from pagedattn.checking.capsule import SUFFIX, save_capsule
from pagedattn.checking.capsule_metadata import printable
from pagedattn.checking.compare import arithmetic_of, compare, expected_of
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.shrink import shrink_batch
from pagedattn.checking.step import Step, attend_with
from pagedattn.checking.tally import Failure, check_batches, describe_row
from pagedattn.draw import draw_pages


def keep_failure(
    backend: str, mode: str, failure: Failure, device: torch.device, folder: Path
) -> str:
    """Shrink a failing step, write its capsule, and say in lines what it is and how to replay it.

    Args:
        backend: What failed.
        mode: How the step was drawn.
        failure: Of `check_batches`.
        device: Where it failed.
        folder: Where the capsule goes; made where it does not exist.
    """
    batch, got, problem = _smallest(backend, mode, failure, device)
    # an error's step is made on the host: after some errors a GPU answers no more
    step = batch.materialise("cpu" if got is None else device)
    path = folder / f"capsule-{backend}-{mode}-seed{failure.seed}{SUFFIX}"
    lines = [f"  smallest: {problem}", *describe_batch(batch), _picture(batch)]
    if got is not None:
        lines += _diagnosis(backend, batch, got)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = expected_of(backend, step)
        save_capsule(path, step, got, expected, backend=backend, problem=problem, seed=failure.seed)
    except (OSError, ValueError) as error:
        return "\n".join([*lines, f"  no capsule written: {error}"])
    again = f"--backend {backend} --device {device.type}"
    return "\n".join([*lines, f"  replay: pagedattn replay {shlex.quote(str(path))} {again}"])


def _diagnosis(backend: str, batch: Batch, got: AttentionOutput) -> list[str]:
    """The fault that would compute this answer, in lines."""
    found = diagnose(batch.materialise("cpu"), got, arithmetic=arithmetic_of(backend))
    return [f"  {line}" for line in str(found).splitlines()] if found is not None else []


def _smallest(
    backend: str, mode: str, failure: Failure, device: torch.device
) -> tuple[Batch, AttentionOutput | None, str]:
    """The smallest batch that fails alike, what the backend answers, and what is wrong with it."""
    as_found = (failure.batch, None, printable(failure.problem))
    if failure.raised and device.type == "cuda":
        return as_found
    try:
        batch = shrink_batch(
            failure.batch, lambda b: _fails_alike(backend, mode, b, failure, device)
        )
        got, problem = _answer(backend, batch.materialise(device))
    except RuntimeError:  # a GPU that answers no more
        return as_found
    return batch, got, printable(problem)


def describe_batch(batch: Batch) -> list[str]:
    """Two indented lines: the layer kind, and the step's structure."""
    return [
        f"  {batch.spec}",
        f"  page_size={batch.page_size} kv_lens={batch.kv_lens} qo_lens={batch.qo_lens} "
        f"values={batch.values!r} garbage={batch.garbage!r}",
    ]


def _fails_alike(
    backend: str, mode: str, batch: Batch, failure: Failure, device: torch.device
) -> bool:
    """Whether the backend gets a batch wrong as it did before: by its answer or by the same error.

    A batch that it does not support is none that it gets wrong.
    """
    if unsupported_reasons(backend, batch.spec, batch.page_size, device):
        return False
    failures = check_batches(backend, mode, iter([(failure.seed, batch)]), device).failures
    return bool(failures) and failures[0].raised == failure.raised


def _answer(backend: str, step: Step) -> tuple[AttentionOutput | None, str]:
    """What the backend answers, and what is wrong with it."""
    try:
        got = attend_with(backend)(step)
    except Exception as error:  # whatever a backend may raise is what was found
        return None, f"raised {type(error).__name__}: {error}"
    expected = expected_of(backend, step)
    bound = allowed_error(step, expected, arithmetic_of(backend))
    worst = compare(got, expected, bound).worst
    return (
        got,
        "nothing to compare" if worst is None else f"{worst} ({describe_row(step, worst.row)})",
    )


def _picture(batch: Batch) -> str:
    return draw_pages(
        batch.page_table,
        qo_indptr=batch.qo_indptr,
        window_left=batch.spec.window_left,
        num_pages=batch.num_pages,
    ).text

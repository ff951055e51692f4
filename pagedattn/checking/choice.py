"""Which device and which backends a command line asks for, and whether they can run.

Triton decides at its import whether it interprets: nothing here may import it before
`interpret_on_cpu` was called.
"""

from __future__ import annotations

import os
import warnings

import click
import torch
from rich.console import Console

from pagedattn.backends import backend_names, unsupported_reasons
from pagedattn.checking.subject import Subject
from pagedattn.checking.target import target_subject
from pagedattn.device import resolve_device
from pagedattn.spec import AttentionSpec

BACKEND_HELP = f"One of {', '.join(backend_names())}; may be repeated. [default: all that run]"


def usable_device(name: str | None) -> torch.device:
    """The device of this name, by default the current GPU or the CPU; it must work."""
    try:
        device = resolve_device(name)
        torch.empty(1, device=device)
    except (RuntimeError, ValueError) as error:  # torch's, and ours
        raise click.UsageError(f"--device {name}: {error}") from None
    return device


def interpret_on_cpu(device: torch.device) -> None:
    """Ask Triton to interpret where there is no GPU."""
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # where tanh saturates, exp2 overflows as it should
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning, "triton.runtime.interpreter")


def named_backends(
    backends: tuple[str, ...], spec: AttentionSpec, page_size: int, device: torch.device
) -> list[str]:
    """The backends that were asked for, each of which must run here."""
    for name in backends:
        if name not in backend_names():
            known = ", ".join(backend_names())
            raise click.UsageError(f"unknown backend {name!r}, expected one of {known}")
        reasons = unsupported_reasons(name, spec, page_size, device)
        if reasons:
            listed = "".join(f"\n  - {reason}" for reason in reasons)
            raise click.UsageError(f"backend {name!r} cannot run on {device}:{listed}")
    return list(dict.fromkeys(backends))


def all_that_run(
    spec: AttentionSpec, page_size: int, device: torch.device, console: Console
) -> list[str]:
    """Every backend that runs here; the others are named with their reasons."""
    chosen = []
    for name in backend_names():
        reasons = unsupported_reasons(name, spec, page_size, device)
        if reasons:
            line = f"{name} is left out: {'; '.join(reasons)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            chosen.append(name)
    return chosen


def named_targets(targets: tuple[str, ...], *, live: bool = False) -> list[Subject]:
    """The functions that were asked for, each of which must exist."""
    try:
        return [target_subject(name, live=live) for name in dict.fromkeys(targets)]
    except ValueError as error:
        raise click.UsageError(str(error)) from None

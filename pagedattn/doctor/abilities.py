"""What works on a machine, and the command that cures what does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from pagedattn.backends import backend_names, unsupported_reasons
from pagedattn.device import resolve_device
from pagedattn.doctor.machine import Machine, missing_compilers
from pagedattn.spec import AttentionSpec
from pagedattn.toolchain import FLASHINFER_PACKAGE

PLAIN_SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
"""A backend that cannot compute this here takes no part."""

_IMPORT_SECONDS = 300


@dataclass(frozen=True)
class Problem:
    """Why something does not work.

    Attributes:
        what: The reason.
        cure: The command or step that removes it.
    """

    what: str
    cure: str


@dataclass(frozen=True)
class Ability:
    """Something that a user may want to do.

    Attributes:
        name: What it is.
        is_backend: Whether it is one of the backends.
        problems: Everything in its way; empty means it works.
    """

    name: str
    is_backend: bool
    problems: tuple[Problem, ...]


def abilities_of(machine: Machine) -> list[Ability]:
    """Try or tell everything that may work here."""
    abilities = [
        Ability(f"backend {name}", True, tuple(_backend_problems(name, machine)))
        for name in backend_names()
    ]
    needs_package = (
        ("generate with transformers", "transformers", 'pip install "pagedattn[transformers]"'),
        ("pagedattn.testing", "hypothesis", 'pip install "pagedattn[testing]"'),
        ("precompile Triton's kernels", "triton", 'pip install "triton>=3.6"'),
    )
    for name, package, cure in needs_package:
        problems = () if machine.has(package) else (Problem(f"{package} is not installed", cure),)
        abilities.append(Ability(name, False, problems))
    compilers = tuple(Problem(what, cure) for what, cure in missing_compilers(machine))
    abilities.append(Ability("compile FlashInfer's kernels", False, compilers))
    return abilities


def _backend_problems(name: str, machine: Machine) -> list[Problem]:
    if name == "flashinfer":
        return _flashinfer_problems(machine)
    device = resolve_device(None)
    problems = []
    for reason in unsupported_reasons(name, PLAIN_SPEC, 16, device):
        what, _, command = reason.partition(": ")
        if "TRITON_INTERPRET=1" in reason:
            command = "export TRITON_INTERPRET=1"
        problems.append(Problem(what, command or "see `pagedattn explain`"))
    return problems


def _flashinfer_problems(machine: Machine) -> list[Problem]:
    """In its way: its import, tried in a process of its own, since it may end the process."""
    problems = []
    if not machine.has(FLASHINFER_PACKAGE):
        problems.append(
            Problem("FlashInfer is not installed", 'pip install "pagedattn[flashinfer]"')
        )
    problems += _gpu_problems(machine)
    if problems:
        return problems
    failure = import_failure("flashinfer")
    if failure is not None:
        return [Problem(f"import flashinfer failed: {failure}", "python -c 'import flashinfer'")]
    reasons = unsupported_reasons("flashinfer", PLAIN_SPEC, 16, resolve_device(None))
    problems = [Problem(reason, "see `pagedattn explain`") for reason in reasons]
    # without compilers only kernels that are there already can run
    built = any(folder.kernels for folder in machine.compiled)
    if not built and any("nvcc" in what for what, _ in missing_compilers(machine)):
        problems.append(
            Problem("its kernels are compiled on first use", "install the CUDA toolkit")
        )
    return problems


def _gpu_problems(machine: Machine) -> list[Problem]:
    if machine.gpus:
        return []
    if machine.driver is None:
        return [Problem("there is no NVIDIA driver", "run on a machine with an NVIDIA GPU")]
    if machine.torch_cuda is None:
        return [Problem("torch was built without CUDA", "install a torch that is built for CUDA")]
    return [
        Problem(
            f"torch, built for CUDA {machine.torch_cuda}, sees no GPU",
            "nvidia-smi; unset CUDA_VISIBLE_DEVICES; or take a newer driver",
        )
    ]


def import_failure(module: str) -> str | None:
    """Why a module cannot be imported, tried in a process of its own; `None`: it can."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with {done.returncode}"

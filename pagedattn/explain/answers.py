"""Which backend computes a spec: on the device that is here, and on one that is not.

A backend is asked itself about the device that is here. Of a GPU that is not here only the tables
can tell: what a backend says of the spec whatever the device, and what is known of FlashInfer,
whose own answer without a GPU stops at "there is none".
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from pagedattn.backends import backend_names, unsupported_reasons
from pagedattn.backends.flashinfer.backend import FlashInferBackend
from pagedattn.backends.flashinfer.defects import FIRST_SUPPORTED
from pagedattn.backends.flashinfer.head_dim import FA3_HEAD_DIMS, supported_head_dims
from pagedattn.backends.flashinfer.library import Version
from pagedattn.backends.flashinfer.need import DeviceFacts
from pagedattn.spec import AttentionSpec

H200 = DeviceFacts(num_processors=132, compute_capability=(9, 0))
_ANYTHING = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=64)
"""What every backend computes: a reason against it is one against the device."""

ADVICE = (
    ("is not installed: ", ""),  # the reason ends with the command
    ("set TRITON_INTERPRET=1", ""),
    ("pad q, k and v", ""),
    ("needs an NVIDIA GPU", "run it on a machine with one, or take another backend here"),
    ("compute [torch.bfloat16", "take --dtype bf16 or fp16"),
    ("the kernels compute 1 to 256", "take a backend that computes this head size"),
    ("import flashinfer failed", "run `pagedattn doctor`"),
    ("needs flashinfer-python >=", 'pip install --upgrade "pagedattn[flashinfer]"'),
    ("is older than compute capability 8.0", "take a newer GPU"),
)
"""A phrase of a reason, and what to do about it; nothing where the reason says it itself."""


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot compute a spec.

    Attributes:
        why: The reason.
        advice: What to do about it; empty where the reason says it.
    """

    why: str
    advice: str


@dataclass(frozen=True)
class Answer:
    """One backend's answer for one device.

    Attributes:
        backend: Its name.
        device: The device, in words.
        asked: Whether the backend was asked on that device, or tables told.
        reasons: Everything against it; empty means yes.
    """

    backend: str
    device: str
    asked: bool
    reasons: tuple[Reason, ...]


def answers_here(
    spec: AttentionSpec, page_size: int, device: torch.device, version: Version
) -> list[Answer]:
    """Every backend's own answer.

    Args:
        spec: The layer kind.
        page_size: Tokens of a page.
        device: A device of this machine.
        version: FlashInfer's, for what the tables tell where it cannot be asked.
    """
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    answers = []
    for backend in backend_names():
        reasons = unsupported_reasons(backend, spec, page_size, device)
        if backend == "flashinfer" and (not _installed(backend) or device.type != "cuda"):
            reasons += [r for r in _own(backend, spec, page_size, device) if r not in reasons]
            reasons += _flashinfer_tables(spec, version)
        answers.append(Answer(backend, words, True, _advised(reasons)))
    return answers


def answers_elsewhere(
    spec: AttentionSpec, page_size: int, name: str, version: Version
) -> list[Answer]:
    """What the tables tell of a GPU that is not here, with everything installed.

    Args:
        spec: The layer kind.
        page_size: Tokens of a page.
        name: The GPU's name; its compute capability is at least 8.0.
        version: FlashInfer's.
    """
    answers = []
    cpu = torch.device("cpu")
    for backend in backend_names():
        of_the_cpu = _own(backend, _ANYTHING, page_size, cpu)
        reasons = [r for r in _own(backend, spec, page_size, cpu) if r not in of_the_cpu]
        if backend == "flashinfer":
            reasons += _flashinfer_tables(spec, version)
        answers.append(Answer(backend, name, False, _advised(reasons)))
    return answers


def _own(backend: str, spec: AttentionSpec, page_size: int, device: torch.device) -> list[str]:
    """A backend's answer, FlashInfer's which needs not be installed for one without a GPU."""
    if backend == "flashinfer" and device.type != "cuda":
        return FlashInferBackend.unsupported_reasons(spec, page_size, device)
    return unsupported_reasons(backend, spec, page_size, device)


def _installed(backend: str) -> bool:
    return importlib.util.find_spec(backend) is not None


def _flashinfer_tables(spec: AttentionSpec, version: Version) -> list[str]:
    reasons = []
    words = dotted(version)
    if version < FIRST_SUPPORTED:
        reasons.append(f"needs flashinfer-python >= {dotted(FIRST_SUPPORTED)}, got {words}")
    sizes = supported_head_dims(version)
    if spec.head_dim not in sizes:
        larger = [size for size in sizes if size > spec.head_dim]
        advice = f": pad q, k and v with zeros to {larger[0]}" if larger else ""
        reasons.append(
            f"FlashInfer {words} does not compute head_dim={spec.head_dim} exactly, only "
            f"{list(sizes)}{advice}"
        )
    return reasons


def has_fa3_kernel(spec: AttentionSpec, facts: DeviceFacts) -> bool:
    """Whether FlashInfer has its Hopper kernel for this head size on this GPU."""
    return facts.compute_capability[0] == 9 and spec.head_dim in FA3_HEAD_DIMS


def dotted(version: Version) -> str:
    """A version as people write it.

    Example:
        >>> dotted((0, 7, 4))
        '0.7.4'
    """
    return ".".join(map(str, version))


def _advised(reasons: list[str]) -> tuple[Reason, ...]:
    return tuple(Reason(reason, _advice(reason)) for reason in reasons)


def _advice(reason: str) -> str:
    for phrase, advice in ADVICE:
        if phrase in reason:
            return advice
    return "take another backend"

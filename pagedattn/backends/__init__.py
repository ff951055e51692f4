"""Backends by name. A backend's module is imported on first use and imports no other backend."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

import torch

from pagedattn.backends.base import Backend, UnsupportedSpec
from pagedattn.spec import AttentionSpec

__all__ = ["Backend", "UnsupportedSpec", "backend_names", "load_backend", "unsupported_reasons"]


@dataclass(frozen=True)
class _Entry:
    path: str  # dotted module and class
    needs: str  # importable module that the backend cannot do without
    install: str  # the command that brings it


_BACKENDS = {
    "flashinfer": _Entry(
        "pagedattn.backends.flashinfer.backend.FlashInferBackend",
        "flashinfer",
        'pip install "pagedattn[flashinfer]"',
    ),
    "triton": _Entry(
        "pagedattn.backends.triton.backend.TritonBackend", "triton", 'pip install "triton>=3.6"'
    ),
    "reference": _Entry(
        "pagedattn.backends.reference.ReferenceBackend", "torch", "pip install torch"
    ),
}


def backend_names() -> list[str]:
    """The names that `PagedAttention(backend=...)` takes."""
    return list(_BACKENDS)


def load_backend(name: str) -> type[Backend]:
    """Import a backend's class.

    Raises:
        ValueError: No backend has this name; the message lists those that exist.
        ImportError: The package that it stands on is not installed.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend {name!r}, expected one of {backend_names()}")
    entry = _BACKENDS[name]
    if importlib.util.find_spec(entry.needs) is None:
        raise ImportError(f"{entry.needs} is not installed: {entry.install}")
    module, _, class_name = entry.path.rpartition(".")
    backend: type[Backend] = getattr(importlib.import_module(module), class_name)
    return backend


def unsupported_reasons(
    name: str,
    spec: AttentionSpec,
    page_size: int,
    device: torch.device | str,
    *,
    batch_invariant: bool = False,
) -> list[str]:
    """Every reason why backend `name` cannot compute `spec` on `device`; empty when it can."""
    try:
        backend = load_backend(name)
    except ImportError as error:
        return [str(error)]
    reasons = backend.unsupported_reasons(spec, page_size, torch.device(device))
    if batch_invariant and backend.no_batch_invariance is not None:
        reasons.append(f"batch_invariant=True: {backend.no_batch_invariance}")
    return reasons

"""What a peer is: something that computes attention of a case and can be timed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from pagedattn.checking.bound import FLOAT32_SUMS, Arithmetic


def _itself(result: Tensor) -> Tensor:
    return result


def _nothing() -> int:
    return 0


@dataclass(frozen=True, eq=False)
class Call:
    """A case made ready for one peer.

    Args:
        plan: What a step costs the host before its first layer.
        run: One layer. What it returns lives until the next call.
        rows: Turns what `run` returned into dtype[tokens, num_qo_heads, head_dim]; not timed.
        capturable: Whether a CUDA graph can hold `run`.
        outgrown_bytes: Memory that is only kept because a workspace has grown.
    """

    plan: Callable[[], object]
    run: Callable[[], Any]
    rows: Callable[[Any], Tensor] = _itself
    capturable: bool = True
    outgrown_bytes: Callable[[], int] = _nothing


def _takes_all(case: Case) -> bool:
    return True


def _runs_anywhere(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """Something that can be timed.

    Args:
        name: What `--backends` selects by.
        routine: The class or function that does the work.
        build: Makes a case ready.
        takes: Whether it computes a case at all.
        missing: Why it cannot run on a device, or None.
        kernel: Which of a library's kernels it pins, where there are several.
        arithmetic: How it computes, which decides what error is allowed.
        ours: Whether it is this package's.
        by_default: Whether it is timed when nobody asks for it by name.
    """

    name: str
    routine: str
    build: Callable[[Inputs], Call]
    takes: Callable[[Case], bool] = _takes_all
    missing: Callable[[torch.device], str | None] = _runs_anywhere
    kernel: str = ""
    arithmetic: Arithmetic = FLOAT32_SUMS
    ours: bool = False
    by_default: bool = True


def needs_gpu_and(module: str) -> Callable[[torch.device], str | None]:
    """What is missing of a GPU and an importable module."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs an NVIDIA GPU, got device {device}"
        return None if is_importable(module) else f"{module} is not installed"

    return missing


def is_importable(module: str) -> bool:
    """Whether a module can be found; its parents are imported for that."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def cache_views(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Pages of keys and pages of values: two views of the cache."""
    return inputs.kv_cache[:, 0], inputs.kv_cache[:, 1]

"""Devices: their full names, which one is current, and whether its stream is being captured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

NOTHING = nullcontext()
"""The context of what needs none; it has no state."""


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Name a device fully: `None` is the current GPU or the CPU, "cuda" the current GPU.

    Raises:
        ValueError: There is no GPU, or none of this number.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}': torch sees {torch.cuda.device_count()} GPUs here; `pagedattn "
            "doctor` says more, and on a CPU the backends reference and triton (interpreted) run"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one: kernels launch there, wherever their tensors are."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return NOTHING
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_stream_handle(device: torch.device) -> int:
    """CUDA's handle of the current stream of a GPU.

    By what compilers of torch call, in a thirtieth of the time of making a `Stream` to ask.
    """
    return torch._C._cuda_getCurrentRawStream(device.index)

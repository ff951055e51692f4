"""The head sizes that FlashInfer's paged attention computes exactly."""

from __future__ import annotations

import torch

from pagedattn.backends.flashinfer.library import Version, flashinfer_version, load_flashinfer

# First version: sizes that its kernels are compiled for and that were right against float64. Found
# by benchmarks/probe_flashinfer_head_dims.py on an H200 in bf16, which runs every size in a process
# of its own: 16, 32 and 48 raise, 80, 96, 112, 160 and 224 end in an illegal memory access, 320,
# 384 and 448 do not compile. 192 is right for short queries alone: requests that are split raise
# "VariableLengthMergeStates: Unsupported head_dim: 192".
HEAD_DIMS: dict[Version, tuple[int, ...]] = {
    (0, 6, 18): (64, 128, 256, 512),
    (0, 7, 4): (64, 128, 256, 512),
}

FA3_HEAD_DIMS = (64, 128, 256)
"""The sizes of the Hopper kernel, with one size for keys and values."""


def supported_head_dims(version: Version) -> tuple[int, ...]:
    """Head sizes of a version: those of the newest version in the table that is not newer.

    Example:
        >>> supported_head_dims((0, 9, 0))
        (64, 128, 256, 512)
    """
    known = [entry for entry in HEAD_DIMS if entry <= version]
    return HEAD_DIMS[max(known, default=min(HEAD_DIMS))]


def check_flashinfer_head_dim(head_dim: int, device: torch.device | None = None) -> None:
    """Require a head size that FlashInfer's paged attention computes exactly.

    Args:
        head_dim: Elements of one head.
        device: Where attention will run; `None`: a GPU. Not checked for anything but a CUDA device.

    Raises:
        ValueError: It does not; the message lists the sizes that it does, and what to do.
    """
    if device is not None and torch.device(device).type != "cuda":
        return
    version = flashinfer_version(load_flashinfer())
    sizes = supported_head_dims(version)
    if head_dim in sizes:
        return
    larger = [size for size in sizes if size > head_dim]
    advice = (
        f"pad q, k and v with zeros to {larger[0]}, keep sm_scale={head_dim}**-0.5, and drop the "
        "padding of the output"
        if larger
        else "use another backend"
    )
    raise ValueError(
        f"FlashInfer {'.'.join(map(str, version))} does not compute head_dim={head_dim} exactly, "
        f"only {list(sizes)}: {advice}"
    )

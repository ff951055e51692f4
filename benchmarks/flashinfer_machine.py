"""What a result of the FlashInfer benchmarks depends on."""

from __future__ import annotations

from importlib.metadata import version

import torch


def describe_machine() -> str:
    """GPU, driver and library versions in one line."""
    driver = torch.cuda._C._cuda_getDriverVersion() if torch.cuda.is_available() else 0
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    names = ("flashinfer-python", "torch", "triton")
    return ", ".join([gpu, f"CUDA driver {driver}", *(f"{n} {version(n)}" for n in names)])

"""What a result of the FlashInfer benchmarks depends on."""

from __future__ import annotations

import subprocess
from importlib.metadata import version

import torch

_QUERY = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def describe_machine() -> str:
    """GPU, driver and library versions in one line."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    import flashinfer

    versions = [f"FlashInfer {flashinfer.__version__}", f"torch {torch.__version__}"]
    return ", ".join([gpu, f"driver {_driver()}", *versions, f"triton {version('triton')}"])


def _driver() -> str:
    try:
        return subprocess.run(_QUERY, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        return "unknown"

"""One suite for every machine: with a GPU the tests use it, without one Triton interprets."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from hypothesis import HealthCheck, settings

_SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=10, deadline=None, suppress_health_check=_SLOW_DRAWS)
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=20, derandomize=True)
settings.register_profile("deep", parent=settings.get_profile("dev"), max_examples=1000)
settings.load_profile(os.environ.get("PAGEDATTN_PROFILE", "dev"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of this run: the current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

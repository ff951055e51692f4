"""One suite for every machine: with a GPU the tests use it, without one Triton interprets."""

import os
import pkgutil
from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
else:
    # a command for the CPU asks Triton to interpret: kernels imported after that would do so
    import pagedattn.kernels

    for _module in pkgutil.iter_modules(pagedattn.kernels.__path__, "pagedattn.kernels."):
        import_module(_module.name)
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # or every worker takes all cores, and they wait for one another

from pagedattn import AttentionSpec, backend_names, unsupported_reasons

_INTERPRET = os.environ.get("TRITON_INTERPRET")
_SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=10, deadline=None, suppress_health_check=_SLOW_DRAWS)
settings.register_profile(
    "ci", parent=settings.get_profile("dev"), max_examples=20, derandomize=True
)
settings.register_profile("deep", parent=settings.get_profile("dev"), max_examples=1000)
settings.load_profile(os.environ.get("PAGEDATTN_PROFILE", "dev"))


def pytest_configure(config: pytest.Config) -> None:
    # where tanh saturates, the interpreter's exp2 overflows as it should
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp2:RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _triton_stays_as_it_is():
    """Undo what a command run by a test, or by a module's fixture, does to the environment."""
    _reset_interpreter()
    yield
    _reset_interpreter()


def _reset_interpreter() -> None:
    if _INTERPRET is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = _INTERPRET


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of this run: the current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture(scope="session", params=backend_names())
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Every backend that runs on this machine; the others are skipped with their reasons."""
    reasons = unsupported_reasons(request.param, AttentionSpec(4, 2, 64), 16, device)
    if reasons:
        pytest.skip(f"{request.param}: {'; '.join(reasons)}")
    return request.param

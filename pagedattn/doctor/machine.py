"""What is here: versions, the GPU, compilers and what is compiled. Nothing is judged."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from pagedattn.toolchain import (
    FLASHINFER_PACKAGE,
    CacheFolder,
    Nvcc,
    cache_folders,
    driver_version,
    find_nvcc,
    flashinfer_cache,
    package_version,
    program_version,
)

PACKAGES = ("pagedattn", "torch", "triton", FLASHINFER_PACKAGE, "transformers", "hypothesis")


@dataclass(frozen=True)
class Package:
    """A distribution.

    Attributes:
        name: Its name.
        version: The installed version, `None` where it is not installed.
    """

    name: str
    version: str | None


@dataclass(frozen=True)
class Gpu:
    """A CUDA device.

    Attributes:
        name: As its driver calls it.
        compute_capability: Such as "9.0".
    """

    name: str
    compute_capability: str


@dataclass(frozen=True)
class Machine:
    """Everything that the doctor looks at.

    Attributes:
        python: The version.
        packages: In the order of `PACKAGES`.
        torch_cuda: CUDA's version that torch was built for, `None` where for none.
        gpus: Those that torch sees.
        driver: The NVIDIA driver's version, `None` without one.
        nvcc: The CUDA compiler, `None` without one.
        cxx: The host compiler's version, `None` without one.
        ninja: Ninja's version, `None` without it.
        triton_interprets: Whether Triton interprets in this environment; `None` without Triton.
        cache: FlashInfer's folder for compiled kernels.
        compiled: What is compiled there.
    """

    python: str
    packages: tuple[Package, ...]
    torch_cuda: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    nvcc: Nvcc | None
    cxx: str | None
    ninja: str | None
    triton_interprets: bool | None
    cache: str
    compiled: tuple[CacheFolder, ...]

    def has(self, package: str) -> bool:
        """Whether a package of `PACKAGES` is installed."""
        return any(p.name == package and p.version is not None for p in self.packages)


def examine() -> Machine:
    """Look at this machine."""
    packages = tuple(Package(name, package_version(name)) for name in PACKAGES)
    has_triton = any(p.name == "triton" and p.version for p in packages)
    return Machine(
        python=platform.python_version(),
        packages=packages,
        torch_cuda=torch.version.cuda,
        gpus=_gpus(),
        driver=driver_version(),
        nvcc=find_nvcc(),
        cxx=program_version("c++") or program_version("g++"),
        ninja=program_version("ninja"),
        triton_interprets=_triton_interprets() if has_triton else None,
        cache=str(flashinfer_cache()),
        compiled=tuple(cache_folders(flashinfer_cache())),
    )


def missing_compilers(machine: Machine) -> list[tuple[str, str]]:
    """What compiling FlashInfer's kernels lacks, and the command that brings each."""
    missing = []
    if not machine.has(FLASHINFER_PACKAGE):
        missing.append(("FlashInfer is not installed", 'pip install "pagedattn[flashinfer]"'))
    if machine.nvcc is None:
        missing.append(("there is no nvcc", "install the CUDA toolkit, or set CUDA_HOME to it"))
    if machine.cxx is None:
        missing.append(("there is no c++", "apt-get install g++"))
    if machine.ninja is None:
        missing.append(("there is no ninja", "pip install ninja"))
    return missing


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(
        Gpu(
            torch.cuda.get_device_name(index),
            ".".join(map(str, torch.cuda.get_device_capability(index))),
        )
        for index in range(torch.cuda.device_count())
    )


def _triton_interprets() -> bool | None:
    try:
        import triton
    except ImportError:
        return None
    return bool(triton.knobs.runtime.interpret)

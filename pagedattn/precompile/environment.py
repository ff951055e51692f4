"""What compilers must find, also where the GPU, its driver and half of the toolkit are missing.

Nothing here may change a compiler's command line: ninja compares it with that of the service, and
would compile everything again. So folders go into `LIBRARY_PATH` and `CPATH`, which are no part of
it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

from pagedattn.toolchain import Nvcc, toolkit_folders

RELEASE_VARIABLE = "PAGEDATTN_CUDA_RELEASE"
"""Tells the compiling process which CUDA nvcc is of, for a torch that has none."""

_LIBRARIES = (("cudart", None), ("cuda", "libcuda.so.1"))
"""What FlashInfer links with, and the name under which a stub may stand in for it at that time."""

_HOPPER_HEADER = "curand_kernel.h"


def build_environment(nvcc: Nvcc, arch: str, jobs: int | None, links: Path) -> dict[str, str]:
    """The environment of the compiling process.

    Args:
        nvcc: The CUDA compiler.
        arch: GPU architecture, such as "9.0a".
        jobs: Compilers at once; `None`: as ninja sees fit.
        links: A folder for links and stubs that the linker needs.
    """
    environment = {
        **os.environ,
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "NINJA_STATUS": "[%f/%t] ",
        RELEASE_VARIABLE: nvcc.release,
    }
    if jobs is not None:
        environment["MAX_JOBS"] = str(jobs)
    _prepend(environment, "LIBRARY_PATH", library_folders(nvcc, links))
    _prepend(environment, "CPATH", header_folders(nvcc, links))
    return environment


def library_folders(nvcc: Nvcc, links: Path) -> list[Path]:
    """Folders in which the linker finds CUDA's libraries; what none has is put into `links`."""
    searched = [*_toolkit_libraries(nvcc), *_package_folders("lib"), *_system_libraries()]
    folders = []
    for name, stub in _LIBRARIES:
        found = next((d for d in searched if (d / f"lib{name}.so").exists()), None)
        if found is None:
            found = _linkable(name, searched, links) or _stub(name, stub, links)
        if found is not None:
            folders.append(found)
    return list(dict.fromkeys(folders))


def header_folders(nvcc: Nvcc, links: Path) -> list[Path]:
    """A folder of the headers that the Hopper kernels need, where the toolkit lacks them.

    Links to these alone: the package's folder may have others, of another version of CUDA.
    """
    toolkit = [path for root in toolkit_folders(nvcc) for path in _include_folders(root)]
    if any((folder / _HOPPER_HEADER).exists() for folder in toolkit):
        return []
    for folder in _package_folders("include"):
        if (folder / _HOPPER_HEADER).exists():
            chosen = links / "include"
            for header in folder.glob("curand*.h"):
                _link(chosen / header.name, header)
            return [chosen]
    return []


def _prepend(environment: dict[str, str], name: str, folders: Iterable[Path]) -> None:
    paths = [*map(str, folders), environment.get(name, "")]
    joined = os.pathsep.join(filter(None, paths))
    if joined:
        environment[name] = joined


def _toolkit_libraries(nvcc: Nvcc) -> list[Path]:
    folders = []
    for root in toolkit_folders(nvcc):
        for parent in (root, root / "targets" / f"{platform.machine()}-linux"):
            for name in ("lib64", "lib"):
                folders += [parent / name, parent / name / "stubs"]
    return folders


def _system_libraries() -> list[Path]:
    multiarch = f"/usr/lib/{platform.machine()}-linux-gnu"
    names = (multiarch, "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64")
    return [Path(name) for name in names]


def _include_folders(root: Path) -> list[Path]:
    return [root / "include", root / "targets" / f"{platform.machine()}-linux" / "include"]


def _package_folders(name: str) -> list[Path]:
    """Folders of this name in NVIDIA's Python packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return [path for root in roots for path in sorted(Path(root).glob(f"*/{name}"))]


def _linkable(name: str, searched: list[Path], links: Path) -> Path | None:
    """Where there is only a library's versioned file, give it the name that linkers look for."""
    for folder in searched:
        for versioned in sorted(folder.glob(f"lib{name}.so.*")):
            _link(links / f"lib{name}.so", versioned)
            return links
    return None


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _stub(name: str, soname: str | None, links: Path) -> Path | None:
    """An empty library for the linker alone; at run time the driver's own is found by its name."""
    if soname is None:
        return None
    links.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", f"-Wl,-soname,{soname}"]
    try:
        subprocess.run(
            [*command, "-o", str(links / f"lib{name}.so")], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # the build will fail at the same compiler, and say so
    return links

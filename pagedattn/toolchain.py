"""What is installed here: package versions, compilers, and FlashInfer's cache of compiled kernels.

Nothing here imports the packages that it asks about: FlashInfer's import needs CUDA in torch, and
Triton decides at its own whether it interprets.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FLASHINFER_PACKAGE = "flashinfer-python"
_CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
_FAMILY = re.compile(
    r"batch_prefill_with_kv_cache_dtype_q_(?P<dtype>\w+?)_dtype_kv_\w+?_dtype_o_\w+?_dtype_idx_i32_"
    r"head_dim_qk_(?P<head_dim>\d+)_head_dim_vo_\d+_posenc_0_use_swa_(?P<window>True|False)_"
    r"use_logits_cap_(?P<soft_cap>True|False)_f16qk_False_?(?P<kind>\w*?)_?(?P<sm90>(?<=_)sm90)?"
)


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Attributes:
        path: Where it is.
        release: Of CUDA, such as "13.0".
    """

    path: str
    release: str


@dataclass(frozen=True)
class CacheFolder:
    """What FlashInfer has compiled for one of its versions and one set of GPU architectures.

    Attributes:
        path: Where it is.
        kernels: Names of the kernel families with a finished library, sorted.
        unfinished: Names of those without: a build that goes on, failed or was stopped.
    """

    path: str
    kernels: tuple[str, ...]
    unfinished: tuple[str, ...]


def package_version(name: str) -> str | None:
    """The installed version of a distribution, `None` where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_nvcc() -> Nvcc | None:
    """The CUDA compiler that FlashInfer would take, `None` where there is none that answers."""
    homes = [os.environ[name] for name in _CUDA_HOMES if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    candidates = [str(Path(home) / "bin" / "nvcc") for home in homes[:1]]
    candidates += [on_path] if on_path else []
    candidates.append("/usr/local/cuda/bin/nvcc")
    for path in candidates:
        release = re.search(r"release (\d+\.\d+)", _output_of([path, "--version"]))
        if release:
            return Nvcc(path, release[1])
    return None


def toolkit_folders(nvcc: Nvcc) -> list[Path]:
    """Folders that may be the toolkit's root, best first: `nvcc` may be a script elsewhere."""
    named = [os.environ[name] for name in _CUDA_HOMES if os.environ.get(name)]
    real = Path(nvcc.path).resolve().parent.parent
    folders = [*map(Path, named), real, Path(nvcc.path).parent.parent, Path("/usr/local/cuda")]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def program_version(name: str) -> str | None:
    """The first line that a program prints with `--version`, `None` where it is not there."""
    path = shutil.which(name)
    if path is None:
        return None
    lines = _output_of([path, "--version"]).strip().splitlines()
    return lines[0] if lines else path


def driver_version() -> str | None:
    """The version of the NVIDIA driver, `None` without one."""
    lines = _output_of(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    ).splitlines()
    if lines and re.fullmatch(r"[\d.]+", lines[0].strip()):
        return lines[0].strip()
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def flashinfer_cache() -> Path:
    """The folder below which FlashInfer compiles, whether it exists or not."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    return (Path(base) if base else Path.home()) / ".cache" / "flashinfer"


def cache_folders(cache: Path) -> list[CacheFolder]:
    """What is compiled below FlashInfer's cache, by version and architectures."""
    folders = []
    for built in sorted(cache.glob("*/*/cached_ops")):
        names = sorted(path.parent.name for path in built.glob("*/build.ninja"))
        done = tuple(name for name in names if (built / name / f"{name}.so").exists())
        unfinished = tuple(name for name in names if name not in done)
        folders.append(CacheFolder(str(built), done, unfinished))
    return folders


def _output_of(command: list[str]) -> str:
    """What a command prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def family_words(name: str) -> str:
    """A kernel family's name in words; names of other kinds stay as they are.

    Example:
        >>> family_words(
        ...     "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
        ...     "head_dim_qk_64_head_dim_vo_64_posenc_0_use_swa_True_use_logits_cap_False_"
        ...     "f16qk_False_sm90"
        ... )
        'fa3 bf16 head_dim 64, window'
    """
    found = _FAMILY.fullmatch(name)
    if found is None:
        return name
    words = f"{'fa3' if found['sm90'] else 'fa2'} {found['dtype']} head_dim {found['head_dim']}"
    words += ", window" if found["window"] == "True" else ""
    words += ", soft cap" if found["soft_cap"] == "True" else ""
    return words + (f" ({found['kind']})" if found["kind"] else "")

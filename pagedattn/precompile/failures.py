"""The first real error in a build's output, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ERRORS = re.compile(
    r"\berror\s*(?:\w+\s*)?:|\bfatal\s*:|cannot find -l|(?:command )?not found$|No such file|"
    r"died due to signal|^Killed|No space left|annot allocate memory|Permission denied|"
    r"^\w*(?:\.\w+)*(?:Error|Exception)\b"
)
_COMMANDS = re.compile(r"^\[\d+/\d+\]|^FAILED:|^ninja: build stopped|-gencode=| -o /|^\s*File \"")
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s:/'\"]+/)+(?=[^\s/])")

_HINTS = (
    (
        r"died due to signal 9|Killed|annot allocate memory|out of memory|memory exhausted",
        "out of memory: a compiler takes some 4 GB; give --jobs 1",
    ),
    (r"No space left", "the disk is full: FLASHINFER_WORKSPACE_BASE sets where kernels go"),
    (
        r"curand\w*\.h",
        "a header is missing: pip install nvidia-curand, or install the whole toolkit",
    ),
    (r"(?:cuda|cublas|cusparse|nv)\w*\.h", "a header is missing: install the whole CUDA toolkit"),
    (r"Python\.h", "a header is missing: apt-get install python3-dev"),
    (r"tvm|dlpack", "a package is missing: pip install apache-tvm-ffi"),
    (r"-lcudart", "a library is missing: install the CUDA toolkit's runtime, or set CUDA_HOME"),
    (r"-lcuda\b", "a library is missing: the NVIDIA driver's, or lib64/stubs of the CUDA toolkit"),
    (r"-l\w+", "a library is missing: install the package that has it"),
    (r"unsupported (?:GNU|clang) version", "nvcc refuses this compiler: set CXX to an older one"),
    (
        r"[Uu]nsupported gpu architecture",
        "this nvcc does not know the --arch: take a newer toolkit",
    ),
    (r"\bninja\b", "a compiler is missing: pip install ninja"),
    (r"\bnvcc\b", "a compiler is missing: install the CUDA toolkit, or set CUDA_HOME to it"),
    (r"\b(?:c\+\+|g\+\+|gcc)(?!\w)", "a compiler is missing: apt-get install g++"),
    (r"No module named '([\w]+)'", "a package is missing: pip install {}"),
    (r"\.(?:h|hpp|cuh)\b.*No such file", "a header is missing: install the package that has it"),
    (r"Permission denied", "not allowed: FLASHINFER_WORKSPACE_BASE sets where kernels go"),
)


@dataclass(frozen=True)
class Failure:
    """Why a build failed.

    Attributes:
        error: The first real error line, without folders.
        hint: What to do about it; empty where nothing is known.
    """

    error: str
    hint: str


def failure_in(lines: Sequence[str], returncode: int) -> Failure:
    """Find the first line that is an error of a compiler, a linker or Python.

    Args:
        lines: All that a build printed.
        returncode: Of the process, for a build that printed no error.
    """
    for line in lines:
        if _ERRORS.search(line) and not _COMMANDS.search(line):
            return Failure(_FOLDERS.sub("", line.strip())[:300], _hint(line))
    if returncode < 0:
        error = f"the build was ended by signal {-returncode}"
        return Failure(error, _HINTS[0][1] if returncode == -9 else "")
    return Failure(f"the build ended with exit code {returncode} and named no error", "")


def _hint(line: str) -> str:
    for pattern, hint in _HINTS:
        found = re.search(pattern, line)
        if found:
            return hint.format(*found.groups())
    return ""

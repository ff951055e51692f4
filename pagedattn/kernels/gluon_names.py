"""Gluon under one set of names, and what is missing where it cannot be used.

Gluon is experimental: it renames things between releases. This module alone knows the differences
between Triton 3.6 and 3.9; it imports where Gluon is missing or differs, and then says so.
"""

import importlib
from types import ModuleType
from typing import Any

_LANGUAGE = "triton.experimental.gluon.language"
_AMPERE = "triton.experimental.gluon.language.nvidia.ampere.async_copy"
_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
# module -> what `hopper.py` and the files of its parts use of it
_USED = {
    "triton.experimental.gluon": ("jit",),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
    _LANGUAGE: (
        "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout",
        "BlockedLayout", "allocate_shared_memory", "convert_layout", "warp_specialize",
    ),
    _HOPPER: ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
    _AMPERE: ("commit_group", "wait_group"),
    f"{_HOPPER}.mbarrier": ("MBarrierLayout", "arrive", "expect", "init", "wait"),
}  # fmt: skip
_COPY_NAMES = ("async_load", "async_copy_global_to_shared")
# module -> names of one thing, the newest first: Triton 3.9's and those before
_RENAMED = {
    f"{_HOPPER}.tma": _COPY_NAMES,
    _AMPERE: _COPY_NAMES,
    _LANGUAGE: ("barrier", "thread_barrier"),
}


def _find(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _missing_names() -> list[str]:
    missing = []
    for module_name, names in _USED.items():
        module = _find(module_name)
        if module is None:
            missing.append(module_name)
        else:
            missing += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
    for module_name, names in _RENAMED.items():
        if not any(hasattr(_find(module_name), name) for name in names):
            missing.append(f"{module_name}.{names[0]}")
    return missing


MISSING = tuple(_missing_names())
"""Names that this Triton's Gluon lacks; empty where `hopper.py` can be imported."""


def _newest(module_name: str) -> Any:
    """What is found by the newest name; the old one may be left, to say that it is old."""
    module = _find(module_name)
    return next(getattr(module, name) for name in _RENAMED[module_name] if hasattr(module, name))


if not MISSING:
    async_copy = _find(_AMPERE)
    copy_box, copy_rows, sync_threads = map(_newest, _RENAMED)

"""Gluon under one set of names, and what is missing where it cannot be used.

Gluon is experimental: it renames things between releases. This module alone knows the differences
between Triton 3.6 and 3.9; it imports where Gluon is missing or differs, and then says so.
"""

import importlib
from types import ModuleType

_LANGUAGE = "triton.experimental.gluon.language"
_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
# module -> what `long_hopper.py` and the files of its parts use of it
_USED = {
    "triton.experimental.gluon": ("jit",),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
    _LANGUAGE: (
        "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout",
        "BlockedLayout", "allocate_shared_memory", "convert_layout", "warp_specialize",
    ),
    _HOPPER: ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
    f"{_HOPPER}.mbarrier": ("MBarrierLayout", "arrive", "expect", "init", "wait"),
}  # fmt: skip
_COPY_NAMES = ("async_load", "async_copy_global_to_shared")  # since Triton 3.9; before


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
    tma = _find(f"{_HOPPER}.tma")
    if not any(hasattr(tma, name) for name in _COPY_NAMES):
        missing.append(f"{_HOPPER}.tma.{_COPY_NAMES[0]}")
    return missing


MISSING = tuple(_missing_names())
"""Names that this Triton's Gluon lacks; empty where `long_hopper.py` can be imported."""

if not MISSING:
    _tma = _find(f"{_HOPPER}.tma")
    copy_box = _tma.async_load if hasattr(_tma, "async_load") else _tma.async_copy_global_to_shared

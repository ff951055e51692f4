"""The one place that imports FlashInfer, and what is known of the installed version."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

Version = tuple[int, ...]


def load_flashinfer() -> Any:
    """Import FlashInfer, on first use only: it is heavy, and some versions need a GPU to import."""
    return importlib.import_module("flashinfer")


def flashinfer_version(library: Any) -> Version:
    """The three numbers of a FlashInfer module's version; what it cannot read counts as 0.

    Example:
        >>> from types import SimpleNamespace
        >>> flashinfer_version(SimpleNamespace(__version__="0.6.18.post1"))
        (0, 6, 18)
    """
    numbers = [0, 0, 0]
    for place, part in enumerate(str(library.__version__).split(".")[:3]):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers[place] = int(digits or 0)
    return tuple(numbers)


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of the installed version has a parameter of this name."""
    return name in inspect.signature(function).parameters


def check_plan_options(wrapper: Any, options: dict[str, object], ours: frozenset[str]) -> None:
    """Refuse options that FlashInfer's plan does not know, or that our wrapper sets itself.

    Args:
        wrapper: A FlashInfer wrapper.
        options: What a caller wants handed to its plan by name.
        ours: Names of FlashInfer's plan that our wrapper fills in.

    Raises:
        TypeError: An option is unknown to this version, or is ours.
    """
    if not options:
        return
    names = inspect.signature(wrapper.plan).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
        names = inspect.signature(wrapper._plan_impl).parameters  # what such a plan hands them to
    known = {name for name, p in names.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL}
    known -= ours | {"self"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"plan() got unknown options {unknown}, expected some of {sorted(known)}")

"""The one place that imports FlashInfer, and what is known of the installed version."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

Version = tuple[int, ...]


def load_flashinfer() -> Any:
    """Import FlashInfer, on first use only: it is heavy, and some versions need a GPU to import."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            raise
        message = 'flashinfer is not installed: pip install "pagedattn[flashinfer]"'
        raise ModuleNotFoundError(message, name="flashinfer") from None


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


def plan_options(wrapper: Any) -> frozenset[str]:
    """Names of what a FlashInfer wrapper's plan takes."""
    parameters = inspect.signature(wrapper.plan).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        parameters = inspect.signature(wrapper._plan_impl).parameters  # which gets all of them
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, p in parameters.items() if p.kind in named)

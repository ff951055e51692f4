"""`run` as registered operators, so that a compiled model keeps it whole.

A compiler sees an operator that maps tensors to new tensors and nothing of what is inside; `plan`
stays outside, on the host. An operator takes tensors and numbers only, so a wrapper has a number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Runnable(Protocol):
    """What an operator calls."""

    def run_checked(
        self, q: Tensor, kv_cache: Sequence[Tensor], out: Tensor, lse: Tensor | None
    ) -> None:
        """Check the tensors, then write `out` and `lse`."""
        ...

    def run_into(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse` of tensors that have been checked already."""
        ...


# Operators are global, and so is the one table that they find wrappers by; it keeps none alive.
_WRAPPERS: weakref.WeakValueDictionary[int, Runnable] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(wrapper: Runnable) -> int:
    """Give a wrapper the number by which operators find it."""
    number = next(_NUMBERS)
    _WRAPPERS[number] = wrapper
    return number


@torch.library.custom_op("pagedattn::flashinfer_run", mutates_args=())
def flashinfer_run(q: Tensor, kv_cache: Sequence[Tensor], wrapper: int) -> Tensor:
    """Attention of the step that a wrapper has planned.

    Args:
        q: As for `PagedWrapper.run`.
        kv_cache: One layer, as one tensor or as keys and values.
        wrapper: Its number.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _WRAPPERS[wrapper].run_checked(q, kv_cache, out, None)
    return out


@flashinfer_run.register_fake
def _(q: Tensor, kv_cache: Sequence[Tensor], wrapper: int) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("pagedattn::flashinfer_run_return_lse", mutates_args=())
def flashinfer_run_return_lse(
    q: Tensor, kv_cache: Sequence[Tensor], wrapper: int
) -> tuple[Tensor, Tensor]:
    """Attention and its natural-log LSE; arguments as for `flashinfer_run`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _WRAPPERS[wrapper].run_checked(q, kv_cache, out, lse)
    return out, lse


@flashinfer_run_return_lse.register_fake
def _(q: Tensor, kv_cache: Sequence[Tensor], wrapper: int) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@torch.library.custom_op("pagedattn::flashinfer_run_into", mutates_args=("out", "lse"))
def flashinfer_run_into(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None, wrapper: int
) -> None:
    """Write `out`, and `lse` where it is given, for the step that a wrapper has planned.

    Args:
        q: As for `PagedWrapper.run_into`.
        k_pages: Keys.
        v_pages: Values.
        out: Written.
        lse: Written.
        wrapper: Its number.
    """
    _WRAPPERS[wrapper].run_into(q, k_pages, v_pages, out, lse)


@flashinfer_run_into.register_fake
def _(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, lse: Tensor | None, wrapper: int
) -> None:
    return None

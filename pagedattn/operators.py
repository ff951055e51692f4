"""`run` as a registered operator, so that a compiled model keeps it whole.

A compiler sees an operator that writes its outputs and nothing of what is inside. `plan` stays
outside, on the host: what it made is looked up when the operator runs, so a compiled model follows
every later plan without being compiled again. An operator takes tensors and numbers only, so an
object with a plan has a number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from pagedattn.validation import KVCache


class Runnable(Protocol):
    """What an operator calls."""

    number: int
    """From `register`."""

    def run_checked(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Check the tensors, then write `out`, and `lse` where it is given."""
        ...


# Operators are global, and so is the one table that they find objects by; it keeps none alive.
_RUNNABLES: weakref.WeakValueDictionary[int, Runnable] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(runnable: Runnable) -> int:
    """Give an object the number by which operators find it."""
    number = next(_NUMBERS)
    _RUNNABLES[number] = runnable
    return number


def dispatch(
    runnable: Runnable, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None
) -> None:
    """Call `run_checked`, by the operator where a compiler looks on, else without its cost."""
    if torch.compiler.is_compiling():
        parts = [kv_cache] if isinstance(kv_cache, Tensor) else list(kv_cache)
        run_into(q, parts, out, lse, runnable.number)
    else:
        runnable.run_checked(q, kv_cache, out, lse)


@torch.library.custom_op("pagedattn::run_into", mutates_args=("out", "lse"))
def run_into(
    q: Tensor, kv_cache: Sequence[Tensor], out: Tensor, lse: Tensor | None, number: int
) -> None:
    """Write `out`, and `lse` where it is given, for the step that was planned last.

    Args:
        q: As for `PagedAttention.run`.
        kv_cache: One layer, as a list of one tensor, or of keys and values.
        out: As `q`, written.
        lse: f32[tokens, num_qo_heads], written.
        number: Of the object that was planned.
    """
    layer = kv_cache[0] if len(kv_cache) == 1 else tuple(kv_cache)
    _RUNNABLES[number].run_checked(q, cast(KVCache, layer), out, lse)  # its length is checked there


@run_into.register_fake
def _(q: Tensor, kv_cache: Sequence[Tensor], out: Tensor, lse: Tensor | None, number: int) -> None:
    return None

"""`--target mypkg.attn:paged_attention`: anybody's function, checked as backends are.

The function is called with tensors on the device under test:

    def paged_attention(
        q,           # dtype[tokens, num_qo_heads, head_dim]
        k_pages,     # dtype[pages, page_size, num_kv_heads, head_dim], contiguous
        v_pages,     # as k_pages
        kv_indptr,   # i32[batch + 1]  where each request's pages begin in kv_indices
        kv_indices,  # i32[kv_indptr[-1]]  physical page ids
        kv_lens,     # i32[batch]  keys of each request, this step's new tokens included
        qo_indptr,   # i32[batch + 1]  where each request's queries begin in q
        *, causal, window_left, sm_scale, logits_soft_cap,
    ):
        return out   # as q; or (out, lse): lse f32[tokens, num_qo_heads], natural logarithm

What the parameters mean is written in `pagedattn/attention.py`; `sm_scale` is always a number. What
a function cannot compute it declines with `NotImplementedError`: such steps are counted and shown,
and never called a pass. Where it returns no LSE, that of float64 stands in, in float64.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import FLOAT32_SUMS
from pagedattn.checking.step import Attend, Step
from pagedattn.checking.subject import Subject
from pagedattn.checking.truth import truth_of, truth_on_device

Target = Callable[..., Any]


def target_subject(name: str, *, live: bool = False) -> Subject:
    """A function as a subject.

    Args:
        name: "module:function"; modules of the current folder are found.
        live: For many steps: float64 answers are computed on the step's device.

    Raises:
        ValueError: There is no such module, it has no such function, or that takes other arguments.
    """
    target = load_target(name)
    _check_signature(target, name)
    truth = partial(truth_on_device if live else truth_of, arithmetic=FLOAT32_SUMS)
    return Subject(
        name=name,
        option=f"--target {name}",
        compared_with="float64 reference",
        backend=None,
        attend=attend_with_target(target, name),
        arithmetic=FLOAT32_SUMS,
        truth=truth,
        may_decline=True,
        same_bits=False,
    )


def load_target(name: str) -> Target:
    """Import a function by "module:function"."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"target {name!r} must be module:function, as in mypkg.attn:attention")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a function in the current folder is found
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except Exception as error:  # whatever an import of foreign code may raise
        raise ValueError(f"target {name!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"target {name!r} is {type(found).__name__}, expected a function")
    target: Target = found
    return target


def _check_signature(target: Target, name: str) -> None:
    """Require that a function takes what `attend_with_target` gives, where Python can tell."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*range(7), causal=0, window_left=0, sm_scale=0, logits_soft_cap=0)
    except TypeError as error:
        raise ValueError(
            f"target {name!r} takes {signature}, and not what it is given: {error}; the arguments "
            "are listed by `pagedattn check --help`"
        ) from None


def attend_with_target(target: Target, name: str) -> Attend:
    """Compute steps with a function; what it returns is checked for shape, dtype and device."""

    def attend(step: Step) -> AttentionOutput:
        spec, device = step.spec, step.q.device
        table = step.page_table.to(device)
        k_pages, v_pages = (pages.contiguous() for pages in step.kv_cache.unbind(1))
        returned = target(
            step.q.clone(),
            k_pages,
            v_pages,
            table.kv_indptr,
            table.kv_indices,
            table.kv_lens,
            step.qo_indptr.to(device),
            causal=spec.causal,
            window_left=spec.window_left,
            sm_scale=spec.scale,
            logits_soft_cap=spec.logits_soft_cap,
        )
        out, lse = returned if isinstance(returned, tuple) else (returned, None)
        _check(f"{name}: out", out, step.q.shape, spec.dtype, device)
        if lse is None:
            return AttentionOutput(out, truth_on_device(step, FLOAT32_SUMS).expected.lse)
        _check(f"{name}: lse", lse, step.q.shape[:2], torch.float32, device)
        return AttentionOutput(out, lse)

    return attend


def _check(
    name: str, got: object, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    """Require a tensor of this shape, dtype and device."""
    expected = f"{dtype}{list(shape)} on {device}"
    if not isinstance(got, Tensor):
        raise ValueError(f"{name} is a {type(got).__name__}, expected {expected}")
    if got.shape != shape or got.dtype != dtype or got.device != device:
        raise ValueError(
            f"{name} is {got.dtype}{list(got.shape)} on {got.device}, expected {expected}"
        )

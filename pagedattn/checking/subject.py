"""`Subject`: what is checked, be it a backend of ours or anybody's function.

Everything that the properties and the check command must know of it: how to compute a step, how far
from float64 it may be, and what it cannot compute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import torch

from pagedattn.attention import AttentionOutput, PagedAttention
from pagedattn.backends import unsupported_reasons
from pagedattn.checking.bound import Arithmetic
from pagedattn.checking.compare import arithmetic_of, compared_with
from pagedattn.checking.step import Attend, Step, attend_with, run_hostile
from pagedattn.checking.truth import Truth, truth_of, truth_on_device
from pagedattn.spec import AttentionSpec
from pagedattn.toolchain import FLASHINFER_PACKAGE, package_version

MAX_LIVE_OBJECTS = 12
"""Objects of one backend that are kept; each may hold a workspace of a hundred megabytes."""


@dataclass(frozen=True, eq=False)
class Subject:
    """Something that computes attention of a step.

    Attributes:
        name: For titles and file names: "triton", "mypkg.attn:paged_attention".
        option: What names it on a command line: "--backend triton".
        compared_with: What its answers are compared with, in words.
        backend: Its name where it is a backend of ours; `None`: a function.
        attend: How it computes a step.
        arithmetic: How it computes, where that decides what rounding can do.
        truth: What is right for a step, and within what.
        may_decline: Whether a `NotImplementedError` means "not supported" and not "wrong".
        no_low_scores: Why it cannot compute scores that are all below -5e4, a defect that is known;
            `None`: it can.
        same_bits: Whether the same work must give the same bits, and not only close values.
    """

    name: str
    option: str
    compared_with: str
    backend: str | None
    attend: Attend
    arithmetic: Arithmetic
    truth: Callable[[Step], Truth]
    may_decline: bool = False
    same_bits: bool = True
    no_low_scores: str | None = None

    def unsupported_reasons(
        self, spec: AttentionSpec, page_size: int, device: torch.device
    ) -> list[str]:
        """Why it cannot compute this, as far as that is known before it is asked."""
        if self.backend is None:
            return []
        return unsupported_reasons(self.backend, spec, page_size, device)


def backend_subject(backend: str, *, live: bool = False) -> Subject:
    """A backend as a subject.

    Args:
        backend: Its name.
        live: For many steps: objects are reused from step to step, and float64 answers are computed
            on the step's device.
    """
    arithmetic = arithmetic_of(backend)
    dense = backend == "reference"
    return Subject(
        name=backend,
        option=f"--backend {backend}",
        compared_with=compared_with(backend),
        backend=backend,
        attend=LiveObjects(backend) if live else attend_with(backend),
        arithmetic=arithmetic,
        truth=partial(truth_on_device, arithmetic=arithmetic)
        if live
        else partial(truth_of, arithmetic=arithmetic, dense=dense),
        no_low_scores=why_no_low_scores(backend),
    )


@cache
def why_no_low_scores(backend: str) -> str | None:
    """Why a backend cannot compute scores that are all below -5e4; `None`: it can."""
    installed = package_version(FLASHINFER_PACKAGE) if backend == "flashinfer" else None
    if installed is None:
        return None
    # not before it is known whether Triton is to interpret: these import it
    from pagedattn.backends.flashinfer.defects import FA2_LOW_SCORES, Call
    from pagedattn.backends.flashinfer.library import flashinfer_version

    version = flashinfer_version(SimpleNamespace(__version__=installed))
    hit = FA2_LOW_SCORES.hits(Call(version, "fa2", causal=True, window_left=-1))
    return f"{FA2_LOW_SCORES.name} ({FA2_LOW_SCORES.report})" if hit else None


class LiveObjects:
    """Computes steps with objects that live on, as a server's do: one for each layer kind.

    An object's earlier steps are what a stale plan would show.
    """

    def __init__(self, backend: str, max_objects: int = MAX_LIVE_OBJECTS) -> None:
        self.backend = backend
        self.max_objects = max_objects
        self._objects: OrderedDict[tuple[AttentionSpec, int, torch.device], PagedAttention] = (
            OrderedDict()
        )

    def __call__(self, step: Step) -> AttentionOutput:
        """Plan and run the step on the object of its layer kind."""
        key = (step.spec, step.page_size, step.q.device)
        attn = self._objects.pop(key, None)
        if attn is None:
            attn = PagedAttention(
                step.spec, step.page_size, backend=self.backend, device=step.q.device
            )
        self._objects[key] = attn
        if len(self._objects) > self.max_objects:
            self._objects.popitem(last=False)
        return run_hostile(attn, step)

"""Which FlashInfer kernel runs a step and why, what it needs, and what is known against it."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.backends.flashinfer.defects import DEFECTS, Call
from pagedattn.backends.flashinfer.kernel_choice import (
    FA3_TILE,
    graph_prefill_kernel,
    prefill_kernel,
)
from pagedattn.backends.flashinfer.library import Version
from pagedattn.backends.flashinfer.need import (
    DeviceFacts,
    eager_float_bytes,
)
from pagedattn.backends.flashinfer.need import capacity_needs as needs_of_wrappers
from pagedattn.capacity import Capacity
from pagedattn.explain.answers import dotted, has_fa3_kernel
from pagedattn.spec import AttentionSpec


@dataclass(frozen=True)
class Choice:
    """What steps of one kind run on.

    Attributes:
        steps: The kind of steps, in words.
        wrapper: "decode" or "prefill".
        kernel: "fa2" or "fa3".
        why: The reason.
    """

    steps: str
    wrapper: str
    kernel: str
    why: str


@dataclass(frozen=True)
class Need:
    """Workspaces of one wrapper for one bucket.

    Attributes:
        bucket: The capacity in words, or "eager".
        wrapper: "decode", "prefill", or "all" for the eager ones.
        kernel: Its kernel.
        float_bytes: Of the float workspace, which all wrappers of a bucket share.
        int_bytes: Of its integer workspace; `None`: FlashInfer's own 8 MiB, which grows.
    """

    bucket: str
    wrapper: str
    kernel: str
    float_bytes: int
    int_bytes: int | None


@dataclass(frozen=True)
class KnownDefect:
    """A wrong answer of FlashInfer's that the spec could meet.

    Attributes:
        name: Which.
        instead: What is done about it.
        report: Where it is reported.
        first_right: The first version without it, `None`: none yet.
    """

    name: str
    instead: str
    report: str
    first_right: str | None


def eager_choices(spec: AttentionSpec, facts: DeviceFacts) -> list[Choice]:
    """What steps run on without a capacity, by what they hold."""
    short, long = (
        prefill_kernel(
            num_tokens,
            1,
            fa3=has_fa3_kernel(spec, facts),
            window_left=spec.window_left,
        )
        for num_tokens in (FA3_TILE - 1, FA3_TILE)
    )
    one_token = Choice(
        "one query token a request",
        "decode",
        "fa2",
        "measured: fa3 is 4 to 8 times slower on one-token rows",
    )
    if short == long:
        return [one_token, Choice("more query tokens", "prefill", long, _no_fa3(spec, facts))]
    return [
        one_token,
        Choice(
            f"a mean below {FA3_TILE} query tokens a request",
            "prefill",
            short,
            f"fa3 gives every head a tile of {FA3_TILE} tokens, which short rows waste",
        ),
        Choice(
            f"a mean of {FA3_TILE} query tokens a request or more",
            "prefill",
            long,
            "measured: 1.5 to 1.7 times faster on prompts",
        ),
    ]


def capacity_needs(
    spec: AttentionSpec, capacity: Capacity, facts: DeviceFacts, version: Version
) -> list[Need]:
    """What `PagedAttention(..., backend="flashinfer", capacity=capacity)` reserves, by wrapper.

    As `pagedattn.backends.flashinfer.workspace_need`, wrapper by wrapper and for any version.
    """
    batch_size, num_tokens = capacity.max_batch_size, capacity.max_tokens
    bucket = f"{batch_size} requests, {num_tokens} tokens"
    kernel = graph_prefill_kernel(
        num_tokens,
        batch_size,
        fa3=has_fa3_kernel(spec, facts),
        window_left=spec.window_left,
    )
    decode, prefill = needs_of_wrappers(spec, capacity, facts, version)
    needs = [] if decode is None else [Need(bucket, "decode", "fa2", *decode)]
    return [*needs, Need(bucket, "prefill", kernel, *prefill)]


def eager_need(spec: AttentionSpec, facts: DeviceFacts) -> Need:
    """The most that plans without a capacity reserve."""
    return Need("no capacity", "all", "fa2", eager_float_bytes(spec, facts), None)


def known_defects(spec: AttentionSpec, facts: DeviceFacts, version: Version) -> list[KnownDefect]:
    """Which of FlashInfer's wrong answers its kernels here would give this spec."""
    kernels = ["fa2", "fa3"] if has_fa3_kernel(spec, facts) else ["fa2"]
    calls = [Call(version, kernel, spec.causal, spec.window_left) for kernel in kernels]
    return [
        KnownDefect(
            defect.name,
            defect.instead,
            defect.report,
            None if defect.first_right is None else dotted(defect.first_right),
        )
        for defect in DEFECTS
        if any(map(defect.hits, calls))
    ]


def _no_fa3(spec: AttentionSpec, facts: DeviceFacts) -> str:
    if facts.compute_capability[0] != 9:
        return "fa3 needs compute capability 9.0"
    if not has_fa3_kernel(spec, facts):
        return f"fa3 does not compute head_dim={spec.head_dim}"
    return "fa3 lets NaN through from slots left of a window"

"""Profiles: how much a check draws, and which step belongs to a mode and a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedattn.checking.batch import Batch
from pagedattn.checking.drawing import (
    RandomChoices,
    SpecLimits,
    StepLimits,
    draw_batch,
    draw_batch_of,
)
from pagedattn.checking.kinds import LayerKind, kind_of_seed
from pagedattn.checking.properties.agreement import AGREEMENT
from pagedattn.checking.properties.graph import GRAPH_REPLAY
from pagedattn.checking.subject import why_no_low_scores

# On a CPU kernels are interpreted: properties, which compute a step several times, draw small ones.
SMALL_SPECS = SpecLimits(max_qo_heads=6, max_window_left=100)
SMALL_STEPS = StepLimits(max_batch_size=3, max_kv_len=100, max_work=3)
GPU_STEPS = StepLimits(max_batch_size=6, max_kv_len=600, max_work=60)
LARGE_GPU_STEPS = StepLimits(max_batch_size=8, max_kv_len=4000, max_work=600)
ONE_LARGE_OF = 16


@dataclass(frozen=True)
class Profile:
    """How much is drawn.

    Args:
        name: On the command line.
        agreement: Steps for each subject and mode that are compared with float64.
        others: Steps for each subject and other property.
        num_kinds: Layer kinds on a GPU.
        num_families: FlashInfer's families among them.
        live: Objects live on from step to step, and float64 answers are made on the device.
    """

    name: str
    agreement: int
    others: int
    num_kinds: int
    num_families: int
    live: bool = False


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", agreement=6, others=1, num_kinds=6, num_families=3),
        Profile("standard", agreement=60, others=20, num_kinds=16, num_families=7),
        Profile("deep", agreement=600, others=200, num_kinds=48, num_families=7, live=True),
    )
}


def kind_of_task(
    profile: Profile, subject: str, prop: str, seed: int, device: torch.device
) -> LayerKind | None:
    """The layer kind of a step, where it is one of a few; `None`: each step has its own."""
    if device.type != "cuda" and not profile.live:
        return None
    num_kinds = profile.num_kinds
    if prop not in (AGREEMENT.name, GRAPH_REPLAY.name):
        # the others compute a kind's steps as other kinds too, each of which is compiled
        num_kinds = max(num_kinds // 4, profile.num_families)
    return kind_of_seed(subject, seed, num_kinds, profile.num_families)


def batch_of_task(
    profile: Profile, subject: str, prop: str, mode: str, seed: int, device: torch.device
) -> Batch:
    """The step that a check draws from a seed.

    Args:
        profile: How it is drawn.
        subject: For whom; FlashInfer has layer kinds of its own.
        prop: The property that it is for.
        mode: "decode", "prefill" or "mixed".
        seed: Of the step.
        device: Where it will be computed; steps are larger on a GPU.
    """
    kind = kind_of_task(profile, subject, prop, seed, device)
    if kind is None:
        return batch_of_seed(mode, seed) if prop == AGREEMENT.name else small_batch(mode, seed)
    choices = RandomChoices(f"{profile.name} {mode} {seed}")
    limits = SMALL_STEPS
    if device.type == "cuda":
        limits = LARGE_GPU_STEPS if choices.integer(1, ONE_LARGE_OF) == 1 else GPU_STEPS
    batch = draw_batch_of(choices, mode, kind.spec, kind.page_size, limits)
    if batch.values == "low_scores" and why_no_low_scores(subject) is not None:
        return replace(batch, values="normal")
    return batch


def batch_of_seed(mode: str, seed: int) -> Batch:
    """The step that is compared with float64 on a CPU."""
    return draw_batch(RandomChoices(f"{mode} {seed}"), mode)


def small_batch(mode: str, seed: int) -> Batch:
    """The step that other properties are tried on on a CPU."""
    return draw_batch(RandomChoices(f"{mode} {seed}"), mode, SMALL_SPECS, SMALL_STEPS)

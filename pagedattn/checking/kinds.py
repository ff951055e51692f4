"""Layer kinds for a GPU, where each is a kernel to compile: few, the same for many steps.

Triton compiles in a second or two for each set of constants. FlashInfer compiles a family of
kernels for each (dtype, head_dim, window or not, cap or not) in about 200 seconds of a core, so the
families are a list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedattn.checking.drawing import (
    Choices,
    RandomChoices,
    SpecLimits,
    draw_page_size,
    draw_spec,
    draw_window,
)
from pagedattn.spec import AttentionSpec

BF16, FP16 = torch.bfloat16, torch.float16
MAX_QO_HEADS = 48
MAX_WINDOW_LEFT = 2000
SOFT_CAPS = (1.0, 30.0)
SEEDS_OF_KINDS = 100_000
"""Seeds that share their kinds; the next as many have kinds of their own."""


class Family(NamedTuple):
    """What FlashInfer compiles together."""

    dtype: torch.dtype
    head_dim: int
    window: bool = False
    soft_cap: bool = False


FLASHINFER_FAMILIES = (
    Family(BF16, 64),
    Family(BF16, 64, window=True),
    Family(BF16, 64, soft_cap=True),
    Family(BF16, 128),
    Family(BF16, 128, window=True),
    Family(BF16, 256),
    Family(FP16, 64),
)
"""All that is drawn of FlashInfer's; a window and a cap not together."""
TRITON_LIMITS = SpecLimits(
    MAX_QO_HEADS, (64, 128, 256, 40), (BF16, FP16, torch.float32), MAX_WINDOW_LEFT
)


class LayerKind(NamedTuple):
    """What is fixed when an object is built."""

    spec: AttentionSpec
    page_size: int


def kind_of_seed(subject: str, seed: int, num_kinds: int, num_families: int) -> LayerKind:
    """The layer kind of a seed's step: one of a few that the next `num_kinds` seeds take in turn.

    Args:
        subject: Its name; "flashinfer" has families.
        seed: Of the step.
        num_kinds: Kinds that are in use.
        num_families: Families of FlashInfer's that are in use, the first of the list.
    """
    number = seed % num_kinds
    choices = RandomChoices(f"kind {subject} {seed // SEEDS_OF_KINDS} {number}")
    page_size = draw_page_size(choices)
    limits = TRITON_LIMITS
    if subject == "flashinfer":
        family = FLASHINFER_FAMILIES[number % num_families]
        return LayerKind(_spec_of_family(choices, family, page_size), page_size)
    return LayerKind(draw_spec(choices, page_size, limits), page_size)


def _spec_of_family(choices: Choices, family: Family, page_size: int) -> AttentionSpec:
    limits = SpecLimits(MAX_QO_HEADS, (family.head_dim,), (family.dtype,), -1, 0.0)
    spec = draw_spec(choices, page_size, limits)
    window = draw_window(choices, page_size, max_window_left=MAX_WINDOW_LEFT)
    return AttentionSpec(
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim,
        dtype=spec.dtype,
        causal=spec.causal,
        window_left=max(window, 0) if family.window else -1,
        sm_scale=spec.sm_scale,
        logits_soft_cap=choices.one_of(SOFT_CAPS) if family.soft_cap else 0.0,
    )


def is_compiled(subject: str, spec: AttentionSpec) -> bool:
    """Whether a spec needs no family beyond the listed ones; always so but for FlashInfer."""
    if subject != "flashinfer":
        return True
    family = Family(spec.dtype, spec.head_dim, spec.window_left >= 0, spec.logits_soft_cap > 0)
    return family in FLASHINFER_FAMILIES

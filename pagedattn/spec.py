"""What is fixed for one kind of attention layer.

`AttentionSpec` knows shapes, dtypes and options of the mathematics. It knows nothing of batches,
pages or backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that queries, keys, values and outputs may have."""


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a layer's attention that does not change from step to step.

    Args:
        num_qo_heads: Query (and output) heads. A multiple of `num_kv_heads`; query head `h` reads
            KV head `h // (num_qo_heads // num_kv_heads)`.
        num_kv_heads: Key and value heads.
        head_dim: Elements of one head, of keys and of values.
        dtype: Of queries, keys, values and output: bfloat16, float16 or float32.
        causal: Key `j` is visible to the query at position `p` iff `j <= p`.
        window_left: `w >= 0`: additionally `j >= p - w`, so a causal query sees `w + 1` keys, its
            own included. `-1`: no bound. Without `causal` the right side stays open.
        sm_scale: Factor of the scores; `None` means `head_dim ** -0.5`.
        logits_soft_cap: `c > 0` replaces a scaled score `s` by `c * tanh(s / c)`, before the mask.
            `0.0`: off.

    Raises:
        ValueError: An argument is out of its range; the message names it.

    Example:
        >>> spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=64)
        >>> spec.group_size, spec.scale
        (4, 0.125)
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window_left: int = -1
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads={self.num_qo_heads} must be divisible by "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {self.dtype!r}")
        if self.window_left < -1:
            raise ValueError(
                f"window_left must be -1 (unbounded) or at least 0, got {self.window_left}"
            )
        if self.sm_scale is not None and not (math.isfinite(self.sm_scale) and self.sm_scale > 0):
            raise ValueError(f"sm_scale must be finite and above 0, got {self.sm_scale}")
        if not (math.isfinite(self.logits_soft_cap) and self.logits_soft_cap >= 0):
            raise ValueError(
                f"logits_soft_cap must be 0 (off) or finite and above 0, got {self.logits_soft_cap}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The factor of the scores, `sm_scale` or its default."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

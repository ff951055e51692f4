"""What a spec and its tiles fix of the kernels' arguments, so that a launch adds a step's alone."""

from __future__ import annotations

import math

import triton

from pagedattn.backends.triton.tiles import KernelTiles, Tiles, padded_head_dim
from pagedattn.spec import AttentionSpec

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30  # a window that no context reaches, small enough to add to in 32 bits
PLAN_BLOCK = 512  # requests, tokens or page ids that one program plans at once
PLAN_WARPS = {False: 8, True: 16}  # by batch invariance: so that nothing spills


def blocks_of(count: int) -> int:
    """Programs that plan `count` tokens or page ids."""
    return -(-count // PLAN_BLOCK)


def kernel_constants(spec: AttentionSpec, page_size: int) -> dict[str, int | bool]:
    """Compile-time arguments that both attention kernels share."""
    return {
        "GROUP": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "D_PAD": padded_head_dim(spec.head_dim),
        "PAGE_SIZE": page_size,
        "CAUSAL": spec.causal,
        "HAS_WINDOW": spec.window_left >= 0,
        "SOFT_CAP": spec.logits_soft_cap > 0,
        "UPCAST": triton.knobs.runtime.interpret,
    }


def tile_constants(tiles: KernelTiles) -> dict[str, int | bool]:
    """Compile-time arguments of one kernel's tiles."""
    return {"ROWS": tiles.rows, "TILE": tiles.tile, "STAGES": tiles.num_stages}


def plan_numbers(spec: AttentionSpec, page_size: int, tiles: Tiles) -> tuple[int, ...]:
    """The numbers of `build_schedule` after those of the step."""
    return (
        spec.num_kv_heads, spec.group_size, window_of(spec), page_size, tiles.short_chunks,
        tiles.max_short_rows, tiles.short.rows, tiles.short.tile, tiles.long.rows,
        tiles.min_chunk, tiles.min_piece, tiles.far_keys,
    )  # fmt: skip


def window_of(spec: AttentionSpec) -> int:
    """`window_left`, where no bound is a bound that no context reaches."""
    return spec.window_left if 0 <= spec.window_left < UNBOUNDED else UNBOUNDED


def score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """The two factors of `scale_scores`, with log2(e) folded in."""
    if spec.logits_soft_cap > 0:
        return spec.scale / spec.logits_soft_cap, spec.logits_soft_cap * LOG2_E
    return spec.scale * LOG2_E, 0.0

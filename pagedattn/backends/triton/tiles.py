"""Tile sizes and launch shapes, as data: a pure function of the spec and of a few device facts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedattn.capacity import Capacity
from pagedattn.spec import AttentionSpec

UNBOUNDED_ROWS = 1 << 30

BLOCK_ROWS = (16, 32, 64)
"""Heights of the short kernel's blocks.

Each block of a request reads all of its keys, and rows that are not there are multiplied too: so a
block is as high as the requests of a step need, and no higher. Raced on an NVIDIA H200, bf16, heads
of 128, 64 requests of 4k (µs, blocks of 16, 32, 64 rows, FlashInfer's fa2): 4 rows a request 261,
264, 351, 262; 32 rows 512, 273, 364, 282; 64 rows 997, 523, 362, 284.
"""

LONG_SHARE = 5 / 11
"""Of the programs, which begin with long queries where a step has both kinds: 60 of 132.

Raced on an NVIDIA H200, bf16, 32/8 heads of 128, in one launch (µs; 24, 48, 60, 72, 84 and 108
programs): 64 x 4k decode + 2 x 2k prompts 370, 347, 319, 391, 361, 380; 32 x 8k + 1 x 8k 1063,
1047, 1015, 1003, 998, 998; 256 x 2k + 1 x 512 543, 523, 520, 518, 516, 521; 128 x 8k + 4 x 1k at 8k
of context 1688, 1537, 1519, 1545, 1552, 1717.
"""

MAX_DRAFT, PROMPT = 8, 256
"""Tokens of a request that decodes, at most, and of a prompt that is worth a kernel.

A capacity for no more than the one a request, and without room for the other, is for decoding.
Captured launches serve every step: where long queries may be, one that has none takes up to 7 µs
longer on an NVIDIA H200, 58 for 51 at 1 x 32k. Where there are some and their kernel is left out,
512 tokens among 256 x 2k decodes take 33 µs more, 550 for 517."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice of tiles must know of a device."""

    num_sms: int
    interpreted: bool = False
    compute_capability: tuple[int, int] = (0, 0)
    missing_gluon: tuple[str, ...] = ()  # names that the installed Triton's Gluon lacks
    l2_bytes: int = 50 << 20


@dataclass(frozen=True)
class KernelTiles:
    """Launch shape of one attention kernel."""

    rows: int  # packed query rows of a block
    tile: int  # keys of a tile
    num_warps: int
    num_stages: int  # tiles whose loads are in flight, the current one included
    programs_per_sm: int


@dataclass(frozen=True)
class HopperTiles:
    """Launch shape of the Gluon kernel, whose blocks have 128 rows of long queries, 64 of short."""

    tile: int  # keys of a tile of long queries
    num_stages: int  # K tiles, and V tiles, in shared memory
    has_boxes: bool  # the copy engine can bring whole pages; else rows of long queries are gathered

    @property
    def short_tile(self) -> int:
        """Keys of a tile of short queries: each of two consumers has half of a ring."""
        return self.tile // 2


@dataclass(frozen=True)
class Tiles:
    """Every choice of one `TritonBackend`."""

    short: KernelTiles
    long: KernelTiles
    max_short_rows: int  # a request with more packed rows goes to the long kernel
    min_chunk: int  # tiles that a program has at least: below, the merge costs more than it gains
    min_piece: int  # tiles of a piece of a batch-invariant request of one row block, at least
    programs: int  # that are resident at once where an SM has one
    short_chunks: int  # of the line of short work; every KV head has a program for each
    long_share: int  # programs that begin with long queries where a launch has both kinds
    far_keys: int  # of a request: the K and V of more do not fit L2
    joint: bool = False  # short queries go with the long ones, in the Gluon kernel's launch

    @property
    def long_programs(self) -> int:
        """Grid of the long kernel."""
        return self.programs * self.long.programs_per_sm


def padded_head_dim(head_dim: int) -> int:
    """The power of two that the kernels compute with, at least what a tensor-core product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def highest_block(spec: AttentionSpec) -> int:
    """The highest block of the short kernel whose sums fit the registers."""
    if spec.dtype == torch.float32:
        return BLOCK_ROWS[0]
    return BLOCK_ROWS[1] if padded_head_dim(spec.head_dim) > 128 else BLOCK_ROWS[2]


def block_rows_of(spec: AttentionSpec, num_rows: int) -> int:
    """The height of blocks for requests of up to so many rows: the least that holds them.

    Example:
        >>> spec = AttentionSpec(32, 8, 128)
        >>> [block_rows_of(spec, rows) for rows in (4, 16, 17, 32, 64, 1000)]
        [16, 16, 32, 32, 64, 64]
    """
    highest = highest_block(spec)
    return next(rows for rows in BLOCK_ROWS if rows >= num_rows or rows == highest)


def choose_tiles(spec: AttentionSpec, facts: DeviceFacts, block_rows: int = BLOCK_ROWS[0]) -> Tiles:
    """Pick tiles so that the K and V buffers fit shared memory and the sums fit the registers.

    Args:
        spec: The kind of layer.
        facts: Of the device.
        block_rows: Of the short kernel's blocks, one of `BLOCK_ROWS`.
    """
    row_bytes = padded_head_dim(spec.head_dim) * spec.dtype.itemsize
    tile = max(16, min(128, 16384 // row_bytes))
    short = KernelTiles(rows=block_rows, tile=tile, num_warps=4, num_stages=3, programs_per_sm=2)
    if block_rows > BLOCK_ROWS[1]:  # what more than 32 keys weigh would not fit beside the sums
        short = replace(short, tile=32, num_stages=4)
    max_short_rows = 64
    if row_bytes <= 256:
        long = KernelTiles(rows=128, tile=64, num_warps=8, num_stages=3, programs_per_sm=1)
    else:
        long = KernelTiles(rows=128, tile=16, num_warps=8, num_stages=2, programs_per_sm=1)
    if spec.dtype == torch.float32:
        # full precision has no tensor cores: products are unrolled over registers, which only
        # narrow blocks fit, so every request takes the short kernel
        tile = max(16, min(32, 8192 // row_bytes))
        short = KernelTiles(rows=16, tile=tile, num_warps=8, num_stages=2, programs_per_sm=2)
        max_short_rows = UNBOUNDED_ROWS
    far_keys = facts.l2_bytes // (2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize)
    if facts.interpreted:
        # a handful of programs, one after another, that still split short contexts
        long = KernelTiles(rows=128, tile=64, num_warps=4, num_stages=1, programs_per_sm=1)
        return Tiles(
            short, long, max_short_rows=64, min_chunk=1, min_piece=2, programs=4, short_chunks=4,
            long_share=2, far_keys=far_keys,
        )  # fmt: skip
    least = 4 * tile // short.tile
    return Tiles(
        short, long, max_short_rows, min_chunk=least, min_piece=least, programs=facts.num_sms,
        short_chunks=max(1, facts.num_sms * short.programs_per_sm // spec.num_kv_heads),
        long_share=round(facts.num_sms * LONG_SHARE), far_keys=far_keys,
    )  # fmt: skip


def join(tiles: Tiles, hopper: HopperTiles) -> Tiles:
    """Tiles of short queries as the Gluon kernel has them, which computes 64 rows in any case.

    The plain kernel then has them too, for caches whose pages the copy engine cannot bring.
    """
    short = replace(tiles.short, rows=BLOCK_ROWS[-1], tile=hopper.short_tile, num_stages=3)
    min_chunk = tiles.min_chunk * tiles.short.tile // short.tile
    return replace(tiles, short=short, min_chunk=min_chunk, joint=True)


def choose_kinds(
    spec: AttentionSpec,
    facts: DeviceFacts,
    capacity: Capacity | None,
    batch_invariant: bool,
    hopper: HopperTiles | None,
) -> list[Tiles]:
    """Tiles for each height that an object's short blocks may have, the least first.

    Where there are long queries too, or more rows of a request than two blocks of the least height,
    short queries join the long ones: the last kind. Raced on an NVIDIA H200, bf16, 32/8 heads of
    128, in objects with room for long queries (µs; plain kernels, joint): decode 1 x 32k 51, 58;
    64 x 4k 268, 265; 64 x 4k of 8 tokens 513, 269, with 64/8 heads 998, 272; 64 x 4k decode + 2 x
    2k prompts 352, 334.

    Args:
        spec: The kind of layer.
        facts: Of the device.
        capacity: Of the object.
        batch_invariant: Whether the object is.
        hopper: Of the Gluon kernel, where the device has it.
    """
    plain = choose_tiles(spec, facts)
    if batch_invariant:  # no request's way may depend on the others, or on a capacity
        return [plain]
    joint = join(plain, hopper) if hopper and hopper.has_boxes else None
    if capacity is None:
        heights = BLOCK_ROWS[1:-1] if joint else BLOCK_ROWS[1:]
        higher = [
            choose_tiles(spec, facts, rows) for rows in heights if rows <= highest_block(spec)
        ]
        return [plain, *higher, *([joint] if joint else [])]
    if not _is_for_decoding(capacity):  # captured launches have blocks of one height
        return [joint or plain]
    longest = -(-capacity.max_tokens // capacity.max_batch_size)
    rows = longest * spec.group_size
    if joint and BLOCK_ROWS[1] < rows <= BLOCK_ROWS[-1]:  # joint blocks are one a request
        tiles = joint
    else:
        tiles = choose_tiles(spec, facts, block_rows_of(spec, rows))
    return [replace(tiles, max_short_rows=UNBOUNDED_ROWS)]


def _is_for_decoding(capacity: Capacity) -> bool:
    """Whether all queries are left to the short kernel."""
    spare = capacity.max_tokens - capacity.max_batch_size
    return spare < PROMPT and capacity.max_tokens <= MAX_DRAFT * capacity.max_batch_size


def hopper_refusals(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Why queries do not take the Gluon kernel; [] where they do."""
    reasons = [f"this Triton's Gluon has no {name}" for name in facts.missing_gluon]
    if facts.interpreted:
        reasons.append("Gluon is not interpreted")
    if facts.compute_capability != (9, 0):
        reasons.append(f"compute_capability={facts.compute_capability}: written for (9, 0)")
    if spec.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"dtype={spec.dtype}: written for 16 bits")
    if spec.head_dim not in (64, 128, 256):
        reasons.append(f"head_dim={spec.head_dim}: written for 64, 128 and 256")
    return reasons


def choose_hopper_tiles(
    spec: AttentionSpec, page_size: int, facts: DeviceFacts
) -> HopperTiles | None:
    """Tiles of the Gluon kernel; `None`: `short.py` and `long.py` serve."""
    if hopper_refusals(spec, facts):
        return None
    has_boxes = _has_boxes(page_size)
    if spec.head_dim == 256:
        # all that shared memory holds
        return HopperTiles(tile=64, num_stages=2, has_boxes=has_boxes)
    if spec.window_left >= 0 and (spec.logits_soft_cap > 0 or not spec.causal):
        # scores, weights and what masks them: too much for the registers beside a wide tile
        return HopperTiles(tile=64, num_stages=4, has_boxes=has_boxes)
    # of head_dim 128, three of each and the rows are all of shared memory but 3 KiB
    return HopperTiles(tile=128, num_stages=3, has_boxes=has_boxes)


def _has_boxes(page_size: int) -> bool:
    """Whether the copy engine can bring pages.

    A box is a whole number of the 8 rows after which the layout of shared memory repeats, and a
    tile is a whole number of boxes or a part of a page.
    """
    return page_size >= 8 and page_size & (page_size - 1) == 0

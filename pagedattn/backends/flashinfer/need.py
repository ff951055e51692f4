"""How many bytes of workspace a graph-mode wrapper needs: FlashInfer's rules, without a GPU.

In graph mode what FlashInfer's planners reserve depends on sizes alone, not on a step's values, so
it is known before anything is planned. The rules are those of its `scheduler.cuh`, per version; on
a GPU `tests/test_flashinfer_need.py` compares them with its own `workspace_size()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagedattn.backends.flashinfer.head_dim import FA3_HEAD_DIMS
from pagedattn.backends.flashinfer.kernel_choice import (
    graph_prefill_kernel,
    holds_prompts,
    most_prompts,
)
from pagedattn.backends.flashinfer.library import Version, flashinfer_version, load_flashinfer
from pagedattn.capacity import Capacity
from pagedattn.spec import AttentionSpec

PACKED_ROWS: Version = (0, 7, 4)
"""From here on partial results are reserved per query row, before that per packed row and head."""

_INT = 4  # bytes of an index
_FA3_TILES_PER_SCHEDULE = 4096
_LONG = 1 << 20  # packed query rows: enough for the largest tile


@dataclass(frozen=True)
class DeviceFacts:
    """What FlashInfer's planners ask of a GPU."""

    num_processors: int
    compute_capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device | str) -> DeviceFacts:
        """Ask a GPU.

        Args:
            device: A CUDA device.
        """
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, (properties.major, properties.minor))


class WorkspaceNeed(NamedTuple):
    """Bytes of both workspaces of one wrapper, or the most of several that share one."""

    float_bytes: int
    int_bytes: int


class CapacityNeeds(NamedTuple):
    """What the wrappers of one capacity need; each has workspaces of its own."""

    decode: WorkspaceNeed | None  # None: all rows run on the prefill wrapper
    prefill: WorkspaceNeed


def workspace_need(
    spec: AttentionSpec, capacity: Capacity, device_facts: DeviceFacts
) -> WorkspaceNeed:
    """What `PagedAttention(spec, ..., backend="flashinfer", capacity=capacity)` needs.

    Args:
        spec: The layer kind.
        capacity: The largest step.
        device_facts: The GPU.

    Returns:
        Bytes of a float and of an integer workspace. The halves of mixed steps have their own: each
        needs at most that.
    """
    version = flashinfer_version(load_flashinfer())
    decode, prefill = capacity_needs(spec, capacity, device_facts, version)
    return prefill if decode is None else WorkspaceNeed(*map(max, decode, prefill))


def capacity_needs(
    spec: AttentionSpec, capacity: Capacity, device_facts: DeviceFacts, version: Version
) -> CapacityNeeds:
    """What each wrapper of `PagedAttention(..., backend="flashinfer", capacity=capacity)` needs.

    Args:
        spec: The layer kind.
        capacity: The largest step.
        device_facts: The GPU.
        version: FlashInfer's.
    """
    batch_size, num_tokens = capacity.max_batch_size, capacity.max_tokens
    fa3 = device_facts.compute_capability[0] == 9 and spec.head_dim in FA3_HEAD_DIMS
    kernel = graph_prefill_kernel(num_tokens, batch_size, fa3=fa3, window_left=spec.window_left)
    if not holds_prompts(num_tokens, batch_size):
        alone = prefill_need(spec, batch_size, num_tokens, kernel, device_facts, version)
        return CapacityNeeds(None, alone)
    rows = most_prompts(num_tokens, batch_size)
    return CapacityNeeds(
        decode_need(spec, batch_size, device_facts, version),
        prefill_need(spec, 2 * rows, num_tokens, kernel, device_facts, version),
    )


def prefill_need(
    spec: AttentionSpec,
    batch_size: int,
    num_tokens: int,
    kernel: str,
    facts: DeviceFacts,
    version: Version,
) -> WorkspaceNeed:
    """What a graph-mode `FlashInferPrefillWrapper` needs.

    Args:
        spec: Heads.
        batch_size: The wrapper's, without the request that it adds for padding.
        num_tokens: The wrapper's `max_total_tokens`.
        kernel: "fa2" or "fa3".
        facts: The GPU.
        version: FlashInfer's.
    """
    num_requests = batch_size + 1
    if kernel == "fa3":
        return WorkspaceNeed(0, _fa3_int_bytes(spec, num_requests, num_tokens, facts))
    longest = (num_tokens - num_requests + 1) % 2**32  # its subtraction is one of unsigned numbers
    tile = _fa2_tile(longest * spec.group_size, spec.head_dim)
    num_tiles = _tiles(num_tokens * spec.group_size, tile) + num_requests - 1
    return _fa2_need(spec, num_requests, num_tokens, (tile, num_tiles), facts, version)


def decode_need(
    spec: AttentionSpec, batch_size: int, facts: DeviceFacts, version: Version
) -> WorkspaceNeed:
    """What a graph-mode `FlashInferDecodeWrapper` needs.

    Args:
        spec: Heads.
        batch_size: The wrapper's.
        facts: The GPU.
        version: FlashInfer's.
    """
    tile = _fa2_tile(spec.group_size, spec.head_dim)
    uniform = version >= PACKED_ROWS
    num_tiles = batch_size * _tiles(spec.group_size, tile)
    if not uniform:  # older versions plan for any lengths of as many tokens
        num_tiles = _tiles(batch_size * spec.group_size, tile) + batch_size - 1
    return _fa2_need(spec, batch_size, batch_size, (tile, num_tiles), facts, version, uniform)


def eager_float_bytes(spec: AttentionSpec, facts: DeviceFacts) -> int:
    """The most that an eager plan reserves: it splits requests only until the GPU is full."""
    rows = _most_split_tiles(spec, facts) * _fa2_tile(_LONG, spec.head_dim)
    return 4 * spec.num_qo_heads * rows * (spec.head_dim + 1)


def _fa2_need(
    spec: AttentionSpec,
    num_requests: int,
    num_tokens: int,
    tiles: tuple[int, int],
    facts: DeviceFacts,
    version: Version,
    uniform: bool = False,
) -> WorkspaceNeed:
    """Needs for tiles of (packed rows, how many).

    Where every request has one token for ever, `uniform`, and the tiles fill the GPU, newer
    versions never split a request, so there is nothing to merge.
    """
    tile, num_tiles = tiles
    splits = not (uniform and num_tiles > _most_split_tiles(spec, facts))
    num_blocks = max(_most_split_tiles(spec, facts), num_tiles)
    rows = num_blocks * tile
    if version >= PACKED_ROWS:
        rows = _tiles(rows, spec.group_size)
    float_bytes = _reserve([4 * spec.num_qo_heads * rows * width for width in (spec.head_dim, 1)])
    indices = [_INT * num_blocks] * 3
    o_indptr_and_chunk_size = _INT * (num_requests + 1) + _INT
    merge_indptr, valid_blocks = _INT * (num_tokens + 1), num_blocks
    pieces = [*indices, o_indptr_and_chunk_size, _INT]
    if not splits:
        return WorkspaceNeed(0, _reserve([*pieces, valid_blocks]))
    return WorkspaceNeed(float_bytes, _reserve([*pieces, merge_indptr, valid_blocks]))


def _fa3_int_bytes(
    spec: AttentionSpec, num_requests: int, num_tokens: int, facts: DeviceFacts
) -> int:
    tile = 192 if spec.head_dim == 64 else 128
    num_tiles = _tiles(num_tokens, tile) + num_requests - 1
    if num_tiles <= _FA3_TILES_PER_SCHEDULE:
        num_tiles *= spec.num_qo_heads  # each head has a schedule of its own
    works = _INT * num_tiles
    return _reserve([*[works] * 6, _INT * (facts.num_processors + 1), works])


def _most_split_tiles(spec: AttentionSpec, facts: DeviceFacts) -> int:
    return 2 * facts.num_processors // spec.num_kv_heads


def _fa2_tile(packed_len: int, head_dim: int) -> int:
    """Packed query rows of one tile, on GPUs of compute capability 8.0 and up.

    It is larger where a tile of 16 does not leave room for keys in shared memory: at head_dim 256
    both take 72 KiB, which all these GPUs have.
    """
    if head_dim >= 512:
        return 16 if packed_len <= 32 else 32
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def _reserve(pieces: list[int]) -> int:
    """Bytes of pieces one after the other, each at a multiple of 16."""
    taken = 0
    for size in pieces:
        taken = -(-taken // 16) * 16 + size
    return taken

"""Launches of the Gluon kernel for long queries, and how it reaches a cache.

The copy engine brings pages that are boxes of rows of a matrix; rows of others are gathered.

Imported only where `choose_hopper_tiles` chose the kernel: elsewhere Gluon may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagedattn.backends.triton.descriptors import Descriptors
from pagedattn.backends.triton.launch import Launch, LayerPointers, Pointers
from pagedattn.backends.triton.side_by_side import LaunchLong
from pagedattn.backends.triton.tiles import HopperTiles
from pagedattn.kernels.long_hopper import long_attention_hopper
from pagedattn.spec import AttentionSpec
from pagedattn.validation import halves_of

MAX_MAPS = 4096  # caches whose maps are kept: more than a model has layers
NUM_WARPS = 4  # of the first consumer; the other partitions bring their own
MAX_REGISTERS = 168  # a thread of 12 warps, before those that compute nothing give theirs up
PIECE_BYTES = 16  # that a thread copies at once where rows are gathered
_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class _Memory:
    """What a descriptor or a launch asks of a tensor, without keeping the tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.address


def unreachable_reasons(pages: Tensor) -> list[str]:
    """Why the copy engine cannot reach the pages of a cache; [] where it can.

    Args:
        pages: dtype[pages, page_size, kv_heads, head_dim], dense in the last two dimensions.
    """
    num_pages, page_size, num_heads, head_dim = pages.shape
    page_stride, token_stride = pages.stride()[:2]
    if num_pages == 0:
        return ["the cache has no pages"]
    reasons = []
    if pages.data_ptr() % 16:
        reasons.append(f"address {pages.data_ptr():#x} is not a multiple of 16 bytes")
    if token_stride * pages.itemsize % 16 or token_stride < num_heads * head_dim:
        reasons.append(f"{token_stride=}: not a multiple of 16 bytes, or less than a row")
    elif page_stride % token_stride:
        reasons.append(f"{page_stride=} is not a multiple of {token_stride=}")
    elif (num_pages - 1) * (page_stride // token_stride) + page_size >= 2**31:
        reasons.append(f"{num_pages} pages are 2 ** 31 rows or more")
    return reasons


def ungathered_reasons(pages: Tensor) -> list[str]:
    """Why the rows of a cache cannot be gathered; [] where they can.

    Args:
        pages: As for `unreachable_reasons`.
    """
    page_bytes, token_bytes = [stride * pages.itemsize for stride in pages.stride()[:2]]
    numbers = ("address", pages.data_ptr()), ("page", page_bytes), ("token", token_bytes)
    return [
        f"{name}: {number:#x} is not a multiple of {PIECE_BYTES} bytes"
        for name, number in numbers
        if number % PIECE_BYTES
    ]


class LongHopper:
    """The kernel of `kernels/long_hopper.py` for one kind of layer.

    Args:
        spec: The kind of layer.
        page_size: Tokens of a page.
        tiles: As chosen for them.
        device: Where it runs.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        tiles: HopperTiles,
        device: torch.device,
    ) -> None:
        self._has_boxes = tiles.has_boxes
        if tiles.has_boxes:
            self.box = [min(page_size, tiles.tile), spec.head_dim]
            self.layout = gl.NVMMASharedLayout.get_default_for(self.box, _GLUON_DTYPES[spec.dtype])
        self._maps: dict[tuple[object, ...], Descriptors | None] = {}
        self.constants = {
            "GROUP": spec.group_size,
            "HEAD_DIM": spec.head_dim,
            "PAGE_SIZE": page_size,
            "TILE": tiles.tile,
            "CAUSAL": spec.causal,
            "HAS_WINDOW": spec.window_left >= 0,
            "SOFT_CAP": spec.logits_soft_cap > 0,
            "STAGES": tiles.num_stages,
        }
        options = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS}
        self._launches = {
            (gather, with_lse): Launch(
                long_attention_hopper,
                device,
                self.constants | {"WITH_LSE": with_lse, "GATHER": gather},
                options,
            )
            for gather in (False, True)
            for with_lse in (False, True)
        }

    def maps_of(self, layer: LayerPointers) -> Descriptors | None:
        """Maps of a layer's K and V; `None` where the kernel cannot reach one of them.

        Each is the pages as rows of one matrix, where a head is `head_dim` columns. Where rows are
        gathered, there are addresses instead.
        Captured launches keep a copy of the maps, so a replay reads the cache of its capture.
        """
        cache = layer.kv_cache
        num_pages: object  # read in the cheapest way, as every run does
        if isinstance(cache, Tensor):
            num_pages = cache.size(0)
        else:
            num_pages = cache[0].size(0), cache[1].size(0)
        key = (num_pages, layer.addresses[1:3], layer.page_strides)
        if key not in self._maps:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            self._maps[key] = self._make_maps(halves_of(cache))
        return self._maps[key]

    def prepare(
        self, maps: Descriptors, with_lse: bool, layer: LayerPointers, arguments: Pointers
    ) -> LaunchLong:
        """Return what launches so many programs, at most one an SM, to compute long units.

        Launches over one schedule share its units, whether they run at one time or not. Their
        grids must add up to the last argument: the last program makes ready for the next step.

        Args:
            maps: Of the layer.
            with_lse: Whether the layer's lse is written.
            layer: Of the backend's `run`.
            arguments: Of the layer's strides; see `Bindings.of_layer`.
        """
        q_at, _, _, out_at, lse_at = layer.addresses
        pointers = Pointers((layer.q, layer.out, layer.lse), (q_at, out_at, lse_at), layer.kind)
        kernel = self._launches[isinstance(maps.values[0], _Memory), with_lse]

        def launch(grid: int, stream: torch.cuda.Stream | None = None) -> None:
            kernel(grid, pointers, arguments, descriptors=maps, stream=stream)

        return launch

    def _make_maps(self, halves: tuple[Tensor, Tensor]) -> Descriptors | None:
        if self._has_boxes and not any(unreachable_reasons(pages) for pages in halves):
            return Descriptors(tuple(map(self._map_of, halves)))
        if any(ungathered_reasons(pages) for pages in halves):
            return None
        return Descriptors(tuple(_Memory(pages.data_ptr(), pages.dtype) for pages in halves))

    def _map_of(self, pages: Tensor) -> Any:
        """The pages as rows of one matrix; page 1 begins at row `page_stride // token_stride`."""
        num_pages, page_size, num_heads, head_dim = pages.shape
        page_stride, token_stride = pages.stride()[:2]
        num_rows = (num_pages - 1) * (page_stride // token_stride) + page_size
        return TensorDescriptor(
            _Memory(pages.data_ptr(), pages.dtype),
            [num_rows, num_heads * head_dim], [token_stride, 1], self.box, self.layout,
        )  # fmt: skip

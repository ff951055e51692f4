"""How the Gluon kernels reach a cache: pages are boxes of rows of a matrix, or rows are gathered.

Imported only where a Gluon kernel was chosen: elsewhere Gluon may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagedattn.backends.triton.descriptors import Descriptors
from pagedattn.backends.triton.launch import LayerPointers
from pagedattn.spec import AttentionSpec
from pagedattn.validation import halves_of

MAX_MAPS = 4096  # caches whose maps are kept: more than a model has layers
PIECE_BYTES = 16  # that a thread copies at once where rows are gathered
_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Memory:
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


class HopperMaps:
    """Maps of the K and V of layers, made once for each.

    Args:
        spec: The kind of layer.
        box_rows: Tokens that the copy engine brings at once; 0: it cannot bring any.
    """

    def __init__(self, spec: AttentionSpec, box_rows: int) -> None:
        self.box = [box_rows, spec.head_dim] if box_rows else None
        if self.box:
            self.layout = gl.NVMMASharedLayout.get_default_for(self.box, _GLUON_DTYPES[spec.dtype])
        self._maps: dict[tuple[object, ...], Descriptors | None] = {}

    def of(self, layer: LayerPointers) -> Descriptors | None:
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
            self._maps[key] = self._make(halves_of(cache))
        return self._maps[key]

    def _make(self, halves: tuple[Tensor, Tensor]) -> Descriptors | None:
        if self.box and not any(unreachable_reasons(pages) for pages in halves):
            return Descriptors(tuple(map(self._map_of, halves)))
        if any(ungathered_reasons(pages) for pages in halves):
            return None
        return Descriptors(tuple(Memory(pages.data_ptr(), pages.dtype) for pages in halves))

    def _map_of(self, pages: Tensor) -> Any:
        """The pages as rows of one matrix; page 1 begins at row `page_stride // token_stride`."""
        num_pages, page_size, num_heads, head_dim = pages.shape
        page_stride, token_stride = pages.stride()[:2]
        num_rows = (num_pages - 1) * (page_stride // token_stride) + page_size
        return TensorDescriptor(
            Memory(pages.data_ptr(), pages.dtype),
            [num_rows, num_heads * head_dim], [token_stride, 1], self.box, self.layout,
        )  # fmt: skip

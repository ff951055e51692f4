"""The pages themselves: keys and values of every layer, and the writes into them.

Which request owns which page is `page_allocator.py`'s affair; attention over the pages is not
known here. What writes is chosen by the device alone: on a GPU the Triton kernel, on a CPU the same
kernel where Triton interprets (`TRITON_INTERPRET=1`) and plain torch where it does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Hashable

import torch
from torch import Tensor

from pagedattn.page_allocator import OutOfPages, PageAllocator
from pagedattn.spec import AttentionSpec

__all__ = ["OutOfPages", "PageAllocator", "PagedKVCache"]


class PagedKVCache:
    """Keys and values of all layers in pages, and the allocator of those pages.

    The sink page is the page that padding may read and write: whoever pads a step to a fixed size
    points the padding at it. It begins as zeros and stays finite as long as only padding with
    finite values is written there. No request owns it, so no request sees it.

    Args:
        num_layers: Layers, each with pages of its own; one page table serves all of them.
        num_pages: Pages of each layer, the sink page included.
        page_size: Tokens in one page.
        spec: Gives `num_kv_heads`, `head_dim` and `dtype` of the pages.
        device: Where the pages are; by default the current GPU, or the CPU without one.
        sink_page: The page that no request can own; `None`: there is none.

    Attributes:
        pages: dtype[num_layers, num_pages, 2, page_size, num_kv_heads, head_dim], K before V.
        allocator: Who owns which page.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> cache = PagedKVCache(1, num_pages=3, page_size=4, spec=spec, device="cpu")
        >>> cache.extend("a", 2)
        >>> k = v = torch.ones(2, 2, 16)
        >>> cache.append(0, k, v, torch.tensor([4, 5]))
        >>> cache[0][1, 0, :, 0, 0].tolist()
        [1.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        spec: AttentionSpec,
        device: torch.device | str | None = None,
        sink_page: int | None = 0,
    ) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        self.allocator = PageAllocator(num_pages, page_size, sink_page)
        self.num_layers = num_layers
        self.page_size = page_size
        self.spec = spec
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        page_shape = (2, page_size, spec.num_kv_heads, spec.head_dim)
        # zeros: whatever reads the sink page or an unwritten slot reads something finite
        self.pages = torch.zeros(
            (num_layers, num_pages, *page_shape), dtype=spec.dtype, device=device
        )
        self.device = self.pages.device
        self._num_refused = torch.zeros(1, dtype=torch.int32, device=self.device)

    def __getitem__(self, layer: int) -> Tensor:
        """dtype[num_pages, 2, page_size, num_kv_heads, head_dim]: the pages of one layer."""
        self._check_layer(layer)
        return self.pages[layer]

    def extend(self, request: Hashable, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens of `request`, which is created on first use.

        A last page that is shared and partly filled is copied in every layer first, so what is then
        appended changes no other request.

        Raises:
            OutOfPages: Too few pages are free. Nothing has changed.
            ValueError: `num_tokens` is negative.
        """
        for source, destination in self.allocator.extend(request, num_tokens):
            self.pages[:, destination].copy_(self.pages[:, source])

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write keys and values of new tokens into one layer.

        Nothing outside the cache is ever written. Slots on a CPU are checked first. Slots on a GPU
        cannot be read without waiting for it: a bad one is skipped and counted, and
        `raise_if_refused` raises for it. There `append` allocates nothing, never waits, and can be
        captured in a CUDA graph once a first call has compiled the kernel. Two tokens with the same
        slot leave one of both there.

        Args:
            layer: Which layer, from 0.
            k: dtype[tokens, num_kv_heads, head_dim] on the cache's device. Tokens and heads may be
                strided.
            v: As `k`.
            slots: Contiguous i64[tokens] on the cache's device, `page * page_size + offset` of each
                token as `PagedAttention.write_slots` gives them; -1: skip this token. Slots of the
                sink page are for padding only.

        Raises:
            ValueError: There is no such layer, or a tensor has a wrong shape, dtype, stride,
                device, or (on a CPU) value. Nothing has been written.
        """
        self._check_layer(layer)
        self._check_rows(k, "k")
        self._check_rows(v, "v")
        self._check_slots(slots, k, v)
        write = append_into if torch.compiler.is_compiling() else _append
        write(k, v, slots, self.pages[layer], self._num_refused)

    def raise_if_refused(self) -> None:
        """Raise if an `append` since the last call skipped slots outside the cache.

        Waits for the GPU.

        Raises:
            ValueError: Slots were refused; their tokens are in no page.
        """
        num_refused = int(self._num_refused)
        if num_refused:
            self._num_refused.zero_()
            raise ValueError(
                f"append refused {num_refused} slots outside the cache, expected "
                f"-1 to {self._num_slots - 1}"
            )

    def __repr__(self) -> str:
        allocator = self.allocator
        return (
            f"PagedKVCache({self.num_layers} layers, {allocator.num_pages} pages of "
            f"{self.page_size} tokens, {self.pages.dtype}, device='{self.device}'), "
            f"{len(allocator.requests)} requests, {allocator.num_free_pages} free pages"
        )

    @property
    def _num_slots(self) -> int:
        return self.allocator.num_pages * self.page_size

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be 0 to {self.num_layers - 1}, got {layer}")

    def _check_rows(self, rows: Tensor, name: str) -> None:
        expected = (self.spec.num_kv_heads, self.spec.head_dim)
        if rows.ndim != 3 or tuple(rows.shape[1:]) != expected:
            raise ValueError(
                f"{name} must have shape [tokens, {expected[0]}, {expected[1]}] "
                f"[tokens, num_kv_heads, head_dim], got {list(rows.shape)}"
            )
        if rows.dtype != self.spec.dtype:
            raise ValueError(f"{name} must be {self.spec.dtype}, got {rows.dtype}")
        if rows.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got {rows.device}")
        if rows.stride(2) != 1 and expected[1] > 1:
            raise ValueError(
                f"{name} must be dense in its last dimension (head_dim), got stride {rows.stride()}"
            )

    def _check_slots(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if k.shape[0] != v.shape[0]:
            raise ValueError(f"v must have {k.shape[0]} tokens as k has, got {v.shape[0]}")
        if tuple(slots.shape) != (k.shape[0],):
            raise ValueError(
                f"slots must have shape [{k.shape[0]}], one for each token of k, "
                f"got {list(slots.shape)}"
            )
        if slots.dtype != torch.int64:
            raise ValueError(f"slots must be {torch.int64}, got {slots.dtype}")
        if slots.device != self.device:
            raise ValueError(f"slots must be on {self.device}, got {slots.device}")
        if not slots.is_contiguous():
            raise ValueError(f"slots must be contiguous, got stride {slots.stride()}")


def _triton_writes_on(device: torch.device) -> bool:
    """Whether the kernel writes on `device`; asking does not import Triton."""
    if device.type == "cuda":
        return True
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return interprets and importlib.util.find_spec("triton") is not None


def _append(k: Tensor, v: Tensor, slots: Tensor, pages: Tensor, num_refused: Tensor) -> None:
    """Write rows of tensors whose shapes are checked into one layer's pages."""
    if slots.device.type == "cpu":
        _check_range(slots, pages.shape[0] * pages.shape[2])
    if not slots.shape[0]:
        return
    if _triton_writes_on(slots.device):
        # imported here: Triton decides at its import whether it interprets
        kernels = importlib.import_module("pagedattn.kernels.append")
        kernels.launch_append(k, v, slots, pages, num_refused)
    else:
        _append_with_torch(k, v, slots, pages)


@torch.library.custom_op("pagedattn::append_into", mutates_args=("pages", "num_refused"))
def append_into(k: Tensor, v: Tensor, slots: Tensor, pages: Tensor, num_refused: Tensor) -> None:
    """`PagedKVCache.append` of one layer as an operator, so that a compiled model keeps it whole.

    Args:
        k: As for `append`.
        v: As for `append`.
        slots: As for `append`.
        pages: dtype[pages, 2, page_size, num_kv_heads, head_dim], written.
        num_refused: i32[1], written: grows by the slots outside the cache.
    """
    _append(k, v, slots, pages, num_refused)


@append_into.register_fake
def _(k: Tensor, v: Tensor, slots: Tensor, pages: Tensor, num_refused: Tensor) -> None:
    return None


def _check_range(slots: Tensor, num_slots: int) -> None:
    outside = (slots < -1) | (slots >= num_slots)
    if outside.any():
        token = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"slots[{token}] is {int(slots[token])}, outside the cache: expected "
            f"-1 (skip) or 0 to {num_slots - 1}"
        )


def _append_with_torch(k: Tensor, v: Tensor, slots: Tensor, pages: Tensor) -> None:
    """Write rows of CPU tensors whose slots are checked."""
    kept = slots >= 0
    page, offset = slots[kept] // pages.shape[2], slots[kept] % pages.shape[2]
    pages[page, 0, offset] = k[kept]
    pages[page, 1, offset] = v[kept]

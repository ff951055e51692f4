"""Launches of the Gluon kernel for short queries.

Imported only where `choose_short_hopper_tiles` chose the kernel: elsewhere Gluon may be missing.
"""

from __future__ import annotations

import torch

from pagedattn.backends.triton.descriptors import Descriptors
from pagedattn.backends.triton.hopper_maps import HopperMaps
from pagedattn.backends.triton.launch import Launch, LayerPointers, Pointers
from pagedattn.backends.triton.tiles import KernelTiles
from pagedattn.kernels.short_hopper import short_attention_hopper
from pagedattn.spec import AttentionSpec

MAX_REGISTERS = {1: 168, 2: 128}
"""By programs an SM: of a thread of 8 warps, before those that compute nothing give theirs."""


class ShortHopper:
    """The kernel of `kernels/short_hopper.py` for one kind of layer.

    Args:
        spec: The kind of layer.
        page_size: Tokens of a page.
        tiles: As chosen for them, with up to 64 rows.
        batch_invariant: Whether a request's pieces are the same in every batch.
        device: Where it runs.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        tiles: KernelTiles,
        batch_invariant: bool,
        device: torch.device,
    ) -> None:
        self.maps = HopperMaps(spec, min(page_size, tiles.tile), gathers=False)
        self.constants = {
            "GROUP": spec.group_size,
            "HEAD_DIM": spec.head_dim,
            "PAGE_SIZE": page_size,
            "ROWS": tiles.rows,
            "TILE": tiles.tile,
            "CAUSAL": spec.causal,
            "HAS_WINDOW": spec.window_left >= 0,
            "SOFT_CAP": spec.logits_soft_cap > 0,
            "BATCH_INVARIANT": batch_invariant,
            "STAGES": tiles.num_stages,
        }
        self.options = {
            "num_warps": tiles.num_warps,
            "maxnreg": MAX_REGISTERS[tiles.programs_per_sm],
        }
        self._launches = [
            Launch(
                short_attention_hopper,
                device,
                self.constants | {"WITH_LSE": with_lse},
                self.options,
            )
            for with_lse in (False, True)
        ]

    def launch(
        self,
        grid: int,
        maps: Descriptors,
        with_lse: bool,
        layer: LayerPointers,
        arguments: Pointers,
    ) -> None:
        """Launch a program for each chunk and KV head.

        Args:
            grid: Their number.
            maps: Of the layer.
            with_lse: Whether the layer's lse is written.
            layer: Of the backend's `run`.
            arguments: Of the layer's strides, as for the plain kernel; see `Bindings.of_layer`.
        """
        q_at, _, _, out_at, lse_at = layer.addresses
        pointers = Pointers((layer.q, layer.out, layer.lse), (q_at, out_at, lse_at), layer.kind)
        self._launches[with_lse](grid, pointers, arguments, descriptors=maps)

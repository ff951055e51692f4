"""Launches of the Gluon kernel.

Imported only where `choose_hopper_tiles` chose the kernel: elsewhere Gluon may be missing.
"""

from __future__ import annotations

import torch

from pagedattn.backends.triton.descriptors import Descriptors
from pagedattn.backends.triton.hopper_maps import HopperMaps, Memory
from pagedattn.backends.triton.launch import Launch, LayerPointers, Pointers
from pagedattn.backends.triton.side_by_side import LaunchLong
from pagedattn.backends.triton.tiles import HopperTiles
from pagedattn.kernels.hopper import attention_hopper
from pagedattn.spec import AttentionSpec

NUM_WARPS = 4  # of the first consumer; the other partitions bring their own
MAX_REGISTERS = 168  # a thread of 12 warps, before those that compute nothing give theirs up


class Hopper:
    """The kernel of `kernels/hopper.py` for one kind of layer.

    Args:
        spec: The kind of layer.
        page_size: Tokens of a page.
        tiles: As chosen for them.
        device: Where it runs.
    """

    def __init__(
        self, spec: AttentionSpec, page_size: int, tiles: HopperTiles, device: torch.device
    ) -> None:
        box_rows = min(page_size, tiles.short_tile) if tiles.has_boxes else 0
        self.maps = HopperMaps(spec, box_rows)
        self.constants = {
            "GROUP": spec.group_size,
            "HEAD_DIM": spec.head_dim,
            "PAGE_SIZE": page_size,
            "BOX": box_rows,
            "TILE": tiles.tile,
            "CAUSAL": spec.causal,
            "HAS_WINDOW": spec.window_left >= 0,
            "SOFT_CAP": spec.logits_soft_cap > 0,
            "STAGES": tiles.num_stages,
        }
        options = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS}
        self._launches = {
            (gather, with_lse): Launch(
                attention_hopper,
                device,
                self.constants | {"WITH_LSE": with_lse, "GATHER": gather},
                options,
            )
            for gather in (False, True)
            for with_lse in (False, True)
        }

    @staticmethod
    def gathers(maps: Descriptors) -> bool:
        """Whether rows are gathered: then the kernel computes long queries alone."""
        return isinstance(maps.values[0], Memory)

    def prepare(
        self, maps: Descriptors, with_lse: bool, layer: LayerPointers, arguments: Pointers
    ) -> LaunchLong:
        """Return what launches so many programs, at most one an SM.

        Launches over one schedule that leave short queries to another kernel share its long blocks,
        whether they run at one time or not. The grids of a step must add up to the last argument:
        the last program makes ready for the next step.

        Args:
            maps: Of the layer.
            with_lse: Whether the layer's lse is written.
            layer: Of the backend's `run`.
            arguments: Of the layer's strides; see `Bindings.of_layer`.
        """
        q_at, _, _, out_at, lse_at = layer.addresses
        pointers = Pointers((layer.q, layer.out, layer.lse), (q_at, out_at, lse_at), layer.kind)
        kernel = self._launches[self.gathers(maps), with_lse]

        def launch(grid: int, stream: torch.cuda.Stream | None = None) -> None:
            kernel(grid, pointers, arguments, descriptors=maps, stream=stream)

        return launch

"""Device code that moves chosen rows of a step's tensors to the front, and back to their places."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 4096  # elements of a row that one program moves


@triton.jit
def _move_rows_kernel(
    source,  # dtype[..., ROW], rows are dense
    target,  # dtype[..., ROW], rows are dense
    places,  # i64[rows]
    source_stride,
    target_stride,
    GATHER: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place >= 0:
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = element < ROW
        from_row = place if GATHER else row
        to_row = row if GATHER else place
        values = tl.load(source + from_row * source_stride + element, mask=mask)
        tl.store(target + to_row * target_stride + element, values, mask=mask)


def gather_rows(source: Tensor, places: Tensor, target: Tensor) -> None:
    """Write `target[i] = source[places[i]]` for every place that is not negative.

    Args:
        source: dtype[tokens, ...], dense inside a token.
        places: i64[rows], contiguous.
        target: dtype[at least rows, ...], as `source`.
    """
    _launch(source, places, target, gather=True)


def scatter_rows(source: Tensor, places: Tensor, target: Tensor) -> None:
    """Write `target[places[i]] = source[i]` for every place that is not negative.

    Args:
        source: dtype[at least rows, ...], dense inside a token.
        places: i64[rows], contiguous; no place twice.
        target: dtype[tokens, ...], as `source`.
    """
    _launch(source, places, target, gather=False)


def _launch(source: Tensor, places: Tensor, target: Tensor, *, gather: bool) -> None:
    row = source[:1].numel() or target[:1].numel()
    if not places.shape[0] or not row:
        return
    block = min(triton.next_power_of_2(row), MAX_BLOCK)
    _move_rows_kernel[(places.shape[0], triton.cdiv(row, block))](
        source,
        target,
        places,
        source.stride(0),
        target.stride(0),
        GATHER=gather,
        ROW=row,
        BLOCK=block,
    )

"""What is right: a sample of a case's rows in float64, and what error is allowed.

The rows that are most easily wrong are always in the sample: the first and the last of the step,
and the first and last of its longest and of its shortest request. One KV head of one row is
computed at a time, so that memory stays bounded whatever the case.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from pagedattn import AttentionSpec
from pagedattn.backends.reference import attend_one_query, visible_range
from pagedattn.checking.bound import Arithmetic, band
from pagedattn.checking.dense import DenseBlock, masked_scores

MAX_ROWS = 16


@dataclass(frozen=True)
class Row:
    """One query of a step."""

    row: int  # of q and out
    request: int
    position: int  # in its request


@dataclass(frozen=True, eq=False)
class Expected:
    """The right answer for some rows."""

    rows: Tensor  # i64[rows]  which, on the host
    out: Tensor  # f64[rows, num_qo_heads, head_dim]
    low: Tensor  # as out: twice the error of an honest computation in the case's own dtype
    bands: dict[Arithmetic, Tensor]  # as out: what rounding may add, by how a backend computes


@dataclass(frozen=True)
class Verdict:
    """The sampled element that is nearest to what is allowed, or furthest above it."""

    error: float
    allowed: float
    all_written: bool  # whether the whole output is finite, though it was NaN before

    @property
    def word(self) -> str:
        """Say whether every element was written, and every sampled one is within its bound."""
        if not self.all_written:
            return "not all written"
        return "right" if self.error <= self.allowed else "wrong"


def sample_rows(inputs: Inputs, max_rows: int = MAX_ROWS) -> list[Row]:
    """Choose rows, all of them where they are few."""
    bounds, kv_lens = inputs.qo_indptr.tolist(), inputs.table.kv_lens.tolist()
    chosen = set(range(bounds[-1]))
    if bounds[-1] > max_rows:
        by_length = sorted(range(len(kv_lens)), key=kv_lens.__getitem__)
        requests = (by_length[0], by_length[-1], 0, len(kv_lens) - 1)
        chosen = {row for r in requests for row in (bounds[r], bounds[r + 1] - 1)}
        generator = random.Random(inputs.case.name)
        while len(chosen) < max_rows:
            chosen.add(generator.randrange(bounds[-1]))
    rows = []
    for row in sorted(chosen):
        request = next(r for r in range(len(kv_lens)) if bounds[r] <= row < bounds[r + 1])
        rows.append(Row(row, request, kv_lens[request] - bounds[request + 1] + row))
    return rows


def expect(inputs: Inputs, arithmetics: tuple[Arithmetic, ...]) -> Expected:
    """Compute a sample of rows in float64, with the bound of each way to compute."""
    rows = sample_rows(inputs)
    shape = (len(rows), *inputs.q.shape[1:])
    out, low, *bands = (
        torch.empty(shape, dtype=torch.float64, device=inputs.device)
        for _ in range(2 + len(arithmetics))
    )
    spec = inputs.case.spec
    one_head = AttentionSpec(spec.group_size, 1, spec.head_dim, dtype=spec.dtype)
    for i, row in enumerate(rows):
        pages = inputs.table.pages_of(row.request).to(inputs.device)
        for head in range(spec.num_kv_heads):
            heads = slice(head * spec.group_size, (head + 1) * spec.group_size)
            block = _block(inputs, row, pages, head, heads)
            out[i, heads], _ = attend_one_query(
                one_head, block.q[0], block.k[0, :, None], block.v[0, :, None]
            )
            low[i, heads] = 2 * (_low_precision(one_head, block) - out[i, heads]).abs().amax(
                -1, keepdim=True
            )
            for band_of, arithmetic in zip(bands, arithmetics, strict=True):
                band_of[i, heads] = band(one_head, block, arithmetic)[0][0]
    numbers = torch.tensor([row.row for row in rows])
    return Expected(numbers, out, low, dict(zip(arithmetics, bands, strict=True)))


def judge(out: Tensor, expected: Expected, arithmetic: Arithmetic) -> Verdict:
    """Compare an output with what is expected of its sampled rows."""
    error = (out[expected.rows.to(out.device)].double() - expected.out).abs()
    error = error.nan_to_num(nan=torch.inf)
    allowed = expected.low + expected.bands[arithmetic]
    excess = torch.where(error == 0, 0.0, error / allowed)
    worst = int(excess.argmax())
    written = bool(torch.isfinite(out).all())
    return Verdict(float(error.flatten()[worst]), float(allowed.flatten()[worst]), written)


def _block(inputs: Inputs, row: Row, pages: Tensor, head: int, heads: slice) -> DenseBlock:
    """One KV head's keys that a query sees, in float64; its query heads are the block's rows."""
    kv_len, page_size = int(inputs.table.kv_lens[row.request]), inputs.table.page_size
    low, high = visible_range(inputs.case.spec, kv_len, row.position)
    token = torch.arange(low, high, device=inputs.device)
    page, slot = pages[token // page_size].long(), token % page_size
    k, v = (inputs.kv_cache[page, i, slot, head].double()[None] for i in (0, 1))
    q = inputs.q[row.row, heads].double()[None]
    visible = torch.ones(q.shape[1], high - low, dtype=torch.bool, device=inputs.device)
    return DenseBlock(slice(0, q.shape[1]), q, k, v, visible)


def _low_precision(spec: AttentionSpec, block: DenseBlock) -> Tensor:
    """f64[rows, head_dim]: scores in float32, weights and output rounded to the case's dtype."""
    single = block._replace(q=block.q.float(), k=block.k.float(), v=block.v.float())
    weights = torch.softmax(masked_scores(spec, single), dim=-1).to(spec.dtype).float()
    return (weights @ single.v)[0].to(spec.dtype).double()

"""The float64 answer of a step and what error it allows: by the oracle, or in few launches.

`truth_of` asks the oracle, request by request on the CPU. `truth_on_device` computes the same
numbers from padded tensors on the step's own device, for runs of many thousand steps; a test holds
the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Arithmetic, Bound, allowed_error, band, distance
from pagedattn.checking.dense import DenseBlock, attend_block, dense_attention
from pagedattn.checking.step import Step, oracle

MAX_PADDED_SCORES = 2**24
"""Scores of requests that are computed together; longer ones are computed alone."""


class Truth(NamedTuple):
    """What is right, float64."""

    expected: AttentionOutput
    bound: Bound


def truth_of(step: Step, arithmetic: Arithmetic, *, dense: bool = False) -> Truth:
    """The oracle's answer and its bound, on the CPU.

    Args:
        step: What to compute.
        arithmetic: How the backend under test computes.
        dense: Ask `dense.py` instead of the oracle, to check the oracle's own backend.
    """
    expected = dense_attention(step, torch.float64) if dense else oracle(step)
    return Truth(expected, allowed_error(step, expected, arithmetic))


def truth_on_device(step: Step, arithmetic: Arithmetic) -> Truth:
    """As `truth_of`, on the step's device; its tensors stay there."""
    device, shape = step.q.device, step.q.shape
    out = torch.zeros(shape, dtype=torch.float64, device=device)
    lse = torch.full(shape[:2], -torch.inf, dtype=torch.float64, device=device)
    bound = Bound(torch.zeros_like(out), torch.zeros_like(lse))
    for requests in _groups(step):
        places = _places(step, requests)
        block = _padded_block(step, requests, places.padded)
        answer = _unpadded(*attend_block(step.spec, block, torch.float64), step, places)
        low_block = block._replace(q=block.q.float(), k=block.k.float(), v=block.v.float())
        low = _unpadded(*attend_block(step.spec, low_block, step.spec.dtype), step, places)
        allowed = _unpadded(*band(step.spec, block, arithmetic), step, places)
        out[places.rows], lse[places.rows] = answer.out, answer.lse
        error = 2 * distance(low.out, answer.out).amax(-1, keepdim=True)
        bound.out[places.rows] = error + allowed.out
        bound.lse[places.rows] = 2 * distance(low.lse, answer.lse) + allowed.lse
    return Truth(AttentionOutput(out, lse), bound)


class _Places(NamedTuple):
    """Where the queries of some requests are; made on the host, so that no GPU is waited for."""

    padded: Tensor  # i64[requests, most queries]  rows of `q`; padding repeats the first
    queries: Tensor  # i64[queries]  places in `padded` that are queries
    rows: Tensor  # i64[queries]  their rows of `q`


def _groups(step: Step) -> Iterator[list[int]]:
    """Requests that are padded together: all, or those of like size where that is too much."""
    qo_lens, kv_lens = step.qo_lens, step.kv_lens
    group: list[int] = []
    by_size = sorted(range(len(kv_lens)), key=lambda r: (qo_lens[r], kv_lens[r]))
    for request in (r for r in by_size if qo_lens[r] and kv_lens[r]):
        wider = [*group, request]
        rows, keys = qo_lens[request], max(kv_lens[r] for r in wider)
        padded = len(wider) * rows * keys * step.spec.num_qo_heads
        if group and padded > MAX_PADDED_SCORES:
            yield group
            wider = [request]
        group = wider
    if group:
        yield group


def _places(step: Step, requests: Sequence[int]) -> _Places:
    device = step.q.device
    begins = step.qo_indptr[list(requests)].long()
    qo_lens = step.qo_indptr.diff()[list(requests)]
    query = torch.arange(int(qo_lens.max()))
    is_query = query < qo_lens[:, None]
    padded = torch.where(is_query, begins[:, None] + query, begins[:, None])
    queries = is_query.flatten().nonzero().flatten()
    rows = padded.flatten()[queries]
    return _Places(padded.to(device), queries.to(device), rows.to(device))


def _padded_block(step: Step, requests: Sequence[int], padded: Tensor) -> DenseBlock:
    """Queries with the keys of their requests, KV heads not repeated.

    Returns:
        q f64[requests, num_kv_heads, group_size * queries, head_dim], k and v as q with keys in the
        place of rows, zero where no query looks, visible bool[requests, 1, rows, keys].
    """
    spec, device = step.spec, step.q.device
    index = list(requests)
    kv_lens = step.page_table.kv_lens[index].to(device)[:, None, None]
    qo_lens = step.qo_indptr.diff()[index].to(device)[:, None, None]
    pages = step.page_table.to_block_table(fill=0)[index].long()
    pages = pages[:, : -(-int(step.page_table.kv_lens[index].max()) // step.page_size)]
    kv = step.kv_cache[pages.to(device)].permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
    query = torch.arange(padded.shape[1], device=device)[:, None]
    key = torch.arange(kv.shape[3], device=device)
    position = kv_lens - qo_lens + query
    visible = (query < qo_lens) & (key < kv_lens)
    if spec.causal:
        visible &= key <= position
    if spec.window_left >= 0:
        visible &= position - key <= spec.window_left
    k, v = torch.where(visible.any(1)[:, None, :, None], kv, 0).double()
    heads = (spec.num_kv_heads, spec.group_size)
    q = step.q[padded].double().view(*padded.shape, *heads, spec.head_dim)
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
    visible = visible[:, None, None].expand(-1, 1, spec.group_size, -1, -1).flatten(2, 3)
    return DenseBlock(slice(0, 0), q, k, v, visible)


def _unpadded(out: Tensor, lse: Tensor, step: Step, places: _Places) -> AttentionOutput:
    """Rows of queries alone, in the order of `places.rows`, from packed and padded ones."""
    shape = (*lse.shape[:2], step.spec.group_size, places.padded.shape[1])
    out = out.reshape(*shape, -1).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    lse = lse.reshape(shape).permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1)
    return AttentionOutput(out[places.queries], lse[places.queries])

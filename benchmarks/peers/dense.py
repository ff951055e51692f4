"""PyTorch's own attention, on keys and values that were gathered into dense batches beforehand.

Gathering is not timed, so these are what paging costs nothing in: a bound, not a rival.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peer import Call, Peer

MAX_CACHE_BYTES = 8 * 10**9
"""The gathered copy doubles a case's memory."""
MAX_MASK_ENTRIES = 1 << 28
"""Pairs of query and key: building FlexAttention's block mask makes them all at once."""


def _dense_batch(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, len, head_dim] of queries, keys and values."""
    batch_size = len(inputs.case.qo_lens)
    gathered = [inputs.gather(request) for request in range(batch_size)]
    k, v = (torch.stack(list(parts)).transpose(1, 2) for parts in zip(*gathered, strict=True))
    q = inputs.q.view(batch_size, -1, *inputs.q.shape[1:]).transpose(1, 2)
    return q, k.contiguous(), v.contiguous()


def _rows(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def build_sdpa(inputs: Inputs) -> Call:
    """scaled_dot_product_attention; a single query sees all keys, so it needs no mask."""
    q, k, v = _dense_batch(inputs)
    is_causal = q.shape[2] > 1

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=inputs.case.spec.scale, enable_gqa=True
        )

    return Call(plan=lambda: None, run=run, rows=_rows)


def build_flex(inputs: Inputs) -> Call:
    """FlexAttention, compiled on a GPU; its plan is its block mask."""
    flex = _Flex(inputs)
    return Call(plan=flex.plan, run=flex.run, rows=_rows)


class _Flex:
    """FlexAttention with the mask of a case."""

    def __init__(self, inputs: Inputs) -> None:
        from torch.nn.attention.flex_attention import flex_attention  # slow to import

        self._batch = _dense_batch(inputs)
        self._case = inputs.case
        self._attend: Any = flex_attention
        if inputs.device.type == "cuda":
            torch._dynamo.reset()  # it gives up compiling after a few shapes
            self._attend = torch.compile(flex_attention, dynamic=False)
        self._mask: Any = None

    def plan(self) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        qo_len, kv_len = self._case.qo_lens[0], self._case.kv_lens[0]
        offset, window_left = kv_len - qo_len, self._case.window_left

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            position = query + offset
            seen = key <= position
            return seen & (key >= position - window_left) if window_left >= 0 else seen

        device = self._batch[0].device
        self._mask = create_block_mask(visible, None, None, qo_len, kv_len, device=device)

    def run(self) -> Any:
        q, k, v = self._batch
        scale = self._case.spec.scale
        return self._attend(q, k, v, block_mask=self._mask, scale=scale, enable_gqa=True)


def _takes_sdpa(case: Case) -> bool:
    """Its causal mask is aligned to the top left, so only whole prompts and single queries."""
    aligned = case.qo_lens[0] in (1, case.kv_lens[0])
    return case.is_uniform and aligned and case.window_left < 0 and _fits(case)


def _takes_flex(case: Case) -> bool:
    pairs = case.qo_lens[0] * case.kv_lens[0]
    return case.is_uniform and pairs <= MAX_MASK_ENTRIES and _fits(case)


def _fits(case: Case) -> bool:
    return case.cache_bytes <= MAX_CACHE_BYTES


DENSE = (
    Peer("torch-sdpa", "scaled_dot_product_attention", build_sdpa, _takes_sdpa),
    # compiled anew for every shape, for many seconds
    Peer("torch-flex", "flex_attention", build_flex, _takes_flex, by_default=False),
)

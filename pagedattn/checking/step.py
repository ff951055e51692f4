"""One attention step as tensors, and computing it with a backend or with the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.attention import AttentionOutput, PagedAttention
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Step:
    """Everything that one attention call reads.

    `page_table` and `qo_indptr` are on the host, `q` and `kv_cache` on the device under test.
    """

    spec: AttentionSpec
    page_table: PageTable
    qo_indptr: Tensor  # i32[batch + 1]
    q: Tensor  # dtype[tokens, num_qo_heads, head_dim]
    kv_cache: Tensor  # dtype[pages, 2, page_size, num_kv_heads, head_dim]

    @property
    def page_size(self) -> int:
        """Tokens in one page."""
        return self.page_table.page_size

    @property
    def qo_lens(self) -> list[int]:
        """Queries of each request."""
        lens: list[int] = self.qo_indptr.diff().tolist()
        return lens

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each request."""
        lens: list[int] = self.page_table.kv_lens.tolist()
        return lens

    def compacted(self) -> Step:
        """The same step on the CPU, holding the pages in use alone under new numbers.

        What the oracle reads: a cache of many gigabytes shrinks to what a step needs of it.
        """
        table = self.page_table
        used, renumbered = torch.unique(table.kv_indices, return_inverse=True)
        small = PageTable(table.page_size, table.kv_indptr, renumbered.int(), table.kv_lens)
        kv_cache = self.kv_cache[used.to(self.kv_cache.device).long()].cpu()
        return Step(self.spec, small, self.qo_indptr, self.q.cpu(), kv_cache)


Attend = Callable[[Step], AttentionOutput]
"""What the checks take, which is anything that computes attention of a step."""


def oracle(step: Step) -> AttentionOutput:
    """Attention of `step` in float64 on the CPU, by `ReferenceBackend`.

    Returns:
        f64[tokens, num_qo_heads, head_dim] and f64[tokens, num_qo_heads], never rounded.
    """
    small = step.compacted()
    backend = ReferenceBackend(small.spec, small.page_size, torch.device("cpu"), None)
    backend.plan(small.page_table, small.qo_indptr.numpy())
    out = torch.empty(small.q.shape, dtype=torch.float64)
    lse = torch.empty(small.q.shape[:2], dtype=torch.float64)
    backend.run(small.q, small.kv_cache, out, lse)
    return AttentionOutput(out, lse)


def attend_with(backend: str) -> Attend:
    """Make the function that computes a step with the backend of this name, with hostile habits.

    Another step is planned first, so that a stale plan shows, and `out` and `lse` are full of NaN
    before the run, so that an element that is never written shows.
    """

    def attend(step: Step) -> AttentionOutput:
        attn = PagedAttention(
            step.spec, step.page_size, backend=backend, device=step.kv_cache.device
        )
        attn.plan(decoy_of(step.page_table), step.qo_indptr)
        return run_hostile(attn, step)

    return attend


def run_hostile(attn: PagedAttention, step: Step) -> AttentionOutput:
    """Plan and run a step into an `out` and an `lse` that are full of NaN."""
    attn.plan(step.page_table, step.qo_indptr)
    out = torch.full_like(step.q, torch.nan)
    lse = torch.full(step.q.shape[:2], torch.nan, dtype=torch.float32, device=step.q.device)
    return attn.run_return_lse(step.q, step.kv_cache, out=out, lse=lse)


def decoy_of(table: PageTable) -> PageTable:
    """A legal table for the same cache and the same number of requests, with other contents."""
    lens = table.kv_lens.flip(0)
    backwards = table.kv_indices.flip(0).contiguous()
    return PageTable.from_lengths(lens.contiguous(), table.page_size, backwards)

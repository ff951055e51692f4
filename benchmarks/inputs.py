"""Tensors of a case, on memory that is taken once and serves every case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case
from pagedattn import PageTable

_FILL_AT_ONCE = 1 << 30
"""Elements that one call fills with random numbers."""
_ROOM = 0.7
"""Share of a GPU's free memory that keys and values may take."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What every backend is given: tables on the host, as an engine has them."""

    case: Case
    table: PageTable
    qo_indptr: Tensor  # i32[batch + 1]
    q: Tensor  # dtype[tokens, num_qo_heads, head_dim]
    kv_cache: Tensor  # dtype[pages, 2, page_size, num_kv_heads, head_dim]  page 0 is nobody's
    out: Tensor  # as q

    @property
    def device(self) -> torch.device:
        """Where attention runs."""
        return self.q.device

    @property
    def kv_arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """kv_indptr, kv_indices and last_page_len, as FlashInfer takes them."""
        return self.table.kv_indptr, self.table.kv_indices, self.table.last_page_len

    def part(self, begin: int, end: int) -> Inputs:
        """The step of the requests from `begin` to before `end`, on the same cache."""
        pages = self.table.kv_indptr[begin : end + 1]
        table = PageTable(
            self.table.page_size,
            pages - pages[0],
            self.table.kv_indices[int(pages[0]) : int(pages[-1])].clone(),
            self.table.kv_lens[begin:end].clone(),
        )
        tokens = self.qo_indptr[begin : end + 1]
        rows = slice(int(tokens[0]), int(tokens[-1]))
        qo_indptr = tokens - tokens[0]
        return Inputs(self.case, table, qo_indptr, self.q[rows], self.kv_cache, self.out[rows])

    def gather(self, request: int) -> tuple[Tensor, Tensor]:
        """Copy one request's keys and values: two of dtype[kv_len, num_kv_heads, head_dim]."""
        pages = self.table.pages_of(request).to(self.device)
        kv_len = int(self.table.kv_lens[request])
        k, v = (self.kv_cache[pages, i].flatten(0, 1)[:kv_len] for i in (0, 1))
        return k, v


class Memory:
    """Random keys, values and queries for the largest of some cases, made once.

    Args:
        cases: What it must serve. Those that do not fit are left out of account.
        device: Where.
        seed: Of the values.
    """

    def __init__(self, cases: Iterable[Case], device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.seed = seed
        self.max_cache_bytes = _free_bytes(device)
        fitting = [case for case in cases if case.cache_bytes <= self.max_cache_bytes]
        self._flat: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = {}
        generator = torch.Generator(device).manual_seed(seed)
        for dtype in dict.fromkeys(case.dtype for case in fitting):
            same = [case for case in fitting if case.dtype == dtype]
            kv = max(case.cache_bytes // dtype.itemsize for case in same)
            q = max(case.num_tokens * case.num_qo_heads * case.head_dim for case in same)
            kv_cache, queries, out = (
                torch.empty(n, dtype=dtype, device=device) for n in (kv, q, q)
            )
            for tensor in (kv_cache, queries):
                for part in tensor.split(_FILL_AT_ONCE):
                    part.normal_(generator=generator)
            self._flat[dtype] = (kv_cache, queries, out)

    def fits(self, case: Case) -> bool:
        """Whether there is room for a case."""
        return case.cache_bytes <= self.max_cache_bytes

    def inputs(self, case: Case) -> Inputs:
        """Lay a case over the memory; the tensors of the last case become meaningless."""
        kv_flat, q_flat, out_flat = self._flat[case.dtype]
        layer = (case.num_kv_heads, case.head_dim)
        shape = (case.num_pages + 1, 2, case.page_size, *layer)
        kv_cache = kv_flat[: case.cache_bytes // case.dtype.itemsize].view(shape)
        rows = (case.num_tokens, case.num_qo_heads, case.head_dim)
        q, out = (flat[: rows[0] * rows[1] * rows[2]].view(rows) for flat in (q_flat, out_flat))
        generator = torch.Generator().manual_seed(self.seed)
        pages = (torch.randperm(case.num_pages, generator=generator) + 1).int()
        table = PageTable.from_lengths(case.kv_lens, case.page_size, pages)
        qo_indptr = torch.tensor([0, *case.qo_lens]).cumsum(0).int()
        return Inputs(case, table, qo_indptr, q, kv_cache, out)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(device)
    return int(_ROOM * free)

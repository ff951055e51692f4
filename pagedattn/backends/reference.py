"""The oracle: paged attention in float64 and plain torch, one request and one query at a time.

It defines what is correct, so it is written to be read. It gathers only the keys and values that a
query may see; nothing is masked by adding minus infinity, so no garbage can reach a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.capacity import Capacity
from pagedattn.page_table import Int32s, PageTable
from pagedattn.slots import write_slots
from pagedattn.spec import AttentionSpec
from pagedattn.validation import KVCache, halves_of


class ReferenceBackend:
    """Float64 attention on a CPU or a GPU, in Python loops over requests."""

    capturable = False  # it reads lengths on the host in `run`
    no_batch_invariance = None  # each query is computed by itself
    no_device_plan = "it reads lengths on the host"

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
        batch_invariant: bool = False,
    ) -> None:
        self.spec = spec
        self.device = device
        self.num_rows = None if capacity is None else capacity.max_tokens

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, page_size: int, device: torch.device
    ) -> list[str]:
        """It computes everything that can be asked for, anywhere."""
        return []

    def plan(self, page_table: PageTable, qo_indptr: Int32s) -> None:
        """Keep copies of the table and of the query bounds."""
        self.kv_lens = page_table.kv_lens.tolist()
        self.qo_bounds = qo_indptr.tolist()
        self.pages = [page_table.pages_of(r).long() for r in range(page_table.batch_size)]
        slots = write_slots(page_table, torch.from_numpy(qo_indptr), self.num_rows)
        self.write_slots = slots.to(self.device)

    def plan_device(self, page_table: PageTable, qo_indptr: Tensor, num_pages: int) -> None:
        """Never called: see `no_device_plan`."""
        raise NotImplementedError(self.no_device_plan)

    def run(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Write `out` and `lse`, rounded once from float64."""
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        k_pages, v_pages = halves_of(kv_cache)
        for request, kv_len in enumerate(self.kv_lens):
            begin, end = self.qo_bounds[request : request + 2]
            k = _gather(k_pages, self.pages[request], kv_len)
            v = _gather(v_pages, self.pages[request], kv_len)
            first = kv_len - (end - begin)  # position of the request's first query
            for row in range(begin, end):
                low, high = visible_range(self.spec, kv_len, first + row - begin)
                if low < high:
                    o, log_sum = attend_one_query(
                        self.spec, q[row].double(), k[low:high], v[low:high]
                    )
                    out[row] = o
                    if lse is not None:
                        lse[row] = log_sum


def visible_range(spec: AttentionSpec, kv_len: int, position: int) -> tuple[int, int]:
    """Half-open range of the keys that the query at `position` sees."""
    low = max(0, position - spec.window_left) if spec.window_left >= 0 else 0
    high = min(kv_len, position + 1) if spec.causal else kv_len
    return low, high


def attend_one_query(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of one query over the keys it sees, all of them.

    Args:
        spec: Heads, scale and soft cap.
        q: f64[num_qo_heads, head_dim].
        k: f64[keys, num_kv_heads, head_dim], at least one key.
        v: As `k`.

    Returns:
        f64[num_qo_heads, head_dim] and the natural-log LSE f64[num_qo_heads].
    """
    grouped = q.view(spec.num_kv_heads, spec.group_size, spec.head_dim)
    scores = torch.einsum("hgd,khd->hgk", grouped, k) * spec.scale
    if spec.logits_soft_cap > 0:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("hgk,khd->hgd", torch.exp(scores - lse[..., None]), v)
    return out.reshape(spec.num_qo_heads, spec.head_dim), lse.reshape(spec.num_qo_heads)


def _gather(pages: Tensor, page_ids: Tensor, kv_len: int) -> Tensor:
    """f64[kv_len, num_kv_heads, head_dim]: a request's keys or values, valid slots only."""
    page_size = pages.shape[1]
    token = torch.arange(kv_len)
    return pages[
        page_ids[token // page_size].to(pages.device), (token % page_size).to(pages.device)
    ].double()

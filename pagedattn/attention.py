"""`PagedAttention`: one interface over every backend.

What the parameters mean, for every backend alike:

- Query `i` of a request with `qo_len` queries and `kv_len` keys sits at position
  `p = kv_len - qo_len + i` (bottom-right alignment). Causal: key `j` is visible iff `j <= p`.
- `window_left = w >= 0`: additionally `j >= p - w`, so `w + 1` keys with a causal mask; `-1`: no
  bound. Without a causal mask the right side stays open.
- Lengths are those after this step's tokens. A page table holds exactly `ceil(kv_len / page_size)`
  pages a request; pages may be shared.
- score = `soft_cap(q·k * sm_scale)`, then the mask. `lse` is the natural logarithm of the sum of
  exponentials of the visible scores.
- A query that sees no key gives `out = 0` and `lse = -inf`. Requests without queries, requests
  without keys and empty batches are legal.
- What is in a slot that a request may not see never changes its output, NaN and infinity included.
- Prefill, decode, chunked prefill, speculative decode and mixed steps are not modes: query lengths
  are data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedattn.backends import UnsupportedSpec, load_backend, unsupported_reasons
from pagedattn.capacity import Capacity
from pagedattn.device import is_capturing, on_device, resolve_device
from pagedattn.operators import dispatch, register
from pagedattn.page_table import Int32s, PageTable
from pagedattn.spec import AttentionSpec
from pagedattn.validation import (
    KVCache,
    check_device,
    check_device_table,
    check_index_tensor,
    check_indptr,
    check_is_tensor,
    check_lse,
    check_page_table,
    check_query,
    layout_of,
    layout_of_cache,
    split_kv_cache,
)
from pagedattn.watch import Watch, Watcher


class AttentionOutput(NamedTuple):
    """Attention and its log-sum-exp."""

    out: Tensor  # dtype[tokens, num_qo_heads, head_dim]
    lse: Tensor  # f32[tokens, num_qo_heads]  natural logarithm; -inf where no key is visible


class _Step(NamedTuple):
    """What `run` must know of the last good plan."""

    batch_size: int
    num_tokens: int | None  # query tokens; unknown on the host after plan_device
    num_table_pages: int  # entries of the page table
    num_rows: int  # rows of q and out
    num_pages: int  # pages that a cache must have
    is_watched: bool = False  # the shadow was told of it


class PagedAttention:
    """Attention over a paged KV cache: `plan` once a step, `run` once a layer.

    Args:
        spec: The layer kind. One object serves every layer of this kind.
        page_size: Tokens in one page.
        backend: "flashinfer", "triton" or "reference".
        device: Where `q` and the cache are; by default the current GPU, or the CPU without one.
        capacity: The largest step. When given, no address changes after construction, and `run`
            may be captured in a CUDA graph and replayed after later plans.
        shadow: Compares a sample of the steps with another backend: `pagedattn.Shadow(...)`.
        batch_invariant: The bits of a request's output depend on that request and the device alone:
            not on the other requests of a step, nor on its place among them, nor on a capacity.

    Raises:
        ValueError: An argument is out of its range, or no backend has this name.
        UnsupportedSpec: The backend cannot compute this here; the message lists every reason.

    Example:
        >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> attn = PagedAttention(spec, page_size=4, backend="reference", device="cpu")
        >>> attn.plan(PageTable.from_lengths([5, 3], page_size=4))
        >>> q, kv_cache = torch.randn(2, 4, 16), torch.randn(3, 2, 4, 2, 16)
        >>> attn.run(q, kv_cache).shape
        torch.Size([2, 4, 16])
    """

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        *,
        backend: str,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        shadow: Watcher | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.spec = spec
        self.page_size = page_size
        self.backend = backend
        self.device = resolve_device(device)
        self.capacity = capacity
        self.batch_invariant = batch_invariant
        reasons = unsupported_reasons(
            backend, spec, page_size, self.device, batch_invariant=batch_invariant
        )
        if reasons:
            raise UnsupportedSpec(backend, reasons)
        with on_device(self.device):
            self._backend = load_backend(backend)(
                spec, page_size, self.device, capacity, batch_invariant
            )
        self._step: _Step | None = None
        self.shadow: Watch | None = None
        if shadow is not None:
            self.shadow = shadow.watch(spec, page_size, backend, self.device, capacity)
        self.number = register(self)
        self._accepted: tuple[object, ...] = ()  # layouts of the last run that passed the checks
        self._one_token_each = np.zeros(1, dtype=np.int32)

    def plan(self, page_table: PageTable, qo_indptr: Tensor | None = None) -> None:
        """Make ready for a step.

        Host tables cost no synchronisation. Tables on the GPU are right too, and cost one: their
        values are read here.

        Args:
            page_table: The step's pages and lengths, this step's new tokens included.
            qo_indptr: i32[batch + 1], where each request's query tokens begin; `None`: one query
                token a request (decode).

        Raises:
            ValueError: The table or `qo_indptr` is wrong, or exceeds the capacity. The object is
                then without a plan until the next good one.
            RuntimeError: A CUDA graph is being captured.
        """
        self._step = None
        if is_capturing(self.device):
            raise RuntimeError("plan() cannot be captured in a CUDA graph: plan before the capture")
        table = page_table if page_table.kv_lens.is_cpu else page_table.to("cpu")
        num_pages = check_page_table(table, self.page_size)
        batch_size, num_table_pages = len(table.arrays.kv_lens), len(table.arrays.kv_indices)
        if qo_indptr is None:
            query_bounds = self._decode_bounds(batch_size)
        else:
            check_is_tensor(qo_indptr, "qo_indptr")
            qo_indptr = qo_indptr if qo_indptr.is_cpu else qo_indptr.to("cpu")
            query_bounds = check_indptr(qo_indptr, "qo_indptr", batch_size)
        num_tokens = int(query_bounds[-1])
        if self.capacity is not None:
            self.capacity.check_fits(
                batch_size=batch_size, num_tokens=num_tokens, num_pages=num_table_pages
            )
        with on_device(self.device):
            self._backend.plan(table, query_bounds)
        num_rows = num_tokens if self.capacity is None else self.capacity.max_tokens
        is_watched = self.shadow is not None
        if self.shadow is not None:
            self.shadow.begin_step(table, torch.from_numpy(query_bounds))
        self._step = _Step(batch_size, num_tokens, num_table_pages, num_rows, num_pages, is_watched)

    def plan_device(
        self, page_table: PageTable, qo_indptr: Tensor | None = None, *, num_pages: int
    ) -> None:
        """Make ready for a step whose table exists on the device alone, without waiting for it.

        For engines that schedule ahead. Needs a capacity, and a backend that plans on the device.
        No value is read by the host, so none can be refused. Values that `plan` would refuse give
        a wrong answer for some requests and no error, but never a read or write out of bounds:
        bounds are made to rise within the capacity, a request has at most the keys that its pages
        hold, and page ids are held below `num_pages`. Such a step is not compared by a shadow,
        which reads tables on the host.

        Args:
            page_table: As for `plan`, on this object's device. `kv_indices` may have more entries
                than `kv_indptr` says. Requests that do not exist have no pages, keys or queries.
            qo_indptr: As for `plan`, on this object's device.
            num_pages: Pages that the caches of `run` have.

        Raises:
            RuntimeError: There is no capacity.
            UnsupportedSpec: The backend plans on the host.
            ValueError: A dtype, shape or device is wrong, or an array is larger than the capacity.
        """
        self._step = None
        if (reason := self._backend.no_device_plan) is not None:
            raise UnsupportedSpec(self.backend, [f"plan_device: {reason}"])
        if self.capacity is None:
            raise RuntimeError(
                "plan_device needs a capacity, as the host does not know how large the step is: "
                "build it with PagedAttention(..., capacity=Capacity(...))"
            )
        batch_size = check_device_table(page_table, self.page_size, self.device)
        if qo_indptr is None:
            qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
        check_index_tensor(qo_indptr, "qo_indptr", batch_size + 1)
        check_device(qo_indptr, "qo_indptr", self.device)
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        num_table_pages = page_table.kv_indices.shape[0]
        self.capacity.check_fits(
            batch_size=batch_size, num_tokens=batch_size, num_pages=num_table_pages
        )
        with on_device(self.device):
            self._backend.plan_device(page_table, qo_indptr, num_pages)
        num_rows = self.capacity.max_tokens
        self._step = _Step(batch_size, None, num_table_pages, num_rows, num_pages, is_watched=False)

    @property
    def write_slots(self) -> Tensor:
        """i64[tokens] on the device: where the planned step's new keys and values belong.

        With a capacity i64[max_tokens], -1 in the padding, always at one address. The input of
        `PagedKVCache.append`; see `pagedattn.slots.write_slots`.
        """
        self._planned_step()
        return self._backend.write_slots

    def run(self, q: Tensor, kv_cache: KVCache, *, out: Tensor | None = None) -> Tensor:
        """Compute attention of the planned step for one layer.

        Args:
            q: dtype[tokens, num_qo_heads, head_dim], the planned query tokens in order; with a
                capacity, exactly `max_tokens` rows. Tokens may be strided.
            kv_cache: One layer: dtype[pages, 2, page_size, num_kv_heads, head_dim], or a pair
                (k_pages, v_pages) of dtype[pages, page_size, num_kv_heads, head_dim].
                Pages and tokens may be strided.
            out: As `q`; where given, it is written and returned.

        Returns:
            dtype[tokens, num_qo_heads, head_dim].

        Raises:
            RuntimeError: There is no good plan, or a CUDA graph captures an object without
                capacity.
            ValueError: A tensor has a wrong shape, dtype or device.
        """
        return self._run(q, kv_cache, out, None)

    def run_return_lse(
        self, q: Tensor, kv_cache: KVCache, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> AttentionOutput:
        """Like `run`, and return the log-sum-exp too.

        Args:
            q: As for `run`.
            kv_cache: As for `run`.
            out: As for `run`.
            lse: Contiguous f32[tokens, num_qo_heads]; where given, it is written and returned.
        """
        if lse is None:
            rows = q.shape[0] if q.ndim else 0  # a q without rows is refused below
            heads = self.spec.num_qo_heads  # not as a tuple: that costs torch half as much again
            lse = torch.empty(rows, heads, dtype=torch.float32, device=self.device)
        return AttentionOutput(self._run(q, kv_cache, out, lse), lse)

    def run_checked(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Check all tensors, then write `out` and `lse`: what the operator calls.

        Args:
            q: As for `run`.
            kv_cache: As for `run`.
            out: As `q`.
            lse: As for `run_return_lse`; `None`: not wanted.
        """
        step = self._planned_step()
        self._check_capture()
        layouts = (
            step.num_rows, step.num_pages,
            layout_of(q), layout_of(out), layout_of(lse), layout_of_cache(kv_cache),
        )  # fmt: skip
        if layouts != self._accepted:
            self._check_run(step, q, kv_cache, out, lse)
            self._accepted = layouts
        if step.num_rows:
            with on_device(self.device):
                self._backend.run(q, kv_cache, out, lse)
            if self.shadow is not None and step.is_watched:
                self.shadow.after_run(q, kv_cache, out, lse)

    def _run(self, q: Tensor, kv_cache: KVCache, out: Tensor | None, lse: Tensor | None) -> Tensor:
        if out is None:  # empty_like: a third of what empty costs the host
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        dispatch(self, q, kv_cache, out, lse)
        return out

    def _check_run(
        self, step: _Step, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None
    ) -> None:
        """Check what `run` was given; only shapes, strides, dtypes and devices are asked for."""
        check_query(q, "q", self.spec, step.num_rows, self.device)
        split_kv_cache(kv_cache, self.spec, self.page_size, step.num_pages, self.device)
        if lse is not None:
            check_lse(lse, self.spec, step.num_rows, self.device)
        check_query(out, "out", self.spec, step.num_rows, self.device)

    def _decode_bounds(self, batch_size: int) -> Int32s:
        """i32[batch + 1]: one query token a request; kept from step to step."""
        if len(self._one_token_each) != batch_size + 1:
            self._one_token_each = np.arange(batch_size + 1, dtype=np.int32)
        return self._one_token_each

    def _planned_step(self) -> _Step:
        if self._step is None:
            raise RuntimeError(
                "there is no plan: call plan() first, and again after one that failed"
            )
        return self._step

    def _check_capture(self) -> None:
        if self.device.type != "cuda" or (self.capacity is not None and self._backend.capturable):
            return
        if not torch.cuda.is_current_stream_capturing():
            return
        if self.capacity is None:
            raise RuntimeError(
                "a CUDA graph is capturing run() of an object without capacity: replays would read "
                "stale plans; build it with PagedAttention(..., capacity=Capacity(...))"
            )
        if not self._backend.capturable:
            raise RuntimeError(f"backend {self.backend!r} cannot be captured in a CUDA graph")

    def __repr__(self) -> str:
        step, plan = self._step, "no plan"
        if step is not None:
            tokens = "" if step.num_tokens is None else f"{step.num_tokens} query tokens, "
            plan = (
                f"{step.batch_size} requests planned: {tokens}"
                f"{step.num_table_pages} pages in their tables"
            )
        return (
            f"PagedAttention({self.spec}, page_size={self.page_size}, backend={self.backend!r}, "
            f"device='{self.device}', capacity={self.capacity}, "
            f"batch_invariant={self.batch_invariant}) with {plan}"
        )

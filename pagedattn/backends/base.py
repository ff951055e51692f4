"""What a backend is: three methods, and a list of reasons for what it cannot do.

The facade has checked everything before it calls a backend: tables are right and on the host,
tensors have the planned shapes and are on the backend's device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pagedattn.capacity import Capacity
from pagedattn.page_table import Int32s, PageTable
from pagedattn.spec import AttentionSpec
from pagedattn.validation import KVCache


class UnsupportedSpec(ValueError):
    """A backend cannot compute what was asked for; the message lists every reason."""

    def __init__(self, backend: str, reasons: list[str]) -> None:
        self.backend = backend
        self.reasons = reasons
        super().__init__(
            f"backend {backend!r} cannot compute this:" + "".join(f"\n  - {r}" for r in reasons)
        )


class Backend(Protocol):
    """One way of computing paged attention."""

    capturable: bool
    """Whether `run` may be captured in a CUDA graph when a capacity is given."""

    no_batch_invariance: str | None
    """Why a request's bits depend on the rest of its batch; `None`: with `batch_invariant` they
    do not."""

    no_device_plan: str | None
    """Why a table must be on the host; `None`: `plan_device` takes one on the device."""

    @property
    def write_slots(self) -> Tensor:
        """i64[tokens], with a capacity i64[max_tokens], on the device, of the last plan.

        See `pagedattn.slots.write_slots`.
        """
        ...

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        capacity: Capacity | None,
        batch_invariant: bool = False,
    ) -> None: ...

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, page_size: int, device: torch.device
    ) -> list[str]:
        """Every reason why this backend cannot compute `spec` here; empty when it can."""
        ...

    def plan(self, page_table: PageTable, qo_indptr: Int32s) -> None:
        """Make ready for a step. Both are on the host; nothing is kept of them but copies."""
        ...

    def plan_device(self, page_table: PageTable, qo_indptr: Tensor, num_pages: int) -> None:
        """Make ready for a step that the host knows nothing of but the sizes of its arrays.

        Called only with a capacity, and where `no_device_plan` is `None`.

        Args:
            page_table: The step's table, on the device; `kv_indices` may be longer than needed.
            qo_indptr: i32[batch + 1], on the device.
            num_pages: Pages of the cache. No other is read, whatever the table holds.
        """
        ...

    def run(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Write `out`, and `lse` (natural logarithm) where it is given."""
        ...

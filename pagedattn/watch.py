"""What may look on while `PagedAttention` serves: asked at every step, imported by nobody below.

`PagedAttention(shadow=...)` takes a `Watcher`; `pagedattn.checking.shadow` has the one that exists.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagedattn.capacity import Capacity
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec
from pagedattn.validation import KVCache


class WatchCounts(NamedTuple):
    """What a watch has done so far."""

    steps: int  # planned, those without a query left out
    checked: int  # of these, compared with another backend
    doubtful: int  # of these, settled in float64
    mismatches: int  # of these, with a wrong answer
    failed: int  # where the watch itself raised an error


class Watch(Protocol):
    """Looks at the steps of one `PagedAttention`, and keeps nothing of them."""

    @property
    def counts(self) -> WatchCounts:
        """What has been done so far."""
        ...

    def begin_step(self, page_table: PageTable, qo_indptr: Tensor) -> None:
        """A step was planned. Both are right and on the host; what is kept must be copied."""
        ...

    def after_run(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """The backend was asked for the planned step: `out`, and `lse` where given, are its."""
        ...


class Watcher(Protocol):
    """Makes a watch for each `PagedAttention` that it is given to."""

    def watch(
        self,
        spec: AttentionSpec,
        page_size: int,
        backend: str,
        device: torch.device,
        capacity: Capacity | None,
    ) -> Watch:
        """Look at the steps of an object with these properties."""
        ...

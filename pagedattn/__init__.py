"""Attention over paged KV caches: one interface, and the checks that prove it right."""

import sys
from typing import TYPE_CHECKING

from pagedattn.attention import AttentionOutput, PagedAttention
from pagedattn.backends import UnsupportedSpec, backend_names, unsupported_reasons
from pagedattn.capacity import Capacity
from pagedattn.kv_cache import OutOfPages, PageAllocator, PagedKVCache
from pagedattn.page_table import PageTable
from pagedattn.slots import write_slots
from pagedattn.spec import AttentionSpec

if TYPE_CHECKING:
    from pagedattn.checking.shadow import Shadow

__version__ = "0.1.0"

__all__ = [
    "AttentionOutput",
    "AttentionSpec",
    "Capacity",
    "OutOfPages",
    "PageAllocator",
    "PageTable",
    "PagedAttention",
    "PagedKVCache",
    "Shadow",
    "UnsupportedSpec",
    "backend_names",
    "unsupported_reasons",
    "write_slots",
]


def __getattr__(name: str) -> object:
    # importing it brings in what checks need, and serving without it should not wait for that
    if name == "Shadow":
        from pagedattn.checking.shadow import Shadow

        return Shadow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if sys.modules.get("hypothesis.strategies"):  # its entry point was called before this import
    from pagedattn.registration import register_strategies

    register_strategies()

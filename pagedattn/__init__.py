"""Attention over paged KV caches: one interface, and the checks that prove it right."""

from pagedattn.attention import AttentionOutput, PagedAttention
from pagedattn.backends import UnsupportedSpec, backend_names, unsupported_reasons
from pagedattn.capacity import Capacity
from pagedattn.kv_cache import OutOfPages, PageAllocator, PagedKVCache
from pagedattn.page_table import PageTable, write_slots
from pagedattn.spec import AttentionSpec

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
    "UnsupportedSpec",
    "backend_names",
    "unsupported_reasons",
    "write_slots",
]

"""Hypothesis strategies for testing paged attention, ours or anybody's. Needs `pagedattn[testing]`.

Every strategy draws structure and a seed, never floats; `Batch.materialise` makes the tensors.
`PageAllocatorMachine` tests an allocator of pages, through an `AllocatorAdapter`.
"""

from pagedattn.checking.batch import Batch
from pagedattn.checking.sequence import ReplaySequence
from pagedattn.testing.allocator_adapter import AllocatorAdapter, OutOfPages
from pagedattn.testing.allocator_machine import PageAllocatorMachine
from pagedattn.testing.strategies import (
    batches,
    kv_lengths,
    mixed_batches,
    page_sizes,
    page_tables,
    query_lengths,
    replay_sequences,
    specs,
    windows,
)

__all__ = [
    "AllocatorAdapter",
    "Batch",
    "OutOfPages",
    "PageAllocatorMachine",
    "ReplaySequence",
    "batches",
    "kv_lengths",
    "mixed_batches",
    "page_sizes",
    "page_tables",
    "query_lengths",
    "replay_sequences",
    "specs",
    "windows",
]

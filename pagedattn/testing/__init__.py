"""Hypothesis strategies for testing paged attention, ours or anybody's. Needs `pagedattn[testing]`.

Every strategy draws structure and a seed, never floats; `Batch.materialise` makes the tensors.
"""

from pagedattn.checking.batch import Batch
from pagedattn.testing.strategies import (
    batches,
    kv_lengths,
    mixed_batches,
    page_sizes,
    page_tables,
    query_lengths,
    specs,
    windows,
)

__all__ = [
    "Batch",
    "batches",
    "kv_lengths",
    "mixed_batches",
    "page_sizes",
    "page_tables",
    "query_lengths",
    "specs",
    "windows",
]

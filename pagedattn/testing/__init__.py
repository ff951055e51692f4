"""Hypothesis strategies for testing paged attention, ours or anybody's. Needs `pagedattn[testing]`.

Every strategy draws structure and a seed, never floats; `Batch.materialise` makes the tensors.
"""

from pagedattn.checking.batch import Batch
from pagedattn.checking.sequence import ReplaySequence
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
    "Batch",
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

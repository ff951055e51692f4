"""Hypothesis strategies for testing paged attention, ours or anybody's. Needs `pagedattn[testing]`.

Every strategy draws structure and a seed, never floats; `Batch.materialise` makes the tensors,
and `assert_attention` says whether an answer is right and, if not, what kind of wrong it is.
`PageAllocatorMachine` tests an allocator of pages, through an `AllocatorAdapter`.
"""

from hypothesis import strategies as _st

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
from pagedattn.testing.verdict import assert_attention

__all__ = [
    "AllocatorAdapter",
    "Batch",
    "OutOfPages",
    "PageAllocatorMachine",
    "ReplaySequence",
    "assert_attention",
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

_st.register_type_strategy(Batch, batches())
_st.register_type_strategy(ReplaySequence, replay_sequences())

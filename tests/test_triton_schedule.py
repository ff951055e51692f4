"""The device-built schedule against one made by hand in Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.attention import resolve_device
from pagedattn.backends import unsupported_reasons
from pagedattn.capacity import Capacity
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

REASONS = unsupported_reasons("triton", AttentionSpec(1, 1, 16), 16, resolve_device(None))
if REASONS:
    pytest.skip("; ".join(REASONS), allow_module_level=True)

from pagedattn.backends.triton.backend import TritonBackend
from pagedattn.backends.triton.schedule import size_of_capacity, size_of_step

HEADS = st.sampled_from([(1, 1), (4, 2), (5, 1), (24, 2), (48, 1)])
LENGTHS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 2, 7, 16, 17, 64, 65, 128, 200]),
        st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129, 1000, 5000]),
    ),
    min_size=1,
    max_size=9,
)
WINDOWS = st.sampled_from([-1, 0, 1, 15, 16, 128, 2000])


def planned(spec: AttentionSpec, qo_lens, kv_lens, capacity=None) -> TritonBackend:
    backend = TritonBackend(spec, 16, resolve_device(None), capacity)
    qo_indptr = torch.tensor([0, *np.cumsum(qo_lens)], dtype=torch.int32)
    backend.plan(PageTable.from_lengths(list(kv_lens), 16), qo_indptr)
    return backend


def lists_by_hand(backend: TritonBackend, qo_lens, kv_lens) -> tuple[list, list, int]:
    """Short entries, long entries and the chunk, one request after another."""
    spec, tiles = backend.spec, backend.tiles
    tile, work = tiles.short.tile, []
    for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
        first = max(0, kv_len - qo_len - spec.window_left) if spec.window_left >= 0 else 0
        work.append(max(0, -(-kv_len // tile) - first // tile))
    rows = [n * spec.group_size for n in qo_lens]
    short = [0 < n <= tiles.max_short_rows for n in rows]
    blocks = [-(-n // tiles.short.rows) for n in rows]
    cost = sum(w * b for w, b, s in zip(work, blocks, short, strict=True) if s)
    chunk = max(-(-cost * spec.num_kv_heads // tiles.short_programs), tiles.min_chunk)
    short_units, long_units = [], []
    for request, n in enumerate(rows):
        if short[request]:
            splits = max(1, -(-work[request] // chunk))
            short_units += [
                [request, block, split, splits]
                for block in range(blocks[request])
                for split in range(splits)
            ]
        elif n:
            long_units += [[request, b] for b in reversed(range(-(-n // tiles.long.rows)))]
    return short_units, long_units, chunk


@given(heads=HEADS, lengths=LENGTHS, window_left=WINDOWS)
def test_both_lists_are_those_made_by_hand(heads, lengths, window_left):
    spec = AttentionSpec(*heads, head_dim=64, window_left=window_left)
    qo_lens, kv_lens = zip(*lengths, strict=True)
    backend = planned(spec, qo_lens, kv_lens)
    short_units, long_units, chunk = lists_by_hand(backend, qo_lens, kv_lens)
    if not short_units and not long_units:
        return
    buffers = backend._buffers
    num_short, num_long, got_chunk, _ = buffers.header.tolist()
    assert (num_short, num_long) == (len(short_units), len(long_units))
    assert got_chunk == chunk
    assert buffers.short_units[:num_short].tolist() == short_units
    assert buffers.long_units[:num_long].tolist() == long_units


@given(heads=HEADS, lengths=LENGTHS, window_left=WINDOWS)
def test_a_schedule_never_exceeds_its_bound(heads, lengths, window_left):
    spec = AttentionSpec(*heads, head_dim=64, window_left=window_left)
    qo_lens, kv_lens = zip(*lengths, strict=True)
    backend = planned(spec, qo_lens, kv_lens)
    short_units, long_units, _ = lists_by_hand(backend, qo_lens, kv_lens)
    size = size_of_step(np.array(qo_lens), spec, backend.tiles)
    assert len(short_units) <= size.short_units
    assert len(long_units) <= size.long_units
    capacity = Capacity(len(lengths), max(sum(qo_lens), len(lengths)), 10_000)
    assert size_of_capacity(capacity, spec, backend.tiles).covers(size)


def test_with_a_capacity_the_padding_rows_are_a_request_without_keys():
    spec = AttentionSpec(4, 2, head_dim=64)
    backend = planned(spec, [1, 1], [100, 300], Capacity(8, 300, 100))
    num_short, num_long, _, _ = backend._buffers.header.tolist()
    rows = (300 - 2) * spec.group_size
    assert num_long == -(-rows // backend.tiles.long.rows)
    assert set(backend._buffers.long_units[:num_long, 0].tolist()) == {2}
    assert set(backend._buffers.short_units[:num_short, 0].tolist()) == {0, 1}


@pytest.mark.parametrize("batch_size", [1023, 1024, 1025, 2049])
def test_a_batch_beyond_one_block_of_the_plan_is_scheduled_whole(batch_size):
    spec = AttentionSpec(1, 1, head_dim=64)
    qo_lens = [1] * batch_size
    backend = planned(spec, qo_lens, [3] * batch_size)
    num_short = int(backend._buffers.header[0])
    assert backend._buffers.short_units[:num_short, 0].tolist() == list(range(batch_size))

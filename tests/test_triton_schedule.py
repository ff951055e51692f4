"""The device-built schedule against one made by hand in Python."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.backends import unsupported_reasons
from pagedattn.capacity import Capacity
from pagedattn.device import resolve_device
from pagedattn.page_table import PageTable
from pagedattn.slots import write_slots
from pagedattn.spec import AttentionSpec

REASONS = unsupported_reasons("triton", AttentionSpec(1, 1, 16), 16, resolve_device(None))
if REASONS:
    pytest.skip("; ".join(REASONS), allow_module_level=True)

from pagedattn.backends.triton.backend import TritonBackend  # noqa: E402
from pagedattn.backends.triton.schedule import StepSize, max_long_blocks, max_pieces  # noqa: E402
from pagedattn.backends.triton.tiles import choose_tiles  # noqa: E402
from pagedattn.kernels.plan import _even_chunk  # noqa: E402

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


def planned(spec: AttentionSpec, qo_lens, kv_lens, capacity=None, **options) -> TritonBackend:
    backend = TritonBackend(spec, 16, resolve_device(None), capacity, **options)
    qo_indptr = torch.tensor([0, *np.cumsum(qo_lens)], dtype=torch.int32)
    backend.plan(PageTable.from_lengths(list(kv_lens), 16), qo_indptr.numpy())
    return backend


def by_hand(backend: TritonBackend, qo_lens, kv_lens) -> tuple[list[int], list[list[int]]]:
    """The tiles of each short request for one KV head, and the long entries."""
    spec, tiles = backend.spec, backend.tiles
    tile, short_work, long_units = tiles.short.tile, [], []
    for request, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        first = max(0, kv_len - qo_len - spec.window_left) if spec.window_left >= 0 else 0
        visited = max(1, -(-kv_len // tile) - first // tile)
        rows = qo_len * spec.group_size
        is_short = rows <= tiles.max_short_rows
        short_work.append(-(-rows // tiles.short.rows) * visited if is_short else 0)
        if not is_short:
            blocks = -(-rows // tiles.long.rows)
            long_units += [[request, block] for block in reversed(range(blocks))]
    return short_work, long_units


@given(heads=HEADS, lengths=LENGTHS, window_left=WINDOWS)
def test_the_schedule_is_the_one_made_by_hand(heads, lengths, window_left):
    spec = AttentionSpec(*heads, head_dim=64, window_left=window_left)
    qo_lens, kv_lens = zip(*lengths, strict=True)
    backend = planned(spec, qo_lens, kv_lens)
    if sum(qo_lens) == 0:
        return
    work, long_units = by_hand(backend, qo_lens, kv_lens)
    buffers, chunks = backend._buffers, backend.tiles.short_chunks
    chunk, num_tiles, num_long, _ = buffers.header.tolist()
    assert num_tiles == sum(work)
    assert chunk == chunk_by_hand(backend, qo_lens, kv_lens)
    ends = [0, *np.cumsum(work).tolist()]
    assert buffers.short_ends[: len(work) + 1].tolist() == ends
    assert buffers.long_units[:num_long].tolist() == long_units
    begins = [min(index * chunk, num_tiles) for index in range(chunks + 1)]
    assert buffers.short_begin[: chunks + 1].tolist() == begins
    for begin, first in zip(begins, buffers.short_first.tolist(), strict=False):
        if begin < num_tiles:  # the request that owns the chunk's first tile
            assert ends[first] <= begin < ends[first + 1]


@pytest.mark.parametrize(
    ("num_kv_heads", "qo_lens", "kv_lens", "heads_at_once"),
    [
        (4, [900], [900], 4),
        (4, [900, 1], [900, 70], 2),
        (3, [900, 1], [900, 70], 1),
        (4, [900, 900], [900, 1001], 2),
        (4, [900, 0], [900, 5000], 4),  # keys that nobody reads
        (1, [900], [1001], 1),
    ],
)
def test_few_heads_at_a_time_where_l2_does_not_keep_all(
    monkeypatch, num_kv_heads, qo_lens, kv_lens, heads_at_once
):
    spec = AttentionSpec(num_kv_heads, num_kv_heads, head_dim=64)

    def choose(*arguments):
        return replace(choose_tiles(*arguments), far_keys=1000)

    monkeypatch.setattr("pagedattn.backends.triton.tiles.choose_tiles", choose)
    backend = planned(spec, qo_lens, kv_lens)
    assert backend._buffers.header.tolist()[3] == heads_at_once


def chunk_by_hand(backend: TritonBackend, qo_lens, kv_lens) -> int:
    """Tiles of a chunk, where blocks of unequal length allow no other."""
    work, _ = by_hand(backend, qo_lens, kv_lens)
    chunk = max(-(-sum(work) // backend.tiles.short_chunks), backend.tiles.min_chunk)
    tiles_of_block = {
        total // -(-qo_len * backend.spec.group_size // backend.tiles.short.rows)
        for total, qo_len, kv_len in zip(work, qo_lens, kv_lens, strict=True)
        if total and kv_len
    }
    return even_chunk(chunk, *tiles_of_block) if len(tiles_of_block) == 1 else chunk


def even_chunk(chunk: int, tiles: int) -> int:
    """The least chunk, a fortieth larger at most, that blocks are whole in or divide into."""
    for larger in range(chunk, chunk * 41 // 40 + 1):
        if larger % tiles == 0 or tiles % larger == 0:
            return larger
    return chunk


@triton.jit
def store_even_chunks(OUT, tiles, NUM: tl.constexpr):
    chunk = 1 + tl.arange(0, NUM)
    tl.store(OUT + chunk - 1, _even_chunk(chunk, tiles))


@pytest.mark.parametrize("tiles", [1, 2, 17, 60, 64, 65, 128, 512])
def test_an_even_chunk_is_the_least_that_divides_or_is_divided(tiles):
    out = torch.empty(1024, dtype=torch.int32, device=resolve_device(None))
    store_even_chunks[(1,)](out, tiles, 1024)
    assert out.tolist() == [even_chunk(chunk, tiles) for chunk in range(1, 1025)]


FOR_64 = Capacity(64, 64, 5000)


@pytest.mark.parametrize("capacity", [None, FOR_64])
@pytest.mark.parametrize(
    ("heads", "qo_lens", "kv_lens", "cut"),
    [
        ((4, 2), [1] * 63, [1024] * 63, False),  # 126 tiles a chunk: 128
        ((4, 2), [1] * 30 + [0] + [1] * 33, [1024] * 30 + [500] + [1024] * 33, False),
        ((4, 2), [1] * 26, [1024] * 25 + [800], True),
        ((4, 2), [1] * 25, [1024] * 25, True),  # 50 tiles a chunk: 56 would be too many
        # 48 rows: with the capacity three blocks a request, 126 tiles a chunk: 128; else one, 42
        ((16, 1), [3] * 21, [1024] * 21, None),
    ],
)
def test_blocks_of_equal_length_are_cut_only_where_whole_ones_would_be_unequal_work(
    heads, qo_lens, kv_lens, cut, capacity
):
    spec = AttentionSpec(*heads, head_dim=64)
    backend = planned(spec, qo_lens, kv_lens, capacity)
    if backend.tiles.short_chunks != 4 or backend.tiles.short.tile != 128:
        pytest.skip("the numbers are those of the interpreter's tiles")
    work, _ = by_hand(backend, qo_lens, kv_lens)
    begins = backend._buffers.short_begin.tolist()
    cut = capacity is None if cut is None else cut
    assert any(begin % 8 for begin in begins if begin < sum(work)) == cut


def cuts_of_request(backend: TritonBackend, qo_len: int, tiles: int) -> list[int]:
    """Where pieces of one batch-invariant block begin, by the request's own numbers."""
    spec, choices = backend.spec, backend.tiles
    blocks = -(-qo_len * spec.group_size // choices.short.rows)
    alone = -(-tiles * blocks // choices.short_chunks)
    return list(range(0, tiles, max(alone, choices.min_piece * blocks)))


@given(heads=HEADS, lengths=LENGTHS, window_left=WINDOWS)
def test_batch_invariant_chunks_begin_where_pieces_do(heads, lengths, window_left):
    spec = AttentionSpec(*heads, head_dim=64, window_left=window_left)
    qo_lens, kv_lens = zip(*lengths, strict=True)
    backend = planned(spec, qo_lens, kv_lens, batch_invariant=True)
    if sum(qo_lens) == 0:
        return
    work, _ = by_hand(backend, qo_lens, kv_lens)
    cuts, piece_ends, at = [], [0], 0
    for qo_len, total in zip(qo_lens, work, strict=True):
        blocks = -(-qo_len * spec.group_size // backend.tiles.short.rows)
        pieces = 0
        for _ in range(blocks if total else 0):
            begins = cuts_of_request(backend, qo_len, total // blocks)
            cuts += [at + begin for begin in begins]
            at += total // blocks
            pieces += len(begins) if len(begins) > 1 else 0
        piece_ends.append(piece_ends[-1] + pieces)
    buffers = backend._buffers
    chunk, num_tiles, *_ = buffers.header.tolist()
    assert num_tiles == at
    expected = [
        min([cut for cut in cuts if cut >= index * chunk], default=num_tiles)
        for index in range(backend.tiles.short_chunks + 1)
    ]
    assert buffers.short_begin.tolist() == expected
    assert buffers.piece_ends[: len(piece_ends)].tolist() == piece_ends
    size = StepSize(len(lengths) + 1, sum(qo_lens), sum(-(-n // 16) for n in kv_lens))
    assert piece_ends[-1] * spec.num_kv_heads <= max_pieces(size, spec, 16, backend.tiles)


@given(heads=HEADS, lengths=LENGTHS, padding=st.integers(0, 300))
def test_the_buffers_hold_every_step_of_their_size(heads, lengths, padding):
    spec = AttentionSpec(*heads, head_dim=64)
    qo_lens, kv_lens = zip(*lengths, strict=True)
    backend = planned(spec, [1], [1])
    _, long_units = by_hand(backend, [*qo_lens, padding], [*kv_lens, 0])
    size = StepSize(len(lengths) + 1, sum(qo_lens) + padding, 0)
    assert max_long_blocks(size, spec.group_size, backend.tiles) >= len(long_units)


@given(lengths=LENGTHS, fits=st.booleans())
def test_the_plan_writes_the_slots_of_every_token(lengths, fits):
    qo_lens, kv_lens = zip(*lengths, strict=True)
    capacity = Capacity(9, 2000, 3000) if fits else None
    backend = planned(AttentionSpec(4, 2, head_dim=64), qo_lens, kv_lens, capacity)
    qo_indptr = torch.tensor([0, *np.cumsum(qo_lens)], dtype=torch.int32)
    table = PageTable.from_lengths(list(kv_lens), 16)
    expected = write_slots(table, qo_indptr, 2000 if fits else None)
    assert backend.write_slots.tolist() == expected.tolist()


def test_with_a_capacity_the_padding_rows_are_a_request_without_keys():
    spec = AttentionSpec(4, 2, head_dim=64)
    backend = planned(spec, [1, 1], [100, 300], Capacity(8, 300, 100))
    num_long = int(backend._buffers.header[2])
    rows = (300 - 2) * spec.group_size
    assert num_long == -(-rows // backend.tiles.long.rows)
    assert set(backend._buffers.long_units[:num_long, 0].tolist()) == {2}


FOR_DECODING = [(1, 1), (1, 8), (4, 32), (32, 256), (256, 256), (256, 511)]
FOR_PROMPTS_TOO = [(1, 9), (4, 33), (256, 512)]


@pytest.mark.parametrize(("batch_size", "max_tokens"), FOR_DECODING + FOR_PROMPTS_TOO)
def test_a_capacity_without_room_for_a_prompt_has_no_long_queries(batch_size, max_tokens):
    is_for_decoding = (batch_size, max_tokens) in FOR_DECODING
    capacity = Capacity(batch_size, max_tokens, batch_size)
    backend = planned(AttentionSpec(8, 1, head_dim=64), [max_tokens], [9], capacity)
    assert (backend.tiles.max_short_rows > 8 * max_tokens) == is_for_decoding
    assert (int(backend._buffers.header[2]) == 0) == (is_for_decoding or 8 * max_tokens <= 64)


@pytest.mark.parametrize(("max_tokens", "num_long"), [(8, 0), (9, 1)])
def test_batch_invariant_every_capacity_leaves_a_long_request_its_kernel(max_tokens, num_long):
    spec, capacity = AttentionSpec(8, 1, head_dim=64), Capacity(8, max_tokens, 8)
    backend = planned(spec, [max_tokens], [9], capacity, batch_invariant=True)
    assert int(backend._buffers.header[2]) == num_long
    assert backend._may_have_long == bool(num_long)


@pytest.mark.parametrize("batch_size", [255, 256, 257, 600])
def test_a_batch_beyond_one_block_of_the_plan_is_scheduled_whole(batch_size):
    spec = AttentionSpec(1, 1, head_dim=64)
    backend = planned(spec, [1, 100] * batch_size, [3, 200] * batch_size)
    ends = backend._buffers.short_ends[: 2 * batch_size + 1].tolist()
    assert ends == [(r + 1) // 2 for r in range(2 * batch_size + 1)]
    num_long = int(backend._buffers.header[2])
    assert backend._buffers.long_units[:num_long, 0].tolist() == list(range(1, 2 * batch_size, 2))

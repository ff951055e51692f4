"""Row blocks in more pieces than the tiles of a small device would leave."""

from dataclasses import replace

import pytest
import torch
from attention_steps import batch_of, require_support

from pagedattn import AttentionSpec
from pagedattn.backends.triton.tiles import choose_tiles
from pagedattn.checking.compare import check_backend

NUM_CHUNKS = 40


@pytest.fixture(autouse=True)
def many_chunks(device, monkeypatch):
    def choose(*arguments):
        tiles = choose_tiles(*arguments)
        return replace(tiles, short_chunks=NUM_CHUNKS, min_chunk=1, min_piece=1)

    require_support("triton", AttentionSpec(4, 1, 32), 16, device)
    monkeypatch.setattr("pagedattn.backends.triton.tiles.choose_tiles", choose)


@pytest.mark.parametrize(
    ("group", "kv_lens", "qo_lens", "values"),
    [
        (4, (NUM_CHUNKS * 128,), (1,), "low_scores"),  # a piece for each chunk
        (7, (1000, 200, 900), (2, 1, 3), "normal"),  # blocks of a few rows, of 16 and of 5
    ],
)
def test_a_block_in_many_pieces_is_merged_of_all(device, group, kv_lens, qo_lens, values):
    spec = AttentionSpec(group, 1, 24, torch.float16)
    batch = batch_of(spec, 16, kv_lens, qo_lens, values=values)
    comparison = check_backend("triton", batch.materialise(device))
    assert comparison.ok, comparison.worst

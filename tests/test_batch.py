"""`Batch`: the same tensors from the same value, and memory that no query may see is hostile."""

from dataclasses import replace

import pytest
import torch
from attention_steps import batch_of
from hypothesis import given

from pagedattn import AttentionSpec
from pagedattn.checking.batch import GARBAGE_KINDS, VALUE_KINDS, Batch
from pagedattn.checking.dense import dense_blocks, masked_scores, visible_mask
from pagedattn.checking.real_activations import KEPT_LAYERS
from pagedattn.integrations.layer_inputs import load_layer_inputs
from pagedattn.testing import batches

SPEC = AttentionSpec(4, 2, 64, torch.float32)


def seen_slots(batch: Batch) -> torch.Tensor:
    """bool[pages, page_size]: by brute force over every request, query and key."""
    seen = torch.zeros(batch.num_pages, batch.page_size, dtype=torch.bool)
    for pages, kv_len, qo_len in zip(batch.pages, batch.kv_lens, batch.qo_lens, strict=True):
        for key in visible_mask(batch.spec, qo_len, kv_len).any(0).nonzero().flatten().tolist():
            seen[pages[key // batch.page_size], key % batch.page_size] = True
    return seen


@given(batch=batches())
def test_a_slot_is_finite_exactly_where_a_query_may_see_it(batch):
    cache = replace(batch, garbage="nan").materialise().kv_cache.transpose(1, 2)
    seen = seen_slots(batch)
    assert torch.isfinite(cache[seen]).all()
    assert cache[~seen].isnan().all()


@given(batch=batches())
def test_the_same_value_gives_the_same_bits(batch):
    a, b = batch.materialise(), batch.materialise()
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.kv_cache.nan_to_num(7), b.kv_cache.nan_to_num(7))
    assert a.page_table.kv_indices.tolist() == [page for pages in batch.pages for page in pages]


@given(batch=batches())
def test_its_repr_is_a_way_to_make_it(batch):
    names = {"Batch": Batch, "AttentionSpec": AttentionSpec, "torch": torch}
    assert eval(repr(batch), names) == batch


def test_garbage_changes_nothing_that_is_seen():
    batch = batch_of(SPEC, 4, (5, 9), (1, 9))
    seen = seen_slots(batch)
    assert not seen.all()
    steps = [replace(batch, garbage=kind).materialise() for kind in GARBAGE_KINDS]
    values = [step.kv_cache.transpose(1, 2)[seen] for step in steps]
    unseen = [step.kv_cache.transpose(1, 2)[~seen] for step in steps]
    assert all(torch.equal(v, values[0]) for v in values)
    assert all(torch.equal(step.q, steps[0].q) for step in steps)
    assert unseen[0].isnan().all()
    assert unseen[1].isinf().all()
    assert (unseen[2].abs() <= 3e4).all()
    assert unseen[2].abs().mean() > 1e4
    assert (unseen[3] == 0).all()


def test_what_a_page_holds_does_not_depend_on_its_number():
    a = batch_of(SPEC, 4, (9,), (1,))
    b = replace(a, pages=((1, 4, 0),))
    for page_of_a, page_of_b in zip(a.pages[0][:2], b.pages[0][:2], strict=True):
        one, other = (x.materialise().kv_cache for x in (a, b))
        assert torch.equal(one[page_of_a], other[page_of_b])


def scores_of(values: str, **options) -> torch.Tensor:
    """The visible scores of a decode row and a prompt."""
    spec = replace(SPEC, **options)
    step = batch_of(spec, 4, (80, 20), (1, 20), values=values).materialise()
    blocks = list(dense_blocks(step.compacted(), torch.float64))
    scores = [masked_scores(spec, block) for block in blocks]
    return torch.cat([s[s > -torch.inf] for s in scores])


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("sm_scale", [None, 0.02, 1.0])
def test_low_scores_are_all_below_minus_50000_and_close_together(head_dim, sm_scale):
    scores = scores_of("low_scores", head_dim=head_dim, sm_scale=sm_scale)
    assert (scores < -5e4).all()
    assert 1 < scores.max() - scores.min() < 20


def test_large_logits_reach_far_to_both_sides():
    scores = scores_of("large_logits")
    assert scores.max() > 60
    assert scores.min() < -60


@pytest.mark.parametrize("kv_len", [40, 2000])
def test_a_loud_key_outweighs_the_rest_where_it_is_seen(kv_len):
    spec = replace(SPEC, causal=False)
    step = batch_of(spec, 16, (kv_len,), (3,), values="loud_key").materialise()
    (block,) = dense_blocks(step.compacted(), torch.float64)
    weights = torch.softmax(masked_scores(spec, block), dim=-1)
    assert (weights.amax(-1) > 0.5).all()
    assert len(set(weights.argmax(-1).flatten().tolist())) == 1


def test_loud_keys_are_planted_on_both_sides_of_every_edge():
    spec = replace(SPEC, window_left=10)
    places = set()
    for seed in range(60):
        step = batch_of(spec, 16, (70,), (1,), values="loud_key", garbage="zeros", seed=seed)
        cache = step.materialise().kv_cache[list(step.pages[0]), 1].flatten(0, 1)
        places |= set((cache[:, 0] == 8).all(-1).nonzero().flatten().tolist())
    # the left edge 59; the last key 69, in a page that begins at 64; one left of a page at 63.
    # A loud key outside the window, 58, was overwritten by garbage
    assert places == {59, 63, 64, 69}


def test_constant_values_are_constant_and_a_zero_query_is_zero():
    v = batch_of(SPEC, 4, (9,), (1,), values="constant_values").materialise().kv_cache[:, 1]
    rows = v.flatten(0, 1)
    rows = rows[~rows.isnan().any(-1).any(-1)]
    assert len(rows) == 9
    assert (rows == rows[0]).all()
    assert (batch_of(SPEC, 4, (9,), (1,), values="zero_query").materialise().q == 0).all()


def test_real_activations_are_those_of_the_model_in_their_groups():
    spec = AttentionSpec(9, 3, 64, torch.float32)
    batch = batch_of(spec, 4, (150, 9), (100, 12), values="real_activations")
    step = batch.materialise()
    kept = load_layer_inputs(KEPT_LAYERS).values()
    layer = next(x for x in kept if step.q.abs().max() == x.q.float().abs().max())
    for request in (0, 1):
        pages = step.kv_cache[step.page_table.pages_of(request).long()]
        k, v = pages.transpose(0, 1).flatten(1, 2)[:, : batch.kv_lens[request]]
        begin, end = step.qo_indptr[request : request + 2].tolist()
        # heads are turned round by as many groups, the same for q, K and V
        tokens = [token_of(layer, k[j], v[j]) for j in range(len(k))]
        turns = {turn for _, turn in tokens}
        assert len(turns) == 1
        turned = layer.q.float().roll(-3 * turns.pop(), dims=1)
        for row in range(begin, end):
            position = batch.kv_lens[request] - end + row
            if position >= 0:
                assert torch.equal(step.q[row], turned[tokens[position][0]])


def token_of(layer, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Which token's K and V these are, and by how many heads they are turned round."""
    for turn in range(3):
        is_k = (layer.k.float().roll(-turn, dims=1) == k).all(-1).all(-1)
        is_v = (layer.v.float().roll(-turn, dims=1) == v).all(-1).all(-1)
        if (is_k & is_v).any():
            return int((is_k & is_v).nonzero()[0]), turn
    raise AssertionError("no token of this layer has this key and value")


def test_real_activations_come_from_every_layer_and_no_two_pages_are_alike():
    spec = AttentionSpec(2, 1, 64, torch.float32)
    largest = set()
    for seed in range(20):
        batch = batch_of(spec, 17, (680,), (1,), values="real_activations", seed=seed)
        cache = batch.materialise().kv_cache[list(batch.pages[0])]
        largest.add(float(cache[:, 1].abs().max()) > 1)  # layer 29 has large values
        pages = cache.flatten(1)
        assert len(pages.unique(dim=0)) > 12  # of 40; a lap has four
    assert largest == {True, False}


@pytest.mark.parametrize("head_dim", [16, 40, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (48, 1), (20, 4)])
def test_real_activations_fit_heads_of_every_kind(head_dim, heads):
    spec = AttentionSpec(*heads, head_dim, torch.float32)
    step = batch_of(spec, 4, (80, 3), (9, 8), values="real_activations").materialise()
    kept = load_layer_inputs(KEPT_LAYERS).values()
    real_q, real_k = (
        torch.cat([getattr(layer, name).float().flatten(0, 1) for layer in kept]) for name in "qk"
    )
    k = step.kv_cache[:, 0].flatten(0, 1)
    for got, real in ((step.q, real_q), (k[~k.isnan().flatten(1).any(1)], real_k)):
        for part in got.flatten(0, 1).split(64, dim=1):
            assert is_row_of(part, real[:, : part.shape[1]])


def is_row_of(rows: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether every row is one of the table's."""
    known = set(map(tuple, table.tolist()))
    return all(tuple(row) in known for row in rows.tolist())


@pytest.mark.parametrize("values", VALUE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_kind_of_values_fits_every_dtype(values, dtype):
    spec = replace(SPEC, dtype=dtype, head_dim=16)
    step = batch_of(spec, 4, (9, 30), (1, 30), values=values, garbage="zeros").materialise()
    assert torch.isfinite(step.q).all()
    assert torch.isfinite(step.kv_cache).all()
    assert step.q.dtype == step.kv_cache.dtype == dtype


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r"values must be one of .* got 'loud'"):
        batch_of(SPEC, 4, (9,), (1,), values="loud")
    with pytest.raises(ValueError, match=r"garbage must be one of .* got 'inf'"):
        batch_of(SPEC, 4, (9,), (1,), garbage="inf")

"""Sequences of steps: drawn as one object meets them, and served right by every live object."""

import random
from dataclasses import replace

import pytest
import torch
from attention_steps import (
    assert_padded_answer,
    attention_kinds,
    padded,
    scratch_of,
    with_supported_values,
)
from hypothesis import Phase, assume, find, given, settings
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, PagedAttention, unsupported_reasons
from pagedattn.checking.compare import check_step
from pagedattn.checking.drawing import RandomChoices, StepLimits
from pagedattn.checking.sequence import ReplaySequence, draw_sequence
from pagedattn.checking.step import Step, attend_with
from pagedattn.testing import replay_sequences, specs
from pagedattn.validation import check_indptr, check_page_table

SPEC = AttentionSpec(2, 1, 16, torch.float32)
FEW_EXAMPLES = max(3, settings.default.max_examples // 4)
"""Each is as dear as several steps."""
SMALL = Capacity(max_batch_size=3, max_tokens=9, max_pages=5)


def assert_valid(sequence: ReplaySequence) -> None:
    for batch in sequence.batches:
        kind = batch.spec, batch.page_size, batch.num_pages
        assert kind == (sequence.spec, sequence.page_size, sequence.num_pages)
        assert check_page_table(batch.page_table, batch.page_size) <= batch.num_pages
        check_indptr(batch.qo_indptr, "qo_indptr", len(batch.kv_lens))
        sequence.capacity.check_fits(
            batch_size=len(batch.kv_lens),
            num_tokens=sum(batch.qo_lens),
            num_pages=sum(map(len, batch.pages)),
        )


@given(sequence=replay_sequences(max_steps=4, max_batch_size=3, max_kv_len=50))
def test_every_step_is_valid_and_fits_the_capacity_and_the_bounds(sequence):
    assert_valid(sequence)
    assert 2 <= len(sequence.batches) <= 4
    assert all(len(batch.kv_lens) <= 3 for batch in sequence.batches)
    assert all(max(batch.kv_lens, default=0) <= 50 for batch in sequence.batches)


@given(sequence=replay_sequences(capacity=SMALL, page_sizes=st.just(4)))
def test_a_given_capacity_is_the_sequences_and_every_step_fits_it(sequence):
    assert sequence.capacity == SMALL
    assert_valid(sequence)


@given(sequence=replay_sequences(specs=specs(max_qo_heads=2), max_kv_len=30, max_steps=3))
def test_steps_become_tensors_of_one_pool(sequence):
    steps = list(sequence.materialise())
    assert {step.kv_cache.shape[0] for step in steps} == {sequence.num_pages}
    assert max(step.q.shape[0] for step in steps) <= sequence.capacity.max_tokens


EDGES = {
    "a batch that grows": lambda a, b: 0 < len(a.kv_lens) < len(b.kv_lens),
    "a batch that shrinks": lambda a, b: len(a.kv_lens) > len(b.kv_lens) > 0,
    "as many requests, other lengths": lambda a, b: (
        len(a.kv_lens) == len(b.kv_lens) and a.kv_lens != b.kv_lens
    ),
    "the same requests a token later": lambda a, b: (
        a.kv_lens and b.kv_lens == tuple(n + 1 for n in a.kv_lens)
    ),
    "nothing after something": lambda a, b: a.kv_lens and not b.kv_lens,
    "something after nothing": lambda a, b: not a.kv_lens and b.kv_lens,
    "decode after a prompt": lambda a, b: (
        max(a.qo_lens, default=0) > 1 == max(b.qo_lens, default=0)
    ),
    "a prompt after decode": lambda a, b: (
        max(a.qo_lens, default=0) == 1 < max(b.qo_lens, default=0)
    ),
    "the same lengths in other pages": lambda a, b: (
        a.kv_lens and a.kv_lens == b.kv_lens and a.pages != b.pages
    ),
}


@pytest.fixture(scope="module")
def drawn() -> list[ReplaySequence]:
    """500 sequences."""
    return [draw_sequence(RandomChoices(seed), SPEC, 4, 4, StepLimits()) for seed in range(500)]


@pytest.mark.parametrize("edge", EDGES)
def test_a_change_between_steps_is_reached_by_500_draws(drawn, edge):
    pairs = [pair for s in drawn for pair in zip(s.batches, s.batches[1:], strict=False)]
    assert sum(bool(EDGES[edge](*pair)) for pair in pairs) >= 5


def test_full_and_slack_capacities_and_every_end_of_the_pool_are_drawn(drawn):
    full = {max(sum(b.qo_lens) for b in s.batches) == s.capacity.max_tokens for s in drawn}
    assert full == {True, False}
    pages = [{p for b in s.batches for own in b.pages for p in own} for s in drawn]
    assert any(used and min(used) > 0 for used in pages)
    tops = [max(used) == s.num_pages - 1 for s, used in zip(drawn, pages, strict=True) if used]
    assert set(tops) == {True, False}


def test_draws_from_a_seed_are_repeatable(drawn):
    again = [draw_sequence(RandomChoices(seed), SPEC, 4, 4, StepLimits()) for seed in range(500)]
    assert again == drawn


FIND = (Phase.generate, Phase.shrink)  # and no explaining, which takes longer than both


def simplest(condition=lambda _: True) -> ReplaySequence:
    quiet = settings(database=None, max_examples=100, phases=FIND, deadline=None)
    small = replay_sequences(
        specs=st.just(SPEC), page_sizes=st.just(4), max_kv_len=9, max_batch_size=2, max_steps=3
    )
    return find(small, condition, settings=quiet, random=random.Random(0))


def test_sequences_shrink_to_two_steps_of_one_token():
    sequence = simplest()
    assert [(b.kv_lens, b.qo_lens, b.pages) for b in sequence.batches] == [
        ((1,), (1,), ((0,),))
    ] * 2
    assert (sequence.capacity, sequence.num_pages) == (Capacity(1, 1, 1), 1)


def test_a_stale_plan_is_found_and_shrunk_to_two_steps_of_one_request_each():
    sequence = simplest(lambda s: not serves(KeepsItsPlan(), s))
    assert [len(batch.kv_lens) for batch in sequence.batches] == [1, 1]
    assert sum(sum(batch.kv_lens) for batch in sequence.batches) == 3
    assert serves(attend_with("reference"), sequence)


class KeepsItsPlan:
    """Plans anew only where the number of requests changed."""

    def __init__(self):
        self.table = None

    def __call__(self, step: Step):
        if self.table is None or self.table.batch_size != step.page_table.batch_size:
            self.table = step.page_table
        return attend_with("reference")(replace(step, page_table=self.table))


def serves(attend, sequence: ReplaySequence) -> bool:
    return all(check_step(attend, step).ok for step in sequence.materialise())


def supported_sequences(backend, device) -> st.SearchStrategy[ReplaySequence]:
    on_gpu = device.type == "cuda"

    def supported(sequence: ReplaySequence) -> ReplaySequence:
        batches = tuple(with_supported_values(backend, batch) for batch in sequence.batches)
        return replace(sequence, batches=batches)

    sequences = attention_kinds(backend, device, small=True).flatmap(
        lambda kind: replay_sequences(
            page_sizes=st.just(kind[0]),
            specs=st.just(kind[1]),
            max_steps=6 if on_gpu else 3,
            max_batch_size=8 if on_gpu else 3,
            max_kv_len=2000 if on_gpu else 60,
            max_work=100 if on_gpu else 2,
        )
    )
    return sequences.map(supported)


@settings(max_examples=FEW_EXAMPLES)
@given(padding=st.booleans(), data=st.data())
def test_one_live_object_serves_a_sequence(backend, device, padding, data):
    sequence = data.draw(supported_sequences(backend, device))
    spec, page_size, capacity = sequence.spec, sequence.page_size, sequence.capacity
    assume(not unsupported_reasons(backend, spec, page_size, device))
    attn = PagedAttention(
        spec, page_size, backend=backend, device=device, capacity=capacity if padding else None
    )
    for step in sequence.materialise(device):
        attn.plan(step.page_table, step.qo_indptr)
        q = padded(step.q, capacity.max_tokens) if padding else step.q
        assert_padded_answer(backend, step, attn.run_return_lse(q, step.kv_cache))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@settings(max_examples=FEW_EXAMPLES)
@given(data=st.data())
def test_one_captured_graph_serves_a_sequence(backend, device, data):
    sequence = data.draw(supported_sequences(backend, device))
    spec, capacity = sequence.spec, sequence.capacity
    assume(not unsupported_reasons(backend, spec, sequence.page_size, device))
    attn = PagedAttention(
        spec, sequence.page_size, backend=backend, device=device, capacity=capacity
    )
    steps = list(sequence.materialise(device))
    cache, q = steps[0].kv_cache.clone(), padded(steps[0].q, capacity.max_tokens)
    attn.plan(steps[0].page_table, steps[0].qo_indptr)
    attn.run_return_lse(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = attn.run_return_lse(q, cache)
    for step in [*steps, *reversed(steps)]:
        cache.copy_(step.kv_cache)
        q.copy_(padded(step.q, capacity.max_tokens))
        for tensor in (answer.out, answer.lse):
            tensor.fill_(torch.nan)
        for dirty in scratch_of(attn):
            dirty.view(torch.uint8).fill_(255)
        attn.plan(step.page_table, step.qo_indptr)
        graph.replay()
        assert_padded_answer(backend, step, answer)

"""Serving as an engine does: steps through cache, allocator and attention equal one pass over all.

Requests grow by random steps, share prefixes, lose rejected tokens and end; their pages are used
again with stale keys in them. After every step the answers are those of the tokens alone.
"""

from dataclasses import replace

import torch
from attention_steps import half, require_support
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, OutOfPages, PagedAttention, PagedKVCache, PageTable
from pagedattn.attention import AttentionOutput
from pagedattn.checking.compare import check_backend
from pagedattn.checking.step import Step

PAGE_SIZE, NUM_PAGES = 3, 14
SPEC = AttentionSpec(2, 1, 64)

new_tokens = st.lists(st.integers(0, 7), min_size=3, max_size=3)
changes = st.sampled_from(["nothing", "fork 0", "free 0", "free 1", "reject 0", "reject 2"])


class Engine:
    """Three requests in one cache of few pages, and what every token of theirs is."""

    def __init__(self, backend, device, spec):
        self.spec, self.device = spec, device
        self.cache = PagedKVCache(1, NUM_PAGES, PAGE_SIZE, spec, device)
        self.cache.pages.fill_(torch.nan)
        self.attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device)
        self.generator = torch.Generator().manual_seed(0)
        self.tokens = {}  # request: [kv_len, 2, heads, dim]

    def draw(self, *shape):
        drawn = torch.randn(shape, generator=self.generator)
        return drawn.to(self.device, self.spec.dtype)

    def change(self, change):
        """Fork, free, or reject the last tokens of a request, where it exists."""
        allocator = self.cache.allocator
        kind, _, name = change.partition(" ")
        request = int(name) if name else None
        if request not in self.tokens:
            return
        if kind == "fork":
            if 1 in self.tokens:
                allocator.free(1)
            kept = self.tokens[request].shape[0] // 2
            allocator.fork(request, 1, kept)
            self.tokens[1] = self.tokens[request][:kept]
        elif kind == "free":
            allocator.free(request)
            del self.tokens[request]
        elif kind == "reject":
            kept = max(0, self.tokens[request].shape[0] - 2)
            allocator.truncate(request, kept)
            self.tokens[request] = self.tokens[request][:kept]

    def step(self, num_new):
        """Extend requests 0, 1, 2 and attend; the step with contiguous pages, and the answer."""
        grown = []
        empty = self.draw(0, 2, self.spec.num_kv_heads, self.spec.head_dim)
        for request, number in enumerate(num_new):
            try:
                self.cache.extend(request, number)
            except OutOfPages:
                continue
            grown.append((request, number))
            new = self.draw(number, *empty.shape[1:])
            self.tokens[request] = torch.cat([self.tokens.get(request, empty), new])
        requests, qo_lens = [r for r, _ in grown], [n for _, n in grown]
        qo_indptr = torch.tensor([0, *qo_lens]).cumsum(0).int()
        self.attn.plan(self.cache.allocator.page_table(requests), qo_indptr)
        new = [self.tokens[r][self.tokens[r].shape[0] - n :] for r, n in grown]
        new = torch.cat([empty, *new])
        self.cache.append(0, new[:, 0], new[:, 1], self.attn.write_slots)
        q = self.draw(sum(qo_lens), self.spec.num_qo_heads, self.spec.head_dim)
        answer = self.attn.run_return_lse(q, self.cache[0])
        return self.of_tokens([self.tokens[r] for r in requests], qo_indptr, q), answer

    def of_tokens(self, tokens, qo_indptr, q):
        table = PageTable.from_lengths([t.shape[0] for t in tokens], PAGE_SIZE)
        shape = (table.kv_indices.numel(), 2, PAGE_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
        kv_cache = torch.zeros(shape, dtype=self.spec.dtype, device=self.device)
        for request, rows in enumerate(tokens):
            for position, row in enumerate(rows):
                page = int(table.pages_of(request)[position // PAGE_SIZE])
                kv_cache[page, :, position % PAGE_SIZE] = row
        return Step(self.spec, table, qo_indptr, q, kv_cache)


def serve(backend, device, steps):
    spec = replace(SPEC, dtype=half(backend), window_left=4)
    require_support(backend, spec, PAGE_SIZE, device)
    engine = Engine(backend, device, spec)
    for change, num_new in steps:
        engine.change(change)
        step, answer = engine.step(num_new)
        comparison = check_backend(backend, step, attend=lambda _, answer=answer: answer)
        assert comparison.ok, comparison.worst


@given(steps=st.lists(st.tuples(changes, new_tokens), min_size=2, max_size=6))
def test_every_step_attends_to_its_requests_tokens_and_nothing_else(device, steps):
    serve("reference", device, steps)


def test_backends_serve_growing_shared_shrinking_and_freed_requests(backend, device):
    steps = [
        ("nothing", [7, 0, 2]),
        ("fork 0", [1, 1, 1]),  # of 3 tokens of 7: a part page is shared, then written by both
        ("reject 0", [1, 4, 0]),
        ("free 1", [1, 0, 1]),
        ("nothing", [1, 9, 1]),  # on pages that hold the keys of request 1 as it was
        ("reject 2", [1, 1, 1]),
    ]
    serve(backend, device, steps)


def test_a_prompt_in_chunks_is_a_prompt_in_one_go(backend, device):
    """What a reused prefix holds is what the suffix must see, scales and all."""
    spec = replace(SPEC, dtype=half(backend))
    require_support(backend, spec, PAGE_SIZE, device)
    engine = Engine(backend, device, spec)
    parts = [engine.step([number, 0, 0]) for number in (7, 1, 11, 4)]
    q = torch.cat([step.q for step, _ in parts])
    whole = engine.of_tokens([engine.tokens[0]], torch.tensor([0, 23], dtype=torch.int32), q)
    got = AttentionOutput(
        *(torch.cat(pieces) for pieces in zip(*(a for _, a in parts), strict=True))
    )
    comparison = check_backend(backend, whole, attend=lambda _: got)
    assert comparison.ok, comparison.worst

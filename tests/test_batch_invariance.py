"""`batch_invariant=True`: a request's bits depend on that request alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from attention_steps import assert_same_bits, batch_of, half, require_support
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable, UnsupportedSpec, backends
from pagedattn.attention import AttentionOutput
from pagedattn.checking.compare import check_backend
from pagedattn.checking.step import run_hostile

PAGE_SIZE = 16
NUM_PAGES = 70  # the pool that all requests share
LENGTHS = [(1, 600), (1, 1), (1, 17), (9, 300), (35, 60), (2, 0), (0, 100), (3, 2), (1, 257)]
"""Query tokens and keys of requests: in pieces, whole, long, without keys, without queries."""


def spec_of(backend: str, **options) -> AttentionSpec:
    return AttentionSpec(2, 1, 32, half(backend), **options)


class Requests:
    """Requests with fixed queries over one pool of keys and values, and their lone answers."""

    def __init__(self, backend: str, device: torch.device, spec: AttentionSpec) -> None:
        self.attn = PagedAttention(
            spec, PAGE_SIZE, backend=backend, device=device, batch_invariant=True
        )
        generator = torch.Generator().manual_seed(1)
        pool = torch.randn(NUM_PAGES, 2, PAGE_SIZE, 1, 32, generator=generator)
        self.kv_cache = pool.to(device, spec.dtype)
        counts = [-(-kv_len // PAGE_SIZE) for _, kv_len in LENGTHS]
        self.pages = [torch.randperm(NUM_PAGES, generator=generator)[:n].tolist() for n in counts]
        self.queries = [
            torch.randn(qo_len, 2, 32, generator=generator).to(device, spec.dtype)
            for qo_len, _ in LENGTHS
        ]
        self._alone: dict[int, AttentionOutput] = {}

    def run(self, attn: PagedAttention, chosen: list[int]) -> list[AttentionOutput]:
        """Each chosen request's answer in one step of them all."""
        lens = [LENGTHS[r][1] for r in chosen]
        pages = list(itertools.chain.from_iterable(self.pages[r] for r in chosen))
        ends = list(itertools.accumulate((LENGTHS[r][0] for r in chosen), initial=0))
        attn.plan(
            PageTable.from_lengths(lens, PAGE_SIZE, pages), torch.tensor(ends, dtype=torch.int32)
        )
        q = torch.cat([self.queries[r] for r in chosen])
        if attn.capacity is not None:  # rows of padding
            q = torch.cat([q, q.new_ones(attn.capacity.max_tokens - len(q), 2, 32)])
        out, lse = attn.run_return_lse(q, self.kv_cache)
        return [AttentionOutput(out[a:b], lse[a:b]) for a, b in itertools.pairwise(ends)]

    def alone(self, r: int) -> AttentionOutput:
        """A request's answer in a step of its own."""
        if r not in self._alone:
            self._alone[r] = self.run(self.attn, [r])[0]
        return self._alone[r]

    def assert_same_as_alone(self, attn: PagedAttention, chosen: list[int]) -> None:
        for r, got in zip(chosen, self.run(attn, chosen), strict=True):
            assert torch.equal(got.out, self.alone(r).out), f"out of request {r} in {chosen}"
            assert torch.equal(got.lse, self.alone(r).lse), f"lse of request {r} in {chosen}"


@pytest.fixture(scope="module", params=[-1, 200])
def requests(request, backend, device) -> Requests:
    spec = spec_of(backend, window_left=request.param)
    require_support(backend, spec, PAGE_SIZE, device)
    if backend == "flashinfer":
        pytest.skip("flashinfer: its kernels depend on the batch")
    return Requests(backend, device, spec)


CHOSEN = st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=5)


@settings(max_examples=6)
@given(chosen=CHOSEN)
def test_a_request_has_its_own_bits_in_any_batch_and_at_any_place(requests, chosen):
    requests.assert_same_as_alone(requests.attn, chosen)


def test_the_answers_are_right_in_every_layer(requests):
    attn = requests.attn
    qo_lens, kv_lens = zip(*LENGTHS, strict=True)
    step = batch_of(attn.spec, PAGE_SIZE, kv_lens, qo_lens).materialise(attn.device)
    first = run_hostile(attn, step)
    comparison = check_backend(attn.backend, step, attend=lambda _: first)
    assert comparison.ok, comparison.worst
    assert_same_bits(attn.run_return_lse(step.q, step.kv_cache), first)


def test_a_capacity_does_not_change_them(requests):
    attn = PagedAttention(
        requests.attn.spec, PAGE_SIZE, backend=requests.attn.backend, device=requests.attn.device,
        capacity=Capacity(8, 60, 300), batch_invariant=True,
    )  # fmt: skip
    for chosen in ([8, 3, 0, 4], [0, 2, 5, 6, 7]):
        requests.assert_same_as_alone(attn, chosen)


def test_without_it_a_long_context_is_cut_where_the_batch_says(backend, device):
    """The test above can fail: here the same steps give other bits."""
    if backend != "triton":
        pytest.skip(f"{backend}: computes each request by itself, or cannot be invariant")
    spec = AttentionSpec(2, 1, 32, torch.float32)  # no rounding of the output hides it
    requests = Requests(backend, device, spec)
    attn = PagedAttention(spec, PAGE_SIZE, backend=backend, device=device)
    alone, behind = requests.run(attn, [0])[0], requests.run(attn, [8, 0])[1]
    assert not torch.equal(alone.out, behind.out)


def test_the_same_step_gives_the_same_bits_every_time(requests):
    spec, device = requests.attn.spec, requests.attn.device
    first, second = (
        requests.run(
            PagedAttention(spec, PAGE_SIZE, backend=requests.attn.backend, device=device),
            [0, 3, 8, 4, 1],
        )
        for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.out, other.out)
        assert torch.equal(one.lse, other.lse)


def test_flashinfer_whose_kernels_depend_on_the_batch_refuses(monkeypatch):
    entry = replace(backends._BACKENDS["flashinfer"], needs="torch")  # its reasons need no more
    monkeypatch.setitem(backends._BACKENDS, "flashinfer", entry)
    with pytest.raises(UnsupportedSpec, match="batch_invariant=True: FlashInfer picks a kernel"):
        PagedAttention(
            spec_of("flashinfer"), PAGE_SIZE, backend="flashinfer", device="cpu",
            batch_invariant=True,
        )  # fmt: skip

"""Graph mode: static buffers, padding, and captured runs that serve later plans.

On a CPU nothing is captured, and the stand-in reads what a kernel would read from the static
buffers.
"""

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    BATCH,
    PAGES,
    SIZES,
    TOKENS,
    assert_right,
    flashinfer,
    graph_decode,
    graph_mixed,
    graph_prefill,
    make_step,
    padded_query,
    plan,
    workspace,
)

from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
)

# What a captured graph is replayed for: the steps that it was captured with, then shorter and
# longer, smaller and larger ones.
DECODE_STEPS = [[9, 17, 4, 33], [1, 2, 3, 4], [40, 41, 39, 44], [5], [], [0, 7], [60, 1, 1, 60]]
STEPS = [
    ([9, 17, 4, 8], [4, 2, 4, 6]),
    ([2, 1], [2, 1]),
    ([60, 50], [1, 15]),
    ([16], [16]),
    ([], []),
    ([3, 0, 7, 5], [5, 1, 0, 3]),
    ([20, 30, 40, 50], [1, 1, 1, 1]),
]


def prefill(device):
    return graph_prefill(device), STEPS, TOKENS


def decode(device):
    return graph_decode(device), [(kv_lens, [1] * len(kv_lens)) for kv_lens in DECODE_STEPS], BATCH


def mixed(device):
    return graph_mixed(device), STEPS, TOKENS


def mixed_on_one_workspace(device):
    shared = workspace(device)
    wrapper = FlashInferMixedWrapper(shared, shared, *SIZES, BATCH, TOKENS, PAGES, BATCH, device)
    return wrapper, STEPS, TOKENS


MAKERS = pytest.mark.parametrize("make", [prefill, decode, mixed, mixed_on_one_workspace])


@MAKERS
def test_one_wrapper_serves_shorter_longer_smaller_and_larger_steps(device, make):
    wrapper, steps, rows = make(device)
    for seed, (kv_lens, qo_lens) in enumerate(steps):
        step = make_step(device, kv_lens, qo_lens, seed=seed)
        plan(wrapper, step)
        out, lse = wrapper.run_return_lse(padded_query(step, rows), step.kv_cache)
        assert_right(out, lse, step)
        assert torch.isfinite(out).all()


@MAKERS
def test_static_buffers_never_move(device, make):
    wrapper, steps, _ = make(device)
    addresses = set()
    for kv_lens, qo_lens in steps:
        plan(wrapper, make_step(device, kv_lens, qo_lens))
        arrays = (wrapper.write_slots, wrapper.token_to_page, wrapper.token_to_cache)
        addresses.add(tuple(a.data_ptr() for a in arrays))
        assert {a.shape[0] for a in arrays} == {TOKENS if make is not decode else BATCH}
    assert len(addresses) == 1


@MAKERS
def test_padding_without_a_sink_page_reads_no_page(device, make):
    wrapper, steps, rows = make(device)
    wrapper.sink_page = None
    for kv_lens, qo_lens in steps:
        step = make_step(device, kv_lens, qo_lens)
        step.kv_cache[0] = torch.nan
        plan(wrapper, step)
        out = wrapper.run(padded_query(step, rows), step.kv_cache)
        assert_right(out, None, step)
        assert bool((out[step.q.shape[0] :] == 0).all())


@MAKERS
def test_sizes_are_required(device, make):
    kind = {prefill: FlashInferPrefillWrapper, decode: FlashInferDecodeWrapper}.get(make)
    if kind is None:
        pytest.skip("the mixed wrapper takes them without defaults")
    with pytest.raises(ValueError, match=r"needs batch_size.*max_num_pages"):
        kind(workspace(device), *SIZES, device=device, accelerator_graph=True)


@MAKERS
def test_q_must_have_the_captured_rows(device, make):
    wrapper, _, rows = make(device)
    step = make_step(device, [3, 4], [1, 1])
    plan(wrapper, step)
    with pytest.raises(ValueError, match=rf"q must have shape \[{rows}, 4, "):
        wrapper.run(step.q, step.kv_cache)


@MAKERS
def test_what_the_first_plan_chose_is_kept(device, make):
    wrapper, _, _ = make(device)
    step = make_step(device, [3, 4], [1, 1])
    plan(wrapper, step)
    with pytest.raises(ValueError, match=r"first plan chose.*window_left=-1.*got.*window_left=2"):
        plan(wrapper, step, window_left=2)
    plan(wrapper, step)


@pytest.mark.gpu
@MAKERS
def test_a_captured_run_serves_every_later_plan_from_dirty_workspaces(device, make):
    if device.type != "cuda":
        pytest.skip("captures CUDA graphs")
    wrapper, steps, rows = make(device)
    first = make_step(device, *steps[0])
    plan(wrapper, first)
    q, kv_cache = padded_query(first, rows).clone(), first.kv_cache.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapper.run_return_lse(q, kv_cache)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run_return_lse(q, kv_cache)
    for seed, (kv_lens, qo_lens) in enumerate([*steps, *reversed(steps)]):
        step = make_step(device, kv_lens, qo_lens, seed=seed)
        padded = padded_query(step, rows)
        for dirty in float_workspaces(wrapper):
            dirty.fill_(255)  # NaN as float32
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan(wrapper, step)
            q.copy_(padded)
            kv_cache.copy_(step.kv_cache)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_right(out, lse, step)
        assert torch.isfinite(out).all()


def float_workspaces(wrapper) -> list[torch.Tensor]:
    halves = [getattr(wrapper, name, None) for name in ("_decode", "_prefill")]
    return [w.float_workspace for w in [wrapper, *halves] if hasattr(w, "float_workspace")]

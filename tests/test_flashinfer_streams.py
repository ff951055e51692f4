"""Planning ahead: a step that is queued is not changed by the plan of the next one.

On a GPU the stream is blocked while steps are planned and launched, so that every copy is still
queued when the next plan writes its arrays: what would be a rare race elsewhere fails every time
here.
"""

import gc
import time

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    BATCH,
    HEADS,
    PAGE_SIZE,
    PAGES,
    TOKENS,
    assert_right,
    eager_decode,
    eager_prefill,
    flashinfer,
    graph_decode,
    graph_mixed,
    graph_prefill,
    make_step,
    padded_query,
)
from flashinfer_cases import plan as plan_wrapper

from pagedattn import AttentionSpec, Capacity, PagedAttention

BLOCK_SECONDS = 0.3
DECODE = [[60, 1, 1, 60], [1, 60, 60, 1]]
STEPS = [([60, 9, 3, 17], [1, 9, 3, 1]), ([3, 50, 40, 8], [3, 1, 1, 8])]


DECODE_STEPS = [(kv_lens, [1] * 4) for kv_lens in DECODE]


class Facade:
    """`PagedAttention` with the wrappers' calls."""

    def __init__(self, device, capacity):
        spec = AttentionSpec(**HEADS)
        self.attn = PagedAttention(
            spec, PAGE_SIZE, backend="flashinfer", device=device, capacity=capacity
        )

    def plan(self, step):
        self.attn.plan(step.table, step.qo_indptr)

    def run(self, q, kv_cache):
        return self.attn.run(q, kv_cache)


def facade(device, capacity=None):
    if device.type != "cuda":
        pytest.skip("the facade refuses FlashInfer on a CPU")
    return Facade(device, capacity)


# name: (wrapper, steps, rows of q; None: as many as tokens)
KINDS = {
    "eager_decode": (eager_decode, DECODE_STEPS, None),
    "eager_prefill": (eager_prefill, STEPS, None),
    "graph_decode": (graph_decode, DECODE_STEPS, BATCH),
    "graph_prefill": (graph_prefill, STEPS, TOKENS),
    "mixed": (graph_mixed, STEPS, TOKENS),
    "eager_facade": (facade, STEPS, None),
    "graph_facade": (lambda device: facade(device, Capacity(BATCH, 64, PAGES)), STEPS, 64),
}


def make(kind, device):
    build, lens, rows = KINDS[kind]
    return build(device), lens, rows


MAKERS = pytest.mark.parametrize("kind", KINDS)


def plan(wrapper, step) -> None:
    if isinstance(wrapper, Facade):
        wrapper.plan(step)
    else:
        plan_wrapper(wrapper, step)


def block_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(2e9 * BLOCK_SECONDS))  # cycles; no GPU's clock is much above 2 GHz


@MAKERS
def test_two_steps_planned_behind_a_blocked_stream_are_both_right(device, kind):
    wrapper, lens, rows = make(kind, device)
    steps = [make_step(device, *each, seed=seed) for seed, each in enumerate(lens)]
    queries = [step.q if rows is None else padded_query(step, rows) for step in steps]
    for step, q in zip(steps, queries, strict=True):  # compiles and allocates
        plan(wrapper, step)
        wrapper.run(q, step.kv_cache)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    try:
        block_stream(device)
        outs = []
        for step, q in zip(steps, queries, strict=True):
            plan(wrapper, step)
            outs.append(wrapper.run(q, step.kv_cache))
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    queued_after = time.perf_counter() - begin
    for out, step in zip(outs, steps, strict=True):
        assert_right(out, None, step)
    if device.type == "cuda":
        assert queued_after < BLOCK_SECONDS / 2, "planning waited for the stream"


@pytest.mark.gpu
@MAKERS
def test_many_steps_planned_behind_a_blocked_stream_are_all_right(device, kind):
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is queued")
    wrapper, lens, rows = make(kind, device)
    steps = [make_step(device, *lens[seed % 2], seed=seed) for seed in range(9)]
    queries = [step.q if rows is None else padded_query(step, rows) for step in steps]
    plan(wrapper, steps[0])
    wrapper.run(queries[0], steps[0].kv_cache)
    block_stream(device)
    outs = []
    for step, q in zip(steps, queries, strict=True):
        plan(wrapper, step)
        outs.append(wrapper.run(q, step.kv_cache))
    for out, step in zip(outs, steps, strict=True):
        assert_right(out, None, step)


@pytest.mark.gpu
@MAKERS
def test_a_wrapper_may_go_while_its_step_is_queued(device, kind):
    """The page-locked memory that its copies still read is not given to anybody else."""
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is queued")
    wrapper, lens, rows = make(kind, device)
    step = make_step(device, *lens[0])
    q = step.q if rows is None else padded_query(step, rows)
    plan(wrapper, step)
    wrapper.run(q, step.kv_cache)
    block_stream(device)
    plan(wrapper, step)
    out = wrapper.run(q, step.kv_cache)
    del wrapper
    gc.collect()
    others = [
        torch.empty(2**n, dtype=torch.uint8, pin_memory=True).fill_(255) for n in range(8, 25)
    ]
    assert_right(out, None, step)
    del others


@pytest.mark.gpu
@MAKERS
def test_a_run_does_not_depend_on_what_ran_before_it(device, kind):
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is left behind")
    wrapper, lens, rows = make(kind, device)
    step = make_step(device, *lens[0])
    q = step.q if rows is None else padded_query(step, rows)
    plan(wrapper, step)
    expected = wrapper.run(q, step.kv_cache)
    poison = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16, device=device)
    for _ in range(5):
        torch.mm(poison, poison)  # NaN in registers and on-chip memory of every processor
        assert torch.equal(wrapper.run(q, step.kv_cache), expected)
    assert_right(expected, None, step)


@pytest.mark.parametrize("kind", ["eager_decode", "eager_prefill", "graph_decode", "graph_prefill"])
def test_a_plan_whose_copies_are_queued_keeps_its_page_locked_buffers(device, kind):
    wrapper, lens, _ = make(kind, device)
    step = make_step(device, *lens[0])
    schedules, arrays = [], []
    for _ in range(2):  # makes every buffer
        plan(wrapper, step)
    if device.type == "cuda":
        torch.cuda.synchronize()
    block_stream(device)
    for _ in range(2):
        plan(wrapper, step)
        kernel = wrapper._step.kernel
        schedules.append(kernel.wrapper._pin_memory_int_workspace_buffer.data_ptr())
        arrays.append(wrapper._arrays.host("kv_lens").data_ptr())
        if device.type == "cuda":
            assert kernel.wrapper._pin_memory_int_workspace_buffer.is_pinned()
            assert wrapper._arrays.host("kv_lens").is_pinned()
    assert schedules[0] != schedules[1]
    assert arrays[0] != arrays[1]

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
    HEADS,
    PAGE_SIZE,
    assert_right,
    flashinfer,
    make_step,
    padded_query,
    workspace,
)

from pagedattn import AttentionSpec, Capacity, PagedAttention
from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
)

SIZES = (*HEADS.values(), PAGE_SIZE)
BATCH, TOKENS, PAGES = 4, 16, 48
BLOCK_SECONDS = 0.3
DECODE = [[60, 1, 1, 60], [1, 60, 60, 1]]
STEPS = [([60, 9, 3, 17], [1, 9, 3, 1]), ([3, 50, 40, 8], [3, 1, 1, 8])]


def eager_decode(device):
    wrapper = FlashInferDecodeWrapper(workspace(device), *SIZES, device=device)
    return wrapper, [(kv, [1] * 4) for kv in DECODE], None


def eager_prefill(device):
    return FlashInferPrefillWrapper(workspace(device), *SIZES, device=device), STEPS, None


def graph_decode(device):
    graph = {"batch_size": BATCH, "max_num_pages": PAGES, "accelerator_graph": True}
    wrapper = FlashInferDecodeWrapper(workspace(device), *SIZES, device=device, **graph)
    return wrapper, [(kv, [1] * 4) for kv in DECODE], BATCH


def graph_prefill(device):
    graph = {"batch_size": BATCH, "max_total_tokens": TOKENS, "max_num_pages": PAGES}
    wrapper = FlashInferPrefillWrapper(
        workspace(device), *SIZES, device=device, accelerator_graph=True, **graph
    )
    return wrapper, STEPS, TOKENS


def mixed(device):
    halves = (workspace(device), workspace(device))
    wrapper = FlashInferMixedWrapper(*halves, *SIZES, BATCH, TOKENS, PAGES, BATCH, device)
    return wrapper, STEPS, TOKENS


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


def eager_facade(device):
    if device.type != "cuda":
        pytest.skip("the facade refuses FlashInfer on a CPU")
    return Facade(device, None), STEPS, None


def graph_facade(device):
    if device.type != "cuda":
        pytest.skip("the facade refuses FlashInfer on a CPU")
    return Facade(device, Capacity(BATCH, 64, PAGES)), STEPS, 64


MAKERS = pytest.mark.parametrize(
    "make",
    [eager_decode, eager_prefill, graph_decode, graph_prefill, mixed, eager_facade, graph_facade],
)


def plan(wrapper, step) -> None:
    if isinstance(wrapper, Facade):
        wrapper.plan(step)
        return
    arrays = () if isinstance(wrapper, FlashInferDecodeWrapper) else (step.qo_indptr,)
    wrapper.plan(*arrays, *step.kv_arrays)


def block_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(2e9 * BLOCK_SECONDS))  # cycles; no GPU's clock is much above 2 GHz


@MAKERS
def test_two_steps_planned_behind_a_blocked_stream_are_both_right(device, make):
    wrapper, lens, rows = make(device)
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
def test_many_steps_planned_behind_a_blocked_stream_are_all_right(device, make):
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is queued")
    wrapper, lens, rows = make(device)
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
def test_a_wrapper_may_go_while_its_step_is_queued(device, make):
    """The page-locked memory that its copies still read is not given to anybody else."""
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is queued")
    wrapper, lens, rows = make(device)
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
def test_a_run_does_not_depend_on_what_ran_before_it(device, make):
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is left behind")
    wrapper, lens, rows = make(device)
    step = make_step(device, *lens[0])
    q = step.q if rows is None else padded_query(step, rows)
    plan(wrapper, step)
    expected = wrapper.run(q, step.kv_cache)
    poison = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16, device=device)
    for _ in range(5):
        torch.mm(poison, poison)  # NaN in registers and on-chip memory of every processor
        assert torch.equal(wrapper.run(q, step.kv_cache), expected)
    assert_right(expected, None, step)


@pytest.mark.parametrize("make", [eager_decode, eager_prefill, graph_decode, graph_prefill])
def test_consecutive_plans_use_other_page_locked_buffers(device, make):
    wrapper, lens, _ = make(device)
    step = make_step(device, *lens[0])
    schedules, arrays = [], []
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

"""What FlashInfer's plan and run call, called directly: right, and only where it may be done."""

import inspect
import weakref

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    assert_right,
    eager_prefill,
    flashinfer,
    graph_decode,
    make_step,
    padded_query,
    plan,
)
from flashinfer_cases import eager_decode as decode
from flashinfer_cases import graph_prefill as graph_prefill_of

from pagedattn.backends.flashinfer import planner

# kv and query lengths; batches of several sizes, and requests without keys
DECODE = [([9, 3, 17], None), ([60, 1, 1, 60], None), ([5], None), ([0, 7], None)]
PREFILL = [([9, 30], [9, 3]), ([60, 9, 3, 17], [1, 9, 3, 1]), ([5], [5]), ([0, 7, 2], [3, 0, 5])]


def prefill(device):
    return eager_prefill(device, backend="fa2")


def graph_prefill(device):
    return graph_prefill_of(device, backend="fa2")


def fa3_prefill(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a GPU of compute capability 9.0")
    return eager_prefill(device, backend="fa3")


MAKERS = pytest.mark.parametrize(
    ("make", "lens"),
    [
        (decode, DECODE),
        (graph_decode, DECODE),
        (prefill, PREFILL),
        (graph_prefill, PREFILL),
        (fa3_prefill, PREFILL),
    ],
)


@pytest.fixture
def plans(flashinfer, monkeypatch):  # noqa: F811
    """The calls of FlashInfer's own plan."""
    calls = []
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        wrapper = getattr(flashinfer, name)

        def plan(self, *args, _plan=wrapper.plan, **kwargs):
            calls.append(kwargs)
            return _plan(self, *args, **kwargs)

        plan.__signature__ = inspect.signature(wrapper.plan)
        monkeypatch.setattr(wrapper, "plan", plan)
    return calls


def plan_and_check(wrapper, step, **mask) -> None:
    plan(wrapper, step, **mask)
    capacity = wrapper.capacity
    q = step.q if capacity is None else padded_query(step, capacity.num_tokens)
    out, lse = wrapper.run_return_lse(q, step.kv_cache)
    assert_right(out[: len(step.q)], lse[: len(step.q)], step, **mask)


@MAKERS
def test_later_steps_are_right_without_flashinfers_own_plan(device, plans, make, lens):
    wrapper = make(device)
    for seed, each in enumerate([*lens, *lens]):
        plan_and_check(wrapper, make_step(device, *each, seed=seed))
        assert len(plans) == 1


@pytest.mark.parametrize(("make", "lens"), [(decode, DECODE), (prefill, PREFILL)])
def test_other_settings_go_through_flashinfers_own_plan(device, plans, make, lens):
    wrapper = make(device)
    step = make_step(device, *lens[1])
    for number, window_left in enumerate([-1, 3, 5, -1], start=1):
        for _ in range(2):
            plan_and_check(wrapper, step, window_left=window_left)
            assert len(plans) == number
    half = make_step(device, *lens[1], dtype=torch.float16)
    plan(wrapper, half, dtype=torch.float16)
    plan(wrapper, half, dtype=torch.float16, sm_scale=0.5)
    assert len(plans) == 6


@MAKERS
def test_an_unknown_version_plans_every_step_by_itself(device, plans, make, lens, monkeypatch):
    monkeypatch.setattr(planner, "LAST_ARGUMENTS", {})
    wrapper = make(device)
    for seed, each in enumerate(lens):
        plan_and_check(wrapper, make_step(device, *each, seed=seed))
        assert len(plans) == seed + 1


def test_a_plan_that_failed_is_not_the_last(device, plans):
    wrapper = decode(device)
    step = make_step(device, *DECODE[1])
    wrapper.plan(*step.kv_arrays)
    library = wrapper._kernel.wrapper
    library.plan = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        wrapper.plan(*step.kv_arrays, window_left=3)
    del library.plan
    plan_and_check(wrapper, step)
    assert len(plans) == 2


@MAKERS
def test_runs_are_right_without_flashinfers_own_run(device, monkeypatch, make, lens):
    """Of the first step's first run alone; inputs and outputs are new tensors each time."""
    wrapper = make(device)
    runs = []
    for seed, each in enumerate([*lens, *lens]):
        step = make_step(device, *each, seed=seed)
        plan(wrapper, step)
        library = wrapper._step.kernel.wrapper
        if not runs:
            run = library.run
            library.run = lambda *args, _run=run, **kwargs: runs.append(1) or _run(*args, **kwargs)
        rows = len(step.q) if wrapper.capacity is None else wrapper.capacity.num_tokens
        for cache in (step.kv_cache, (step.kv_cache[:, 0].clone(), step.kv_cache[:, 1].clone())):
            assert_right(wrapper.run(padded_query(step, rows), cache), None, step)
    assert len(runs) == 1


def test_keys_and_values_in_one_tensor_are_told_apart_later(device):
    """A run whose keys are its values does not say which argument is which."""
    wrapper = decode(device)
    step = make_step(device, *DECODE[1])
    wrapper.plan(*step.kv_arrays)
    k_pages, v_pages = (half.clone() for half in step.kv_cache.unbind(1))
    wrapper.run(step.q, (k_pages, k_pages))
    for _ in range(2):
        assert_right(wrapper.run(step.q, (k_pages, v_pages)), None, step)


def test_a_kept_run_keeps_no_tensor_alive(device):
    wrapper = decode(device)
    step = make_step(device, *DECODE[1])
    wrapper.plan(*step.kv_arrays)
    for _ in range(2):
        gone = weakref.ref(wrapper.run(step.q, step.kv_cache))
        assert gone() is None

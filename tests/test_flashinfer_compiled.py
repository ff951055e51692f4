"""`run` in compiled models and in profiles."""

import contextlib

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    HEADS,
    PAGE_SIZE,
    assert_right,
    flashinfer,
    make_step,
    workspace,
)

from pagedattn.backends.flashinfer import FlashInferDecodeWrapper, FlashInferPrefillWrapper
from pagedattn.operators import run_into

SIZES = (*HEADS.values(), PAGE_SIZE)


def planned(device, step, **options) -> FlashInferPrefillWrapper:
    wrapper = FlashInferPrefillWrapper(workspace(device), *SIZES, device=device, **options)
    wrapper.plan(step.qo_indptr, *step.kv_arrays)
    return wrapper


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_passes(device, with_lse):
    step = make_step(device, [9, 5], [4, 5])
    wrapper = planned(device, step)
    out = torch.empty_like(step.q)
    lse = torch.empty(step.q.shape[:2], device=device) if with_lse else None
    pair = [step.kv_cache[:, 0].clone(), step.kv_cache[:, 1].clone()]
    for kv_cache in ([step.kv_cache], pair):
        torch.library.opcheck(run_into, (step.q, kv_cache, out, lse, wrapper.number))


def test_a_model_that_calls_run_compiles_whole_and_follows_later_plans(device):
    step = make_step(device, [9, 5], [4, 5])
    wrapper = planned(device, step)

    def model(q, kv_cache):
        out, lse = wrapper.run_return_lse(q + 0, kv_cache)
        return wrapper.run(q, kv_cache) + (out - out) + 0, lse

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_right(*compiled(step.q, step.kv_cache), step)
    later = make_step(device, [20, 7], [6, 3], seed=1)
    wrapper.plan(later.qo_indptr, *later.kv_arrays)
    assert_right(*compiled(later.q, later.kv_cache), later)


def test_errors_of_run_reach_the_caller_of_a_compiled_model(device):
    step = make_step(device, [9, 5], [4, 5])
    wrapper = planned(device, step)
    compiled = torch.compile(wrapper.run, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="q must have shape"):
        compiled(step.q[:5], step.kv_cache)


@pytest.mark.parametrize("enable_nvtx", [False, True])
def test_profilers_see_plan_and_run_where_they_are_asked_to(device, monkeypatch, enable_nvtx):
    names = []

    @contextlib.contextmanager
    def record(name):
        names.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    step = make_step(device, [9, 5])
    wrapper = planned(device, step, enable_nvtx=enable_nvtx)
    wrapper.run(step.q, step.kv_cache)
    decode = FlashInferDecodeWrapper(
        workspace(device), *SIZES, device=device, enable_nvtx=enable_nvtx
    )
    decode.plan(*step.kv_arrays)
    decode.run(step.q, step.kv_cache)
    expected = [
        "FlashInferPrefillWrapper.plan",
        "FlashInferPrefillWrapper.run",
        "FlashInferDecodeWrapper.plan",
        "FlashInferDecodeWrapper.run",
    ]
    assert names == (expected if enable_nvtx else [])

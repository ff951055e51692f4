"""A shadow over steps that are served: what it finds, whom it blames, and that it keeps nothing."""

import gc
import logging
import weakref
from dataclasses import replace

import planted_backends
import pytest
import torch
from attention_steps import half, require_support
from planted_backends import (  # noqa: F401
    LENGTHS,
    PAGE_SIZE,
    SPEC,
    build,
    looked_at,
    planted,
    serve,
    step_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

import pagedattn
from pagedattn import Capacity, PagedAttention, Shadow, UnsupportedSpec
from pagedattn.checking import ShadowMismatch, arbitration

pytestmark = pytest.mark.usefixtures("planted")


@pytest.fixture(autouse=True)
def listening(caplog):
    caplog.set_level(logging.INFO, logger="pagedattn")


def test_without_a_shadow_there_is_none(device):
    assert PagedAttention(SPEC, PAGE_SIZE, backend="reference", device=device).shadow is None


@pytest.mark.parametrize("causal", [True, False])
def test_right_backends_agree_on_every_kind_of_step(backend, device, causal, caplog):
    spec = replace(SPEC, dtype=half(backend), causal=causal)
    other = "triton" if backend == "reference" else "reference"
    for name in (backend, other):
        require_support(name, spec, PAGE_SIZE, device)
    attn = build(backend, other, device, spec, on_mismatch="raise")
    shapes = [LENGTHS, ((), ()), ((9, 30, 1), (1, 1, 1)), ((4, 4), (0, 0))]
    for seed, lengths in enumerate(shapes):
        step = step_of(device, lengths, spec, seed)
        attn.plan(step.page_table, step.qo_indptr)
        attn.run_return_lse(step.q, step.kv_cache) if seed else attn.run(step.q, step.kv_cache)
    assert attn.shadow.counts == (2, 2, 0, 0, 0)
    assert not caplog.records


def test_a_fault_of_the_served_backend_is_raised_and_named_as_its(device):
    attn = build("WindowOneShort", "reference", device, on_mismatch="raise")
    step = step_of(device)
    with pytest.raises(ShadowMismatch, match=r"WindowOneShort \(serves\) is WRONG") as error:
        serve(attn, step)
    assert "reference (shadow) is right" in str(error.value)
    found = error.value.mismatch
    assert found.wrong == ("WindowOneShort",)
    assert (found.step, found.layer, found.request) == (0, 0, 0)
    assert found.row == found.query
    assert found.kv_len == 40 - 6 + found.query + 1
    assert f"out[{found.row}, " in str(found) or f"lse[{found.row}, " in str(found)
    assert attn.shadow.counts == (1, 1, 1, 1, 0)
    # the object stays usable, and its answer stands
    attn.run(step.q, step.kv_cache)


def test_a_fault_of_the_shadow_is_named_as_the_shadows(device, caplog):
    attn = build("reference", "WindowOneShort", device)
    serve(attn, step_of(device))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "reference (serves) is right" in record.message
    assert "WindowOneShort (shadow) is WRONG" in record.message


def test_a_fault_of_the_served_backend_is_logged_as_an_error(device, caplog):
    attn = build("WindowOneShort", "reference", device)
    serve(attn, step_of(device))
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.ERROR, "pagedattn.checking.shadow")


def test_both_are_named_where_both_are_wrong(device):
    attn = build("WindowOneShort", "NeverWrites", device, on_mismatch="raise")
    with pytest.raises(ShadowMismatch) as error:
        serve(attn, step_of(device, ((40,), (1,))))
    assert error.value.mismatch.wrong == ("WindowOneShort", "NeverWrites")


def test_a_fault_in_out_is_found_where_no_lse_is_asked_for(device):
    attn = build("WindowOneShort", "reference", device, on_mismatch="raise")
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    with pytest.raises(ShadowMismatch, match="worst at out"):
        attn.run(step.q, step.kv_cache)


def test_rows_that_see_no_key_are_compared(device):
    attn = build("BlindRowsAnswerOne", "reference", device, on_mismatch="raise")
    with pytest.raises(ShadowMismatch, match=r"request 2, query [01] .*, 0 keys\)"):
        serve(attn, step_of(device))
    serve(attn, step_of(device, ((40, 3), (6, 1))))
    assert attn.shadow.counts.mismatches == 1


def test_a_rounding_difference_is_no_mismatch(device, monkeypatch, caplog):
    require_support("triton", SPEC, PAGE_SIZE, device)
    for name in ("AGREEMENT_UNITS", "FLOAT32_TOLERANCE"):  # the last bit is in doubt
        monkeypatch.setattr(arbitration, name, 0)
    attn = build("triton", "reference", device, on_mismatch="raise")
    serve(attn, step_of(device))
    assert attn.shadow.counts == (1, 1, 1, 0, 0)
    assert not caplog.records


def test_every_nth_step_is_looked_at_beginning_with_the_first(device, caplog):
    attn = build("WindowOneShort", "reference", device, every=3)
    for _ in range(8):
        serve(attn, step_of(device))
    assert [step for step, _ in looked_at(caplog)] == [0, 3, 6]
    assert attn.shadow.counts == (8, 3, 3, 3, 0)


def test_steps_without_queries_do_not_count(device, caplog):
    attn = build("WindowOneShort", "reference", device, every=2)
    for lengths in (((), ()), LENGTHS, ((5,), (0,)), LENGTHS, ((), ()), LENGTHS):
        serve(attn, step_of(device, lengths))
    assert [step for step, _ in looked_at(caplog)] == [0, 2]
    assert attn.shadow.counts.steps == 3


def test_layers_take_turns(device, caplog):
    attn = build("WindowOneShort", "reference", device, every=2)
    for _ in range(12):
        serve(attn, step_of(device), layers=4)
    assert looked_at(caplog) == [(0, 0), (2, 1), (4, 2), (6, 3), (8, 0), (10, 1)]


class CountCalls(TorchDispatchMode):
    """How often torch was called, views included."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_between_looks_a_run_asks_no_more_of_torch_than_without_a_shadow(device):
    step = step_of(device)
    numbers = []
    for every in (None, 1 << 62):
        attn = PagedAttention(SPEC, PAGE_SIZE, backend="reference", device=device)
        if every is not None:
            attn = build("reference", "triton", device, every=every)
            serve(attn, step)  # the first step is looked at
        attn.plan(step.page_table, step.qo_indptr)
        with CountCalls() as calls:
            attn.run(step.q, step.kv_cache)
        numbers.append(calls.number)
    assert numbers[0] == numbers[1] > 0


def test_a_step_that_is_planned_and_not_run_is_no_trouble(device):
    attn = build("reference", "WindowOneShort", device)
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    with pytest.raises(ValueError, match="int32"):
        attn.plan(step.page_table, step.qo_indptr.long())
    serve(attn, step)
    assert attn.shadow.counts == (2, 1, 1, 1, 0)


def test_no_tensor_of_a_step_is_kept(backend, device):
    spec = replace(SPEC, dtype=half(backend))
    other = "triton" if backend == "reference" else "reference"
    for name in (backend, other):
        require_support(name, spec, PAGE_SIZE, device)
    attn = build(backend, other, device, spec)
    assert_nothing_kept(attn, device)
    assert attn.shadow.counts == (1, 1, 0, 0, 0)


@pytest.mark.parametrize("on_mismatch", ["log", "capsule"])
@pytest.mark.parametrize("other", ["WindowOneShort", "Breaks"])
def test_no_tensor_is_kept_after_a_mismatch_or_an_error(
    device, tmp_path, caplog, other, on_mismatch
):
    attn = build("reference", other, device, on_mismatch=on_mismatch, capsule_dir=tmp_path)
    assert_nothing_kept(attn, device)
    assert caplog.records  # a handler may keep records: they must hold no tensor


def assert_nothing_kept(attn, device):
    step = step_of(device, spec=attn.spec)
    attn.plan(step.page_table, step.qo_indptr)
    out, lse = attn.run_return_lse(step.q, step.kv_cache)
    table = step.page_table
    tensors = (step.q, step.kv_cache, out, lse, step.qo_indptr, table.kv_indices, table.kv_lens)
    watched = [weakref.ref(tensor) for tensor in tensors]
    del step, out, lse, table, tensors
    gc.collect()
    assert [ref() for ref in watched] == [None] * 7


def test_an_error_of_the_shadow_is_logged_and_serving_goes_on(device, caplog):
    attn = build("reference", "Breaks", device)
    step = step_of(device)
    serve(attn, step)
    serve(attn, step)
    assert attn.shadow.counts == (2, 0, 0, 0, 2)
    message = "shadow Breaks could not check: RuntimeError: no more memory"
    assert [record.message for record in caplog.records] == [message] * 2


def test_an_error_of_the_shadow_is_raised_where_mismatches_are(device):
    attn = build("reference", "Breaks", device, on_mismatch="raise")
    with pytest.raises(RuntimeError, match="no more memory"):
        serve(attn, step_of(device))
    assert attn.shadow.counts.failed == 1


def test_with_a_capacity_it_warns_and_looks_at_eager_runs(device):
    capacity = Capacity(max_batch_size=4, max_tokens=12, max_pages=20)
    with pytest.warns(UserWarning, match="steps that a CUDA graph replays go unchecked") as warned:
        attn = build("reference", "WindowOneShort", device, capacity=capacity)
    assert warned[0].filename == planted_backends.__file__  # `build`, which makes the object
    step = step_of(device)
    q = torch.full((12, 2, 64), torch.nan, dtype=SPEC.dtype, device=device)
    q[: step.q.shape[0]] = step.q  # a padding row is never drawn
    attn.plan(step.page_table, step.qo_indptr)
    attn.run(q, step.kv_cache)
    assert attn.shadow.counts == (1, 1, 1, 1, 0)


@pytest.mark.gpu
def test_under_graph_capture_it_is_silent(device):
    require_support("triton", SPEC, PAGE_SIZE, device)
    step = step_of(device)
    capacity = Capacity(4, step.q.shape[0], 20)
    with pytest.warns(UserWarning, match="CUDA graph"):
        attn = build("triton", "reference", device, capacity=capacity, on_mismatch="raise")
    serve(attn, step)
    attn.plan(step.page_table, step.qo_indptr)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(step.q, step.kv_cache)
    graph.replay()
    torch.cuda.synchronize()
    assert attn.shadow.counts == (2, 1, 0, 0, 0)


def test_it_sees_what_runs_inside_torch_compile(device):
    torch.compiler.reset()
    attn = build("reference", "WindowOneShort", device)
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    torch.compile(attn.run, fullgraph=True, backend="aot_eager")(step.q, step.kv_cache)
    assert attn.shadow.counts.checked == 1


def test_one_shadow_serves_many_objects(device):
    shadow = Shadow("WindowOneShort", every=1)
    objects = [
        PagedAttention(SPEC, PAGE_SIZE, backend="reference", device=device, shadow=shadow)
        for _ in range(2)
    ]
    serve(objects[0], step_of(device))
    assert [attn.shadow.counts.checked for attn in objects] == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cutlass"}, "unknown shadow backend 'cutlass', expected one of .*flashinfer"),
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"every": 2.5}, r"every must be an integer of at least 1, got 2\.5"),
        ({"rows": 0}, "rows must be an integer of at least 1, got 0"),
        ({"rows": True}, "rows must be an integer of at least 1, got True"),
        ({"max_capsules": 0}, "max_capsules must be an integer of at least 1, got 0"),
        ({"on_mismatch": "exit"}, r"on_mismatch must be one of \('log', .*\), got 'exit'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shadow(**{"backend": "triton", **arguments})


def test_a_backend_cannot_be_its_own_shadow(device):
    with pytest.raises(ValueError, match="are both 'reference', expected two"):
        build("reference", "reference", device)


def test_a_shadow_that_cannot_compute_this_is_refused_with_every_reason(device):
    with pytest.raises(UnsupportedSpec, match="'CannotCompute'") as error:
        build("reference", "CannotCompute", device)
    assert error.value.reasons == ["too wide", "too old"]


def test_it_is_exported_where_users_look():
    from pagedattn import checking

    assert pagedattn.Shadow is checking.Shadow is Shadow
    with pytest.raises(AttributeError, match="no attribute 'Shadows'"):
        _ = pagedattn.Shadows

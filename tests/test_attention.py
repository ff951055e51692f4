"""`PagedAttention`: what plan and run promise, whatever the backend."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from attention_steps import assert_same_bits, batch_of, require_support

from pagedattn import (
    AttentionSpec,
    Capacity,
    PagedAttention,
    PageTable,
    UnsupportedSpec,
    attention,
    backend_names,
    backends,
    unsupported_reasons,
    write_slots,
)
from pagedattn.checking.compare import check_backend
from pagedattn.checking.step import Step

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)
PAGE_SIZE = 4
BAD_TABLE = PageTable(PAGE_SIZE, *(torch.tensor(x) for x in ([0, 1], [0], [3])))  # int64


@pytest.fixture
def attn(backend, device) -> PagedAttention:
    require_support(backend, SPEC, PAGE_SIZE, device)
    return PagedAttention(SPEC, PAGE_SIZE, backend=backend, device=device)


def step_of(device, kv_lens=(9, 3), qo_lens=(2, 1), seed=0) -> Step:
    return batch_of(SPEC, PAGE_SIZE, kv_lens, qo_lens, seed=seed).materialise(device)


def run(attn: PagedAttention, step: Step):
    attn.plan(step.page_table, step.qo_indptr)
    return attn.run_return_lse(step.q, step.kv_cache)


def test_run_before_plan_raises(attn, device):
    step = step_of(device)
    with pytest.raises(RuntimeError, match=r"there is no plan: call plan\(\) first"):
        attn.run(step.q, step.kv_cache)
    with pytest.raises(RuntimeError, match="there is no plan"):
        _ = attn.write_slots


def test_run_after_a_failed_plan_raises_and_a_good_plan_heals(attn, device):
    step = step_of(device)
    before = run(attn, step)
    with pytest.raises(ValueError, match="int32"):
        attn.plan(BAD_TABLE)
    with pytest.raises(RuntimeError, match="there is no plan"):
        attn.run(step.q, step.kv_cache)
    with pytest.raises(RuntimeError, match="there is no plan"):
        _ = attn.write_slots
    assert_same_bits(run(attn, step), before)


def test_a_refused_run_leaves_the_plan(attn, device):
    step = step_of(device)
    before = run(attn, step)
    with pytest.raises(ValueError, match="q must have shape"):
        attn.run(step.q[:1], step.kv_cache)
    assert_same_bits(attn.run_return_lse(step.q, step.kv_cache), before)


def test_one_plan_serves_many_layers(attn, device):
    steps = [step_of(device, seed=seed) for seed in range(3)]
    attn.plan(steps[0].page_table, steps[0].qo_indptr)
    answers = [attn.run_return_lse(s.q, s.kv_cache) for s in steps]
    for step, answer in zip(steps, answers, strict=True):
        assert_same_bits(answer, run(attn, step))


def test_run_gives_what_run_return_lse_gives(attn, device):
    step = step_of(device)
    answer = run(attn, step)
    assert torch.equal(attn.run(step.q, step.kv_cache), answer.out)


def test_given_out_and_lse_are_written_and_returned(attn, device):
    step = step_of(device)
    expected = run(attn, step)
    out, lse = torch.full_like(expected.out, torch.nan), torch.full_like(expected.lse, torch.nan)
    answer = attn.run_return_lse(step.q, step.kv_cache, out=out, lse=lse)
    assert answer.out is out
    assert answer.lse is lse
    assert_same_bits(answer, expected)


def test_a_strided_out_is_written_between_its_gaps(attn, device):
    step = step_of(device)
    expected = run(attn, step)
    wide = torch.full((3, 6, 64), 7.0, dtype=SPEC.dtype, device=device)
    attn.run(step.q, step.kv_cache, out=wide[:, :4])
    assert torch.equal(wide[:, :4], expected.out)
    assert (wide[:, 4:] == 7).all()


def test_without_qo_indptr_every_request_has_one_query(attn, device):
    step = step_of(device, qo_lens=(1, 1))
    expected = run(attn, step)
    attn.plan(step.page_table)
    assert_same_bits(attn.run_return_lse(step.q, step.kv_cache), expected)


def test_tables_on_the_device_give_the_same_answer(attn, device):
    step = step_of(device)
    expected = run(attn, step)
    attn.plan(step.page_table.to(device), step.qo_indptr.to(device))
    assert_same_bits(attn.run_return_lse(step.q, step.kv_cache), expected)


def test_nothing_of_the_callers_tables_is_kept(attn, device):
    step = step_of(device)
    expected = run(attn, step)
    table = step.page_table
    mine = PageTable(
        PAGE_SIZE, table.kv_indptr.clone(), table.kv_indices.clone(), table.kv_lens.clone()
    )
    qo_indptr = step.qo_indptr.clone()
    attn.plan(mine, qo_indptr)
    for tensor in (mine.kv_indptr, mine.kv_indices, mine.kv_lens, qo_indptr):
        tensor.zero_()
    assert_same_bits(attn.run_return_lse(step.q, step.kv_cache), expected)


def test_no_tensor_of_a_step_is_kept_after_run(attn, device):
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    out = attn.run(step.q, step.kv_cache)
    watched = [weakref.ref(tensor) for tensor in (step.q, step.kv_cache, out)]
    del step, out
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]


def test_write_slots_are_the_planned_steps(attn, device):
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    expected = write_slots(step.page_table, step.qo_indptr)
    assert attn.write_slots.device == device
    assert attn.write_slots.tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [((9, 3), (2, 1)), ((1,), (1,)), ((0, 4), (3, 4)), ((), ())])
def test_with_a_capacity_padding_rows_are_finite_and_the_others_right(backend, device, shape):
    require_support(backend, SPEC, PAGE_SIZE, device)
    capacity = Capacity(max_batch_size=3, max_tokens=7, max_pages=6)
    attn = PagedAttention(SPEC, PAGE_SIZE, backend=backend, device=device, capacity=capacity)
    for seed, lens in enumerate([((9, 3), (2, 5)), shape, ((16, 3, 1), (1, 1, 1)), shape]):
        step = step_of(device, *lens, seed=seed)
        num_tokens = step.q.shape[0]
        q = torch.ones(7, 4, 64, dtype=SPEC.dtype, device=device)
        q[:num_tokens] = step.q
        out = torch.full_like(q, torch.nan)
        attn.plan(step.page_table, step.qo_indptr)
        answer = attn.run_return_lse(q, step.kv_cache, out=out)
        assert torch.isfinite(answer.out).all()
        cut = type(answer)(answer.out[:num_tokens], answer.lse[:num_tokens])
        comparison = check_backend(backend, step, attend=lambda _, cut=cut: cut)
        assert comparison.ok, comparison.worst


def test_with_a_capacity_q_has_all_its_rows(backend, device):
    require_support(backend, SPEC, PAGE_SIZE, device)
    capacity = Capacity(max_batch_size=3, max_tokens=7, max_pages=6)
    attn = PagedAttention(SPEC, PAGE_SIZE, backend=backend, device=device, capacity=capacity)
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    with pytest.raises(ValueError, match=r"q must have shape \[7, 4, 64\]"):
        attn.run(step.q, step.kv_cache)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown backend 'cutlass'") as error:
        PagedAttention(SPEC, PAGE_SIZE, backend="cutlass", device="cpu")
    assert all(name in str(error.value) for name in backend_names())
    with pytest.raises(ValueError, match="unknown backend 'cutlass'"):
        unsupported_reasons("cutlass", SPEC, PAGE_SIZE, "cpu")


def test_a_page_size_below_one_is_refused():
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        PagedAttention(SPEC, 0, backend="reference", device="cpu")


class Limited(backends.load_backend("reference")):
    """A backend that cannot compute anything, for two reasons."""

    @classmethod
    def unsupported_reasons(cls, spec, page_size, device):
        return [f"head_dim={spec.head_dim}: too wide", f"page_size={page_size}: too small"]


def test_what_a_backend_cannot_do_is_refused_when_built_with_every_reason(monkeypatch):
    entry = backends._Entry(f"{__name__}.Limited", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "limited", entry)
    with pytest.raises(UnsupportedSpec) as error:
        PagedAttention(SPEC, PAGE_SIZE, backend="limited", device="cpu")
    assert error.value.backend == "limited"
    assert error.value.reasons == ["head_dim=64: too wide", "page_size=4: too small"]
    assert all(reason in str(error.value) for reason in error.value.reasons)


def test_a_backend_whose_package_is_missing_says_how_to_install_it(monkeypatch):
    entry = backends._Entry("nowhere.Backend", needs="nowhere_at_all", install="pip install it")
    monkeypatch.setitem(backends._BACKENDS, "missing", entry)
    reasons = unsupported_reasons("missing", SPEC, PAGE_SIZE, "cpu")
    assert reasons == ["nowhere_at_all is not installed: pip install it"]
    with pytest.raises(UnsupportedSpec, match="nowhere_at_all is not installed: pip install it"):
        PagedAttention(SPEC, PAGE_SIZE, backend="missing", device="cpu")


def test_an_unknown_option_is_refused(backend, device):
    with pytest.raises(TypeError, match="logits_soft_cap"):
        PagedAttention(SPEC, PAGE_SIZE, backend=backend, device=device, logits_soft_cap=30.0)


@pytest.mark.parametrize(
    "option", ["window_left", "logits_soft_cap", "sm_scale", "causal", "sinks"]
)
def test_an_option_that_comes_late_is_refused(attn, device, option):
    """Options belong to the spec: one that plan or run took and ignored would be a wrong answer."""
    step = step_of(device)
    before = run(attn, step)
    with pytest.raises(TypeError, match=option):
        attn.plan(step.page_table, step.qo_indptr, **{option: 1})
    for call in (attn.run, attn.run_return_lse):
        with pytest.raises(TypeError, match=option):
            call(step.q, step.kv_cache, **{option: 1})
    assert_same_bits(attn.run_return_lse(step.q, step.kv_cache), before)


class OnItsDevice(backends.load_backend("reference")):
    """A backend that notes whether its device was made the current one."""

    entered: list = []  # what `on_device` was entered with, not yet left
    calls: list = []

    def __init__(self, spec, page_size, device, capacity, batch_invariant):
        super().__init__(spec, page_size, device, capacity)
        self.calls.append(("build", *self.entered))

    def plan(self, page_table, qo_indptr):
        super().plan(page_table, qo_indptr)
        self.calls.append(("plan", *self.entered))

    def run(self, q, kv_cache, out, lse):
        super().run(q, kv_cache, out, lse)
        self.calls.append(("run", *self.entered))


def test_a_backend_is_built_planned_and_run_with_its_device_as_the_current_one(device, monkeypatch):
    """Kernels launch on the current device, wherever their tensors are."""

    @contextmanager
    def noted(entered):
        OnItsDevice.entered.append(entered)
        yield
        OnItsDevice.entered.pop()

    monkeypatch.setattr(attention, "on_device", noted)
    monkeypatch.setattr(OnItsDevice, "calls", [])
    entry = backends._Entry(f"{__name__}.OnItsDevice", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "noting", entry)
    attn = PagedAttention(SPEC, PAGE_SIZE, backend="noting", device=device)
    run(attn, step_of(device))
    assert OnItsDevice.calls == [(what, device) for what in ("build", "plan", "run")]


def test_repr_says_what_it_is_and_whether_it_has_a_plan(attn, device):
    text = repr(attn)
    for part in ("num_qo_heads=4", "page_size=4", repr(attn.backend), str(device), "no plan"):
        assert part in text
    attn.plan(PageTable.from_lengths([5, 3], PAGE_SIZE))
    assert "2 requests planned" in repr(attn)


def test_a_device_is_named_fully(device):
    attn = PagedAttention(SPEC, PAGE_SIZE, backend="reference")
    assert attn.device == device


@pytest.mark.gpu
def test_planning_and_running_host_tables_waits_for_nothing(attn, device):
    if attn.backend == "reference":
        pytest.skip("reference: reads lengths on the host in run")
    step = step_of(device)
    before = run(attn, step)  # compiles, and page-locks
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        answer = run(attn, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(answer, before)


@pytest.mark.gpu
def test_capturing_without_a_capacity_raises(attn, device):
    step = step_of(device)
    run(attn, step)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="object without capacity"), torch.cuda.graph(graph):
        attn.run(step.q, step.kv_cache)
    torch.cuda.synchronize()
    run(attn, step)


@pytest.mark.gpu
def test_a_plan_cannot_be_captured(attn, device):
    step = step_of(device)
    run(attn, step)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="plan before the capture"), torch.cuda.graph(graph):
        attn.plan(step.page_table, step.qo_indptr)
    torch.cuda.synchronize()
    run(attn, step)


@pytest.mark.gpu
def test_tensors_on_the_host_are_refused_by_name(attn, device):
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    with pytest.raises(ValueError, match="q must be on cuda:0, got cpu"):
        attn.run(step.q.cpu(), step.kv_cache)
    with pytest.raises(ValueError, match="kv_cache must be on cuda:0, got cpu"):
        attn.run(step.q, step.kv_cache.cpu())

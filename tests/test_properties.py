"""Relations between answers that hold for every backend, whatever the right answer is."""

from dataclasses import replace

import pytest
import torch
from attention_steps import batch_of, half, require_support, supported_batches
from hypothesis import assume, given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, backends, unsupported_reasons
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking.drawing import RandomChoices
from pagedattn.checking.profiles import small_batch
from pagedattn.checking.properties import PROPERTIES, Trial
from pagedattn.checking.step import attend_with
from pagedattn.checking.subject import LiveObjects, backend_subject
from pagedattn.checking.task import Task, try_task

RELATIONS = [p for p in PROPERTIES.values() if p.name != "agreement" and not p.own_step]
ON_STEPS_OF_THEIR_OWN = [p for p in PROPERTIES.values() if p.own_step]


def findings(backend, prop, batch, seed, device, **subject):
    trial_of = replace(backend_subject(backend), **subject)
    return list(prop.check(Trial(trial_of, batch, RandomChoices(seed), device)))


def require(backend, prop, device):
    reason = prop.reason_against(backend_subject(backend), device)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.parametrize("prop", RELATIONS, ids=lambda prop: prop.name)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_right_attention_keeps_the_property(backend, device, prop, data, seed):
    require(backend, prop, device)
    mode = data.draw(st.sampled_from(prop.modes))
    batch = data.draw(supported_batches(backend, device, small=True, mode=mode))
    assume(not unsupported_reasons(backend, batch.spec, batch.page_size, device))
    found = findings(backend, prop, batch, seed, device)
    assert found
    assert not [f"{finding.problem} for {batch}" for finding in found if finding.problem]


@pytest.mark.parametrize("prop", RELATIONS, ids=lambda prop: prop.name)
def test_a_step_without_queries_is_a_trial_too(device, prop):
    require("reference", prop, device)
    batch = batch_of(AttentionSpec(4, 2, 16, torch.float32), 4, (5,), (0,))
    found = findings("reference", prop, batch, 0, device)
    assert found
    assert not [finding.problem for finding in found if finding.problem]


@pytest.mark.parametrize("prop", ON_STEPS_OF_THEIR_OWN, ids=lambda prop: prop.name)
def test_right_attention_keeps_the_property_on_its_own_step(backend, device, prop):
    spec = AttentionSpec(4, 2, 64, half(backend), window_left=5)
    require_support(backend, spec, 4, device)
    found = findings(backend, prop, batch_of(spec, 4, (14, 9), (1, 4)), 0, device)
    assert len(found) >= 4
    assert not [finding.problem for finding in found if finding.problem]


@pytest.mark.parametrize("causal_window", [0, 5])
def test_a_query_that_sees_one_key_gets_its_value_exactly(backend, device, causal_window):
    spec = AttentionSpec(6, 2, 64, half(backend), window_left=causal_window)
    require_support(backend, spec, 3, device)
    step = batch_of(spec, 3, (7, 1, 8), (1, 1, 8)).materialise(device)
    out, lse = attend_with(backend)(step)
    for row, (request, key) in [(1, (1, 0)), (2, (2, 0))] + [(0, (0, 6))] * (causal_window == 0):
        page = step.page_table.pages_of(request)[key // 3].item()
        k, v = step.kv_cache[page, :, key % 3].repeat_interleave(3, dim=1)
        assert torch.equal(out[row], v)
        scores = (step.q[row].double() * k.double()).sum(-1) * spec.scale
        torch.testing.assert_close(lse[row].double(), scores, rtol=0, atol=1e-5)


def test_objects_that_live_on_give_what_new_ones_give(backend, device):
    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 4, device)
    live, new = LiveObjects(backend, max_objects=1), attend_with(backend)
    shapes = [((9,), (1,)), ((30, 3, 20), (30, 1, 5)), ((9,), (2,))]
    for seed, (page_size, lens) in enumerate([(4, shapes[0]), (4, shapes[1]), (16, shapes[2])] * 2):
        step = batch_of(spec, page_size, *lens, seed=seed).materialise(device)
        for got, expected in zip(live(step), new(step), strict=True):
            assert torch.equal(got, expected)


# Each property is broken by a fault that it is there for: the float64 comparison aside.


def changed_answer(change):
    """Computes a step rightly, then changes the answer by what it knows of the step."""
    right = attend_with("reference")

    def attend(step):
        answer = right(step)
        change(step, *answer)
        return answer

    return attend


def by_page_number(step, out, lse):
    out += step.page_table.kv_indices.float().mean().item() * 0.1 if len(out) else 0


def by_page_size(step, out, lse):
    out += step.page_size


def by_garbage(step, out, lse):
    out += step.kv_cache.float().nan_to_num(7, 7, 7).mean()


def by_nan_anywhere(step, out, lse):
    pages = step.kv_cache[step.page_table.kv_indices.long()]
    if pages.isnan().sum() > step.page_size * 40:
        out.fill_(torch.nan)


def by_company(step, out, lse):
    out += len(step.kv_lens)


def by_place(step, out, lse):
    out += torch.arange(len(out))[:, None, None]


def by_num_queries(step, out, lse):
    out += max(step.qo_lens, default=0)


def lse_in_base_2(step, out, lse):
    lse /= 0.6931


def without_large_scores(step, out, lse):
    out[lse.abs() > 500] = 0


def twice_as_large(step, out, lse):
    out *= 2


def by_kv_heads(step, out, lse):
    out += step.spec.num_kv_heads


FAULTS = {
    "page renaming": by_page_number,
    "page size": by_page_size,
    "poison": by_garbage,
    "isolation": by_nan_anywhere,
    "request order": by_company,
    "identical requests": by_place,
    "decode row": by_num_queries,
    "merged chunks": lse_in_base_2,
    "score shift": without_large_scores,
    "constant V": twice_as_large,
    "zero query": twice_as_large,
    "repeated heads": by_kv_heads,
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_attention_breaks_the_property(name):
    prop, attend = PROPERTIES[name], changed_answer(FAULTS[name])
    cpu = torch.device("cpu")
    found = []
    for seed in range(8):
        batch = small_batch(prop.modes[seed % len(prop.modes)], seed)
        found += findings("reference", prop, batch, seed, cpu, attend=attend)
        if any(finding.problem for finding in found):
            break
    problems = [finding.problem for finding in found if finding.problem]
    assert problems
    assert all(" vs " in problem for problem in problems)
    assert all(finding.answers for finding in found if finding.problem)


class IgnoresTheWindow(ReferenceBackend):
    def __init__(self, spec, page_size, device, capacity, batch_invariant):
        super().__init__(replace(spec, window_left=-1), page_size, device, capacity)


class KeepsTheFirstScale(ReferenceBackend):
    """The first object's scale is everybody's."""

    scales: list = []

    def __init__(self, spec, page_size, device, capacity, batch_invariant):
        self.scales.append(spec.scale)
        super().__init__(replace(spec, sm_scale=self.scales[0]), page_size, device, capacity)


class CountsPlans(ReferenceBackend):
    """Every plan leaves a trace in the answers."""

    def plan(self, page_table, qo_indptr):
        super().plan(page_table, qo_indptr)
        self.plans = getattr(self, "plans", 0) + 1

    def run(self, q, kv_cache, out, lse):
        super().run(q, kv_cache, out, lse)
        out += self.plans


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("option effect", IgnoresTheWindow, "window_left=5 vs without"),
        ("options in turn", KeepsTheFirstScale, "sm_scale=0.5 vs float64"),
        ("bad metadata", CountsPlans, "refused plans vs before"),
    ],
)
def test_a_wrong_backend_breaks_the_property(name, wrong, says, monkeypatch):
    entry = backends._Entry(f"{__name__}.{wrong.__name__}", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "wrong", entry)
    cpu = torch.device("cpu")
    found = findings("wrong", PROPERTIES[name], small_batch("prefill", 0), 0, cpu)
    assert [f.problem for f in found if f.problem and says in f.problem]


def test_a_facade_that_accepts_bad_tables_breaks_the_property(monkeypatch):
    monkeypatch.setattr("pagedattn.attention.check_indptr", lambda *_: None)
    task = Task("reference", "bad metadata", "decode", 0)
    cpu = torch.device("cpu")
    tried = try_task(backend_subject("reference"), task, small_batch("decode", 0), cpu)
    assert "vs ValueError: nothing raised" in tried.outcome.problem or tried.outcome.raised


def test_every_property_is_broken_by_some_fault():
    by_wrong_backends = {"option effect", "options in turn", "bad metadata"}
    on_a_gpu = {"graph replay", "no host sync"}
    rest = set(PROPERTIES) - set(FAULTS) - by_wrong_backends - on_a_gpu
    assert rest == {"agreement"}  # tests/test_checker_catches.py

"""A wrong answer is told what kind of wrong it is, and a right one is left alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_steps import batch_of
from test_checker_catches import StalePages, StalePlan

from pagedattn import AttentionSpec, backends
from pagedattn.attention import AttentionOutput
from pagedattn.backends import reference
from pagedattn.checking import miswritten
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.planted import faults as planted
from pagedattn.checking.planted.table import between_markers, count_faults, drawn_steps, markdown
from pagedattn.checking.step import attend_with, decoy_of

SPEC = AttentionSpec(4, 2, 40, torch.float16)


@pytest.fixture(scope="module")
def steps():
    return drawn_steps()


@pytest.fixture(scope="module")
def counts(steps):
    """For each planted fault how often it is caught and named."""
    return list(count_faults(steps))


def test_every_planted_fault_is_caught(counts):
    assert not [count.fault for count in counts if count.caught == 0]


def test_the_table_in_the_readme_is_what_the_command_prints(counts):
    readme = Path(__file__).parents[1] / "README.md"
    assert between_markers(readme.read_text()) == markdown(counts), (
        "run: pagedattn planted --update README.md"
    )


def test_at_least_nine_in_ten_planted_faults_are_named(counts):
    """Named: in most answers among the explanations, in some of them the first."""
    unnamed = {
        count.fault: count
        for count in counts
        if 2 * count.named <= count.caught or count.named_first == 0
    }
    assert len(unnamed) <= len(counts) / 10, unnamed
    assert list(unnamed) == ["lse without the maximum", "probabilities in 8 bits"], unnamed


def test_at_least_nine_in_ten_answers_are_explained_by_the_fault_they_come_from(counts):
    with_name = {count.fault: count for count in counts if count.name is not None}
    missed = {name: count for name, count in with_name.items() if count.named < count.caught}
    caught = sum(count.caught for count in with_name.values())
    assert sum(count.named for count in with_name.values()) >= 0.9 * caught, missed


def test_a_right_answer_has_no_diagnosis(steps):
    assert not [found for step in steps if (found := diagnose(step, planted.right(step)))]


@pytest.mark.parametrize("kind", ["noise", "one head twice as large"])
def test_an_unknown_fault_is_said_to_be_unexplained(kind):
    step = batch_of(SPEC, 3, (45, 13), (2, 13)).materialise()
    out, lse = planted.right(step)
    noise = torch.randn(out[:, 1].shape, generator=torch.Generator().manual_seed(0))
    out[:, 1] = out[:, 1] + noise if kind == "noise" else 2 * out[:, 1]
    diagnosis = diagnose(step, AttentionOutput(out, lse))
    assert diagnosis.explanations == ()
    assert str(diagnosis).startswith("Unexplained: none of ")


@pytest.mark.parametrize("fault", [StalePlan, StalePages])
def test_a_stale_plan_is_named(fault, monkeypatch):
    entry = backends._Entry(f"{StalePlan.__module__}.{fault.__name__}", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "stale", entry)
    step = batch_of(SPEC, 4, (13, 15), (2, 2)).materialise()
    earlier = replace(step, page_table=decoy_of(step.page_table))
    got = attend_with("stale")(step)
    # the earlier plan is this one backwards, so that pages in reverse order are as good a name
    assert diagnose(step, got, earlier=[earlier]).names[0] == "stale plan"
    assert diagnose(step, planted.right(step), earlier=[earlier]) is None


def test_the_answer_of_an_earlier_step_is_a_stale_plan():
    step = batch_of(SPEC, 4, (13, 15), (2, 2)).materialise()
    earlier = batch_of(SPEC, 4, (9, 14), (1, 3), seed=1).materialise()
    diagnosis = diagnose(step, planted.right(earlier), earlier=[step, earlier])
    assert str(diagnosis).startswith(
        "Diagnosis: stale plan (the whole answer of earlier step 1). It explains the whole answer."
    )


@pytest.mark.parametrize("factor", [0.37, 1.9, 8.0])
def test_a_wrong_scale_is_fitted(factor):
    step = batch_of(SPEC, 3, (45, 13), (2, 13)).materialise()
    got = planted.with_spec(step, sm_scale=step.spec.scale * factor)
    (explanation,) = diagnose(step, got).explanations
    assert explanation.name == "sm_scale wrong"
    assert float(explanation.detail.split()[0]) == pytest.approx(factor, rel=1e-3)


def test_a_cap_after_the_mask_is_named():
    step = batch_of(replace(SPEC, logits_soft_cap=3.0), 3, (14,), (14,)).materialise()
    spec, cap = step.spec, 3.0
    slots = step.kv_cache[step.page_table.kv_indices.long()].transpose(1, 2).flatten(0, 1)[:14]
    k, v = slots.float().transpose(0, 1).repeat_interleave(spec.group_size, dim=2)
    scores = torch.einsum("qhd,khd->hqk", step.q.float(), k) * spec.scale
    hidden = torch.ones(14, 14, dtype=torch.bool).triu(1)
    scores = cap * torch.tanh(scores.masked_fill(hidden, -torch.inf) / cap)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(spec.dtype)
    got = AttentionOutput(out, scores.logsumexp(-1).T)
    assert diagnose(step, got).names == ("soft cap after the mask",)


def test_a_piece_that_is_not_merged_is_found():
    step = batch_of(SPEC, 16, (1000, 20), (1, 1)).materialise()
    piece = range(256, 512)

    def unmerged(k, v):
        kept = [key for key in range(len(k)) if key not in piece]
        return k[kept], v[kept]

    with pytest.MonkeyPatch.context() as patch:
        attend = reference.attend_one_query
        patch.setattr(
            reference,
            "attend_one_query",
            lambda spec, q, k, v: attend(spec, q, *unmerged(k, v)),
        )
        got = planted.right(step)
    (explanation,) = diagnose(step, got).explanations
    assert str(explanation) == "a piece of the keys is missing (keys 256 to 511 of request 0)"


def test_rows_with_keys_beyond_32_bit_offsets_are_recognised(monkeypatch):
    step = batch_of(SPEC, 4, (8, 8, 8), (1, 1, 1)).materialise()  # pages 8 7, 6 5, 4 3
    monkeypatch.setattr(miswritten, "MAX_OFFSET", 7 * step.kv_cache.stride(0))
    out, lse = planted.right(step)
    out[0] = 0.25
    diagnosis = diagnose(step, AttentionOutput(out, lse))
    assert diagnosis.names == ("keys beyond 32-bit offsets",)


def test_a_leak_names_its_page_and_slot():
    step = batch_of(SPEC, 4, (8, 6), (1, 2)).materialise()  # pages 6 5, 4 3
    diagnosis = diagnose(step, planted.nan_of_the_tail_times_zero(step))
    origin = "NaN leak (from unused slots of the last page, first page 3 slot 2 of request 1)"
    assert str(diagnosis.explanations[0]) == origin
    assert (diagnosis.first.request, diagnosis.first.page, diagnosis.first.slot) == (1, 3, 2)


def test_a_difference_is_placed_by_request_position_key_page_and_slot():
    spec = replace(SPEC, window_left=3)
    step = batch_of(spec, 4, (2, 14), (1, 2)).materialise()  # pages 7, then 6 5 4 3
    diagnosis = diagnose(step, planted.window_one_short(step))
    first = diagnosis.first  # the first query of request 1 is at 12: key 9 is missing
    assert (first.request, first.query, first.position) == (1, 0, 12)
    assert (first.key, first.page, first.slot) == (9, 4, 1)
    assert first.difference.row == 1
    worst = diagnosis.worst
    assert worst.difference.excess >= first.difference.excess > 1
    assert worst.key == worst.position - 3


@pytest.mark.parametrize("fault", [planted.one_page_too_many, planted.probabilities_in_8_bits])
def test_a_diagnosis_is_two_to_five_lines(fault, steps):
    diagnosis = diagnose(steps[0], fault(steps[0]))
    assert 2 <= len(str(diagnosis).splitlines()) <= 5

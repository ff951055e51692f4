"""A wrong answer is told what kind of wrong it is, and a right one is left alone."""

from dataclasses import dataclass, replace

import pytest
import test_checker_catches as planted
import torch
from attention_steps import batch_of

from pagedattn import AttentionSpec, backends
from pagedattn.attention import AttentionOutput
from pagedattn.checking import miswritten
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.step import _decoy, attend_with
from pagedattn.checking.tally import batch_of_seed

# What each planted fault of test_checker_catches.py is to be called; None: it has no name.
NAMES = {
    planted.window_one_short: "window one key short",
    planted.window_one_long: "window one key long",
    planted.window_ignored: "window ignored",
    planted.mask_dropped: "causal mask ignored",
    planted.diagonal_one_early: "diagonal one key early",
    planted.diagonal_one_late: "diagonal one key late",
    planted.last_page_read_to_its_end: "last page read to its end",
    planted.one_page_too_many: "one page too many",
    planted.last_page_dropped: "last page dropped",
    planted.first_tile_dropped: "a piece of the keys is missing",
    planted.pages_in_reverse_order: "pages in reverse order",
    planted.pages_of_the_next_request: "pages of another request",
    planted.nan_of_the_tail_times_zero: "NaN leak",
    planted.lse_in_base_2: "LSE in base 2",
    planted.lse_without_the_maximum: None,
    planted.scale_of_another_head_dim: "sm_scale wrong",
    planted.soft_cap_ignored: "soft cap ignored",
    planted.keys_and_values_swapped: "keys and values swapped",
    planted.kv_heads_interleaved: "query heads of another KV head",
    planted.rows_in_reverse_order: "rows in another order",
    planted.last_row_never_written: "rows never written",
    planted.nan_where_no_key_is_visible: "wrong where no key is visible",
    planted.mean_where_no_key_is_visible: "wrong where no key is visible",
    planted.finite_lse_where_no_key_is_visible: "wrong where no key is visible",
    planted.finite_minus_infinity: "finite minus infinity",
    planted.probabilities_in_8_bits: None,
}
SPEC = AttentionSpec(4, 2, 40, torch.float16)


@dataclass(frozen=True)
class Count:
    caught: int
    named: int  # the planted fault is among the explanations
    named_first: int


DRAWS = {"decode": (0, 6), "prefill": (0, 3), "mixed": (1, 2)}  # mode: seeds


@pytest.fixture(scope="module")
def steps():
    cpu = torch.device("cpu")
    return [batch_of_seed(mode, s, cpu).materialise() for mode in DRAWS for s in DRAWS[mode]]


@pytest.fixture(scope="module")
def counts(steps):
    """For each planted fault how often it is caught and named."""
    return {fault: count(fault, name, steps) for fault, name in NAMES.items()}


def count(fault, name, steps) -> Count:
    found = [diagnose(step, fault(step)) for step in steps]
    names = [diagnosis.names for diagnosis in found if diagnosis is not None]
    named = sum(name in each for each in names)
    return Count(len(names), named, sum(each[:1] == (name,) for each in names))


def test_every_planted_fault_has_its_row():
    assert set(NAMES) == set(planted.FAULTS)


def test_every_planted_fault_is_caught(counts):
    assert not [fault.__name__ for fault, count in counts.items() if count.caught == 0]


def test_at_least_nine_in_ten_planted_faults_are_named(counts):
    """Named: in most answers among the explanations, in some of them the first."""
    unnamed = {
        fault.__name__: count
        for fault, count in counts.items()
        if 2 * count.named <= count.caught or count.named_first == 0
    }
    assert len(unnamed) <= len(counts) / 10, unnamed
    assert list(unnamed) == ["lse_without_the_maximum", "probabilities_in_8_bits"], unnamed


def test_at_least_nine_in_ten_answers_are_explained_by_the_fault_they_come_from(counts):
    with_name = {f.__name__: count for f, count in counts.items() if NAMES[f] is not None}
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


@pytest.mark.parametrize("fault", [planted.StalePlan, planted.StalePages])
def test_a_stale_plan_is_named(fault, monkeypatch):
    entry = backends._Entry(f"{planted.__name__}.{fault.__name__}", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "stale", entry)
    step = batch_of(SPEC, 4, (13, 15), (2, 2)).materialise()
    earlier = replace(step, page_table=_decoy(step.page_table))
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
        attend = planted.reference.attend_one_query
        patch.setattr(
            planted.reference,
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

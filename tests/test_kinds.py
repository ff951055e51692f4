"""Layer kinds for a GPU: few for many seeds, FlashInfer's within the families that are listed."""

import pytest
import torch

from pagedattn.checking.kinds import (
    FLASHINFER_FAMILIES,
    SEEDS_OF_KINDS,
    is_compiled,
    kind_of_seed,
)
from pagedattn.checking.profiles import PROFILES, batch_of_task, kind_of_task

DEEP = PROFILES["deep"]


def kinds(subject, seeds=range(4000)):
    return [kind_of_seed(subject, seed, DEEP.num_kinds, DEEP.num_families) for seed in seeds]


@pytest.mark.parametrize("subject", ["flashinfer", "triton"])
def test_many_seeds_share_few_kinds_and_other_seeds_have_others(subject):
    first = set(kinds(subject))
    assert 0.8 * DEEP.num_kinds < len(first) <= DEEP.num_kinds
    far = set(kinds(subject, range(SEEDS_OF_KINDS, SEEDS_OF_KINDS + DEEP.num_kinds)))
    assert len(far - first) > DEEP.num_kinds / 2


def test_flashinfer_stays_within_its_families_and_reaches_all():
    drawn = kinds("flashinfer")
    assert all(is_compiled("flashinfer", kind.spec) for kind in drawn)
    reached = {(s.dtype, s.head_dim, s.window_left >= 0, s.logits_soft_cap > 0) for s, _ in drawn}
    assert reached == set(map(tuple, FLASHINFER_FAMILIES))
    few = {kind_of_seed("flashinfer", seed, 6, 3).spec.head_dim for seed in range(500)}
    assert few == {64}


def test_kinds_reach_what_a_deep_run_is_to_cover():
    drawn = kinds("flashinfer", range(0, 10 * SEEDS_OF_KINDS, 997)) + kinds("triton")
    assert {1, 16, 256} <= {kind.page_size for kind in drawn}
    assert {64, 128, 256} <= {kind.spec.head_dim for kind in drawn}
    assert {1, 4, 8, 48} <= {kind.spec.group_size for kind in drawn}
    assert {True, False} == {kind.spec.causal for kind in drawn}


def test_a_step_is_of_its_kind_and_most_are_small():
    gpu = torch.device("cuda")
    work = []
    for seed in range(200):
        batch = batch_of_task(DEEP, "flashinfer", "agreement", "mixed", seed, gpu)
        assert (batch.spec, batch.page_size) == kind_of_task(
            DEEP, "flashinfer", "agreement", seed, gpu
        )
        work.append(max(batch.kv_lens))
    assert sorted(work)[150] <= 600 < max(work)

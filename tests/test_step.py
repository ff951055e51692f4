"""`Step`, the oracle on it, and computing it with a backend."""

from dataclasses import replace

import torch
from attention_steps import assert_same_bits, batch_of
from hypothesis import given

from pagedattn import AttentionSpec, backends
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking.step import attend_with, oracle
from pagedattn.testing import batches

SPEC = AttentionSpec(4, 2, 16, torch.float16)


@given(batch=batches(max_kv_len=60))
def test_compacting_keeps_the_answer_and_the_pages_in_use_alone(batch):
    step = batch.materialise()
    small = step.compacted()
    assert_same_bits(oracle(small), oracle(step))
    assert small.kv_cache.shape[0] == len({page for pages in batch.pages for page in pages})
    assert (small.qo_lens, small.kv_lens) == (list(batch.qo_lens), list(batch.kv_lens))


def test_the_oracle_does_not_round():
    step = batch_of(SPEC, 4, (9, 3), (2, 1)).materialise()
    out, lse = oracle(step)
    assert out.dtype == lse.dtype == torch.float64
    assert not torch.equal(out, out.half().double())
    assert not torch.equal(lse, lse.float().double())


class Lazy(ReferenceBackend):
    """Writes nothing, and counts its plans."""

    plans: list[list[int]] = []

    def plan(self, page_table, qo_indptr):
        Lazy.plans.append(page_table.kv_indices.tolist())
        super().plan(page_table, qo_indptr)

    def run(self, q, kv_cache, out, lse):
        pass


def test_what_a_backend_does_not_write_is_nan_and_another_step_is_planned_first(monkeypatch):
    entry = backends._Entry(f"{__name__}.Lazy", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "lazy", entry)
    monkeypatch.setattr(Lazy, "plans", [])
    step = batch_of(SPEC, 4, (9, 3), (2, 1)).materialise()
    out, lse = attend_with("lazy")(step)
    assert out.isnan().all()
    assert lse.isnan().all()
    decoy, real = Lazy.plans
    assert real == step.page_table.kv_indices.tolist()
    assert decoy != real
    assert sorted(decoy) == sorted(real)


def test_a_step_can_be_changed_in_part():
    step = batch_of(SPEC, 4, (9,), (2,)).materialise()
    wide = replace(step, spec=replace(SPEC, causal=False))
    assert not torch.equal(oracle(wide).out, oracle(step).out)

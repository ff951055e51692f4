"""Wrong attention is caught: each planted fault fails the draws that `pagedattn check` makes."""

import numpy as np
import pytest

from pagedattn import PageTable, backends
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking.bound import allowed_error
from pagedattn.checking.compare import compare
from pagedattn.checking.drawing import MODES
from pagedattn.checking.planted.faults import right
from pagedattn.checking.planted.table import NAMES
from pagedattn.checking.profiles import batch_of_seed
from pagedattn.checking.step import attend_with, oracle


@pytest.fixture(scope="module")
def draws():
    """What the check command draws by default, with the right answers."""
    cases = []
    for mode in MODES:
        for seed in range(10):
            step = batch_of_seed(mode, seed).materialise()
            expected = oracle(step)
            cases.append((step, expected, allowed_error(step, expected)))
    return cases


@pytest.mark.parametrize("fault", NAMES, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(draws, fault):
    assert any(not compare(fault(step), *answer).ok for step, *answer in draws)


def test_the_right_answer_passes_every_draw(draws):
    assert all(compare(right(step), *answer).ok for step, *answer in draws)


class StalePlan(ReferenceBackend):
    """Keeps its first plan for ever."""

    def plan(self, page_table: PageTable, qo_indptr: np.ndarray) -> None:
        if not hasattr(self, "kv_lens"):
            super().plan(page_table, qo_indptr)


class StalePages(ReferenceBackend):
    """Takes new lengths and keeps its first pages."""

    def plan(self, page_table: PageTable, qo_indptr: np.ndarray) -> None:
        first = getattr(self, "pages", None)
        super().plan(page_table, qo_indptr)
        if first is not None and [len(p) for p in first] == [len(p) for p in self.pages]:
            self.pages = first


@pytest.mark.parametrize("fault", [StalePlan, StalePages])
def test_a_stale_plan_is_caught(draws, fault, monkeypatch):
    entry = backends._Entry(f"{__name__}.{fault.__name__}", needs="torch", install="")
    monkeypatch.setitem(backends._BACKENDS, "stale", entry)
    attend = attend_with("stale")
    assert any(not compare(attend(step), *answer).ok for step, *answer in draws)

"""The Gluon kernels compute what they should, and await what they read: see `gluon_on_cpu.py`."""

import os
import re

import gluon_on_cpu
import pytest
import torch
from attention_steps import batch_of
from gluon_language import Deadlock, NotAwaited
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, PagedAttention
from pagedattn.attention import AttentionOutput
from pagedattn.checking.compare import check_backend
from pagedattn.checking.step import Step
from pagedattn.kernels import gluon_names
from pagedattn.testing import batches, specs

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("with a GPU the kernels themselves run", allow_module_level=True)
if gluon_names.MISSING:
    pytest.skip(f"this Triton's Gluon has no {gluon_names.MISSING[0]}", allow_module_level=True)

NUM_SMS = 6
HALVES = torch.float16, torch.bfloat16


def attend(step: Step, **options: object) -> AttentionOutput:
    """Twice, with the same bits: what one run leaves behind, the next one finds."""
    attn = PagedAttention(step.spec, step.page_size, backend="triton", device="cpu", **options)
    attn.plan(step.page_table, step.qo_indptr)
    num_tokens, num_rows = len(step.q), len(attn.write_slots)
    q = torch.cat([step.q, step.q.new_full((num_rows - num_tokens, *step.q.shape[1:]), torch.nan)])
    first, second = [
        attn.run_return_lse(q, step.kv_cache, out=torch.full_like(q, torch.nan)) for _ in range(2)
    ]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), "two runs differ"
    assert not first.out[num_tokens:].any(), "padding rows are not 0"
    return AttentionOutput(first.out[:num_tokens], first.lse[:num_tokens])


@given(
    batch=batches(specs=specs(head_dims=(64, 128), dtypes=HALVES, max_qo_heads=8), max_kv_len=700),
    with_capacity=st.booleans(),
)
def test_drawn_steps_are_within_the_bound_of_float64(batch, with_capacity):
    step = batch.materialise("cpu")
    options = {}
    if with_capacity:
        options["capacity"] = Capacity(
            len(batch.kv_lens) + 1, len(step.q) + 70, step.page_table.kv_indices.numel() + 1
        )
    with pytest.MonkeyPatch.context() as patch:
        gluon_on_cpu.use(patch, NUM_SMS)
        comparison = check_backend("triton", step, attend=lambda step: attend(step, **options))
    assert comparison.ok, comparison.worst


def outcome(page_size: int, fault: tuple[str, str] | None = None) -> str:
    """What becomes of a step with prompts, one of them behind a context, and a window."""
    spec = AttentionSpec(4, 2, 64, dtype=torch.float16, window_left=300)
    step = batch_of(spec, page_size, [700, 90, 500], [700, 90, 200]).materialise("cpu")
    with pytest.MonkeyPatch.context() as patch:
        counts = gluon_on_cpu.use(patch, NUM_SMS, fault)
        try:
            comparison = check_backend("triton", step, attend=attend)
        except (AssertionError, Deadlock, NotAwaited) as error:
            return str(error).splitlines()[0]
    assert counts["long_attention_hopper"] == 2
    return "right" if comparison.ok else "wrong"


@pytest.mark.parametrize("page_size", [16, 5])
def test_a_step_without_a_fault_is_right(page_size):
    assert outcome(page_size) == "right"


LAST_WAIT = """acc, weights, m, l, rescale = warpgroup_mma_wait(
            0, deps=[acc_next, next_weights, m, l, rescale]
        )
"""
GIVE_BACK = "        mbarrier.arrive(v_empty.index(v_slot), count=1)\n"
FAULTS = {
    "values are not awaited": (
        "mbarrier.wait(v_full.index(v_slot), v_phase)\n        acc_next", "acc_next",
        "wrong|two runs differ",
    ),
    "values are given back before they are used": (
        LAST_WAIT + GIVE_BACK, GIVE_BACK.strip() + "\n        " + LAST_WAIT,
        "wrong|two runs differ",
    ),
    "a product is not awaited": (LAST_WAIT, LAST_WAIT.replace("0,", "1,"), "a product is read"),
    "a ring is awaited in the wrong phase": (
        "(count // STAGES) & 1) ^ 1", "(count // STAGES) & 1)", "every partition waits",
    ),
    "the tail is not zeroed": ("if end * TILE > kv_len:", "if end * TILE < 0:", "wrong"),
    "units do not wait for room": (
        "mbarrier.wait(empty.index(0), (turn & 1) ^ 1)", "pass",
        "wrong|every partition waits|more arrivals",
    ),
    "turns are not reset": ("gl.store(TURNS, 0)", "pass", "two runs differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    old, new, expected = FAULTS[name]
    assert re.match(expected, outcome(16, (old, new)))


def test_rows_that_are_told_of_too_early_are_caught():
    fault = "async_copy.wait_group(LATER)", "async_copy.wait_group(LATER + 1)"
    assert re.match("wrong|two runs differ", outcome(5, fault))

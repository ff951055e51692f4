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
    batch_invariant=st.booleans(),
    with_capacity=st.booleans(),
)
def test_drawn_steps_are_within_the_bound_of_float64(batch, batch_invariant, with_capacity):
    step = batch.materialise("cpu")
    options: dict[str, object] = {"batch_invariant": batch_invariant}
    if with_capacity:
        options["capacity"] = Capacity(
            len(batch.kv_lens) + 1, len(step.q) + 70, step.page_table.kv_indices.numel() + 1
        )
    with pytest.MonkeyPatch.context() as patch:
        gluon_on_cpu.use(patch, NUM_SMS)
        comparison = check_backend("triton", step, attend=lambda step: attend(step, **options))
    assert comparison.ok, comparison.worst


HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "dtype": torch.float16}
# prompts, one of them behind a context; requests of up to 48 rows, two in several pieces; both
STEPS = {
    "long": (HEADS | {"head_dim": 64, "window_left": 300}, [700, 90, 500], [700, 90, 200]),
    "short": (
        HEADS | {"head_dim": 128, "window_left": 1200}, [1900, 90, 800, 64, 0], [1, 3, 24, 1, 2],
    ),
    "both": (HEADS | {"head_dim": 128}, [1900, 90, 300, 64, 400], [1, 3, 300, 1, 50]),
}  # fmt: skip


def outcome(name: str, page_size: int, fault: tuple[str, str] | None = None) -> str:
    """What becomes of a step of `STEPS`."""
    fields, kv_lens, qo_lens = STEPS[name]
    step = batch_of(AttentionSpec(**fields), page_size, kv_lens, qo_lens).materialise("cpu")
    with pytest.MonkeyPatch.context() as patch:
        counts = gluon_on_cpu.use(patch, NUM_SMS, fault)
        try:
            comparison = check_backend("triton", step, attend=attend)
        except (AssertionError, Deadlock, NotAwaited) as error:
            return str(error).splitlines()[0]
    assert counts == {"attention_hopper": 2}
    return "right" if comparison.ok else "wrong"


@pytest.mark.parametrize(
    ("name", "page_size"), [("long", 16), ("long", 5), ("short", 16), ("both", 16)]
)
def test_a_step_without_a_fault_is_right(name, page_size):
    assert outcome(name, page_size) == "right"


def test_where_no_request_has_a_query_nothing_is_launched(monkeypatch):
    counts = gluon_on_cpu.use(monkeypatch, NUM_SMS)
    step = batch_of(AttentionSpec(4, 2, 64), 16, [40, 0], [0, 0]).materialise("cpu")
    attend(step)
    assert not counts


LAST_WAIT = """acc, weights, m, l, rescale = warpgroup_mma_wait(
            0, deps=[acc_next, next_weights, m, l, rescale]
        )
"""
GIVE_BACK = "        mbarrier.arrive(v_empty.index(v_slot), count=1)\n"
FAULTS = {
    "values are not awaited": (
        "mbarrier.wait(v_full.index(v_slot), v_phase)\n        v = ", "v = ",
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
    "units do not wait for room": (
        "mbarrier.wait(empty.index(0), (turn & 1) ^ 1)", "pass",
        "wrong|every partition waits|more arrivals|the program ends",
    ),
    "the tail is not zeroed": ("if end * TILE > kv_len:", "if end * TILE < 0:", "wrong"),
}  # fmt: skip
FAULTS_OF = {
    "long": {"turns are not reset": ("gl.store(TURNS, 0)", "pass", "two runs differ")},
    "both": {
        "turns are not reset": ("gl.store(TURNS + 2, 0)", "pass", "two runs differ"),
        "a kind of work is left out": ("range(0, 2)", "range(0, 1)", "two runs differ|wrong"),
        "a chunk is computed twice": (
            "first_program) + CONSUMER", "first_program) + CONSUMER + 1", "two runs differ|wrong",
        ),
    },
    "short": {
        "arrivals are not reset": ("gl.store(COUNTER, 0)", "pass", "two runs differ"),
        "a piece is not merged": ("(piece < num_pieces)", "(piece < num_pieces - 1)", "wrong"),
        "a piece is merged twice": ("(piece - 1) * step", "0 * step", "wrong"),
        "a piece's slot is the next one's": (
            "PIECE_ML, slot, end_row", "PIECE_ML, slot + num_kv_heads, end_row",
            "wrong|two runs differ",
        ),
        "a chunk ends a tile early": (
            "end = gl.minimum(chunk_end - block_begin", "end = gl.minimum(chunk_end - 1 - "
            "block_begin", "wrong|every partition waits|two runs differ",
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS_OF)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(name, fault):
    old, new, expected = FAULTS[fault]
    assert re.match(expected, outcome(name, 16, (old, new)))


@pytest.mark.parametrize(
    ("name", "fault"), [(name, f) for name in FAULTS_OF for f in FAULTS_OF[name]]
)
def test_a_planted_fault_of_one_kernel_is_caught(name, fault):
    old, new, expected = FAULTS_OF[name][fault]
    assert re.match(expected, outcome(name, 16, (old, new)))


def test_rows_that_are_told_of_too_early_are_caught():
    fault = "async_copy.wait_group(LATER)", "async_copy.wait_group(LATER + 1)"
    assert re.match("wrong|two runs differ", outcome("long", 5, fault))

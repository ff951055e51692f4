"""The mixed wrapper: every row right, in the caller's order, whatever a step holds."""

import pytest
import torch
from flashinfer_cases import (  # noqa: F401
    HEADS,
    PAGE_SIZE,
    assert_right,
    flashinfer,
    make_step,
    padded_query,
    workspace,
)
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.backends.flashinfer import FlashInferMixedWrapper
from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.backends.flashinfer.mixed_step import split_step
from pagedattn.page_table import PageTable
from pagedattn.slots import write_slots

BATCH, TOKENS, PAGES, PROMPTS = 6, 24, 48, 3


def mixed(device: torch.device, backend: str = "auto") -> FlashInferMixedWrapper:
    return FlashInferMixedWrapper(
        workspace(device),
        workspace(device),
        *HEADS.values(),
        PAGE_SIZE,
        batch_size=BATCH,
        max_total_tokens=TOKENS,
        max_num_pages=PAGES,
        max_prefill_rows=PROMPTS,
        device=device,
        backend=backend,
    )


def plan(wrapper: FlashInferMixedWrapper, step, **options) -> None:
    wrapper.plan(step.qo_indptr, *step.kv_arrays, **options)


STEPS = {
    "decode and prompts": ([33, 9, 6, 17], [1, 5, 6, 1]),
    "prompts first": ([9, 6, 33, 1], [5, 6, 1, 1]),
    "only decode": ([33, 9, 6, 17, 1, 2], [1] * 6),
    "only prompts": ([9, 6, 7], [8, 6, 7]),
    "one prompt of all tokens": ([30], [24]),
    "rows without tokens": ([9, 6, 0, 17, 5], [0, 4, 0, 1, 0]),
    "more queries than keys": ([2, 17, 0, 0], [5, 1, 3, 1]),
    "nothing": ([], []),
    "full": ([9, 9, 9, 9, 9, 9], [8, 1, 6, 1, 7, 1]),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_row_is_right_and_padding_is_finite(device, name):
    step = make_step(device, *STEPS[name])
    wrapper = mixed(device)
    plan(wrapper, step)
    out, lse = wrapper.run_return_lse(padded_query(step, TOKENS), step.kv_cache)
    assert_right(out, lse, step)
    assert torch.isfinite(out).all()


def test_one_wrapper_serves_steps_of_any_kind_one_after_the_other(device):
    wrapper = mixed(device)
    for seed, (kv_lens, qo_lens) in enumerate([*STEPS.values(), *reversed(STEPS.values())]):
        step = make_step(device, kv_lens, qo_lens, seed=seed)
        plan(wrapper, step)
        assert_right(*wrapper.run_return_lse(padded_query(step, TOKENS), step.kv_cache), step)


@pytest.mark.parametrize(  # window and cap apart: each combination is minutes of compiling
    "options",
    [{"window_left": 0}, {"window_left": 3, "sm_scale": 0.3}, {"logits_soft_cap": 1.0}],
    ids=str,
)
def test_windows_and_options_reach_both_halves(device, options):
    step = make_step(device, *STEPS["decode and prompts"])
    wrapper = mixed(device)
    plan(wrapper, step, **options)
    out, lse = wrapper.run_return_lse(padded_query(step, TOKENS), step.kv_cache)
    assert_right(out, lse, step, **options)


def test_too_large_steps_name_the_size_to_raise_and_touch_nothing(device):
    wrapper = mixed(device)
    good = make_step(device, *STEPS["full"])
    plan(wrapper, good)
    slots = wrapper.write_slots.clone()
    for kv_lens, qo_lens, name in [
        ([5] * 4, [2] * 4, "max_prefill_rows=3"),
        ([5] * 7, [1] * 7, "batch_size=6"),
        ([25], [25], "max_total_tokens=24"),
        ([200], [1], "max_num_pages=48"),
    ]:
        step = make_step(device, kv_lens, qo_lens)
        with pytest.raises(ValueError, match=name):
            plan(wrapper, step)
        with pytest.raises(RuntimeError, match="no plan"):
            wrapper.run(padded_query(good, TOKENS), good.kv_cache)
    assert torch.equal(wrapper.write_slots, slots)
    plan(wrapper, good)
    assert_right(wrapper.run(padded_query(good, TOKENS), good.kv_cache), None, good)


@pytest.mark.parametrize(
    ("backend", "options", "error"),
    [
        ("fa3", {"window_left": 3}, "window_left=3"),
        ("fa2", {"causal": False, "window_left": 3, "disable_split_kv": False}, "split"),
    ],
)
def test_what_the_prompts_half_refuses_fixes_nothing_in_the_other(device, backend, options, error):
    on_gpu = device.type == "cuda"
    if backend == "fa3" and on_gpu and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a GPU of compute capability 9.0")
    wrapper = mixed(device, backend)
    step = make_step(device, *STEPS["full"])
    with pytest.raises(ValueError, match=error):
        plan(wrapper, step, **options)
    plan(wrapper, step)
    assert_right(wrapper.run(padded_query(step, TOKENS), step.kv_cache), None, step)


def test_new_tokens_are_written_where_the_reference_writes_them(device):
    step = make_step(device, *STEPS["more queries than keys"])
    wrapper = mixed(device)
    plan(wrapper, step)
    right = write_slots(step.table, step.qo_indptr)
    assert torch.equal(wrapper.write_slots[: len(right)].cpu(), right)
    assert bool((wrapper.write_slots[len(right) :] == -1).all())
    assert bool((wrapper.token_to_page[len(right) :] == wrapper.sink_page).all())
    has_place = right >= 0
    page, place = wrapper.token_to_page[: len(right)], wrapper.token_to_cache[: len(right)]
    assert torch.equal((page * PAGE_SIZE + place).cpu()[has_place], right[has_place])


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=8),
    gap=st.booleans(),
    causal=st.booleans(),
)
def test_splitting_keeps_every_token_and_every_page(rows, gap, causal):
    qo_lens, kv_lens = [q for _, q in rows], [kv for kv, _ in rows]
    table = PageTable.from_lengths(kv_lens, 2)
    qo_indptr = torch.tensor([0, *qo_lens], dtype=torch.int32).cumsum(0).int()
    parts = split_step(HostStep.of_table(table, qo_indptr.numpy()), causal=causal, last_gap=gap)
    decode = [r for r, q in enumerate(qo_lens) if q == 1]
    prompts = [r for r, q in enumerate(qo_lens) if q > 1]
    assert parts.num_prompts == len(prompts)
    assert parts.decode_places.tolist() == [int(qo_indptr[r]) for r in decode]
    assert parts.decode.kv_lens.tolist() == [kv_lens[r] for r in decode]
    for row, request in enumerate(decode):
        assert pages_of(parts.decode, row) == table.pages_of(request).tolist()
    inner = parts.prefill
    for row, request in enumerate(prompts):
        begin, end = inner.qo_indptr[2 * row + 1 : 2 * row + 3].tolist()
        without_keys = max(qo_lens[request] - kv_lens[request], 0) if causal else 0
        assert begin == int(qo_indptr[request]) + without_keys
        assert end == int(qo_indptr[request + 1])
        assert pages_of(inner, 2 * row + 1) == table.pages_of(request).tolist()
        assert inner.kv_lens[2 * row : 2 * row + 2].tolist() == [0, kv_lens[request]]
        assert pages_of(inner, 2 * row) == []
    last = sum(qo_lens) if gap else max((int(qo_indptr[r + 1]) for r in prompts), default=0)
    assert inner.num_tokens == last


def pages_of(step: HostStep, row: int) -> list[int]:
    return step.kv_indices[step.kv_indptr[row] : step.kv_indptr[row + 1]].tolist()

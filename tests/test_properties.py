"""Relations between answers that hold for every backend, whatever the right answer is."""

from dataclasses import replace

import pytest
import torch
from attention_steps import (
    assert_related,
    assert_same_bits,
    batch_of,
    half,
    require_low_scores,
    require_support,
    supported_batches,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, unsupported_reasons
from pagedattn.attention import AttentionOutput
from pagedattn.checking.bound import Bound, allowed_error
from pagedattn.checking.compare import arithmetic_of
from pagedattn.checking.dense import visible_mask
from pagedattn.checking.step import Step, attend_with, oracle
from pagedattn.checking.transforms import (
    last_queries,
    last_rows,
    rename_pages,
    repack,
    rows_of,
    select_requests,
    split_keys,
)


def draw_batch(data, backend, device, **limits):
    batch = data.draw(supported_batches(backend, device, small=True, **limits))
    assume(not unsupported_reasons(backend, batch.spec, batch.page_size, device))
    return batch


def bound_of(backend: str, step: Step) -> Bound:
    return allowed_error(step, oracle(step), arithmetic_of(backend))


def pick(answer, index: torch.Tensor):
    """These rows of an `AttentionOutput` or of a `Bound`."""
    return type(answer)(*(tensor[index.to(tensor.device)] for tensor in answer))


@given(data=st.data())
def test_renaming_physical_pages_changes_no_bit(backend, device, data):
    step = draw_batch(data, backend, device).materialise(device)
    num_pages = step.kv_cache.shape[0]
    spare = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 2**16))
    new_ids = torch.randperm(num_pages + spare, generator=torch.Generator().manual_seed(seed))
    renamed = rename_pages(step, new_ids[:num_pages].tolist(), num_pages + spare)
    attend = attend_with(backend)
    assert_same_bits(attend(renamed), attend(step))


@given(data=st.data())
def test_no_bit_depends_on_what_no_query_may_see(backend, device, data):
    batch = draw_batch(data, backend, device)
    attend = attend_with(backend)
    clean = attend(replace(batch, garbage="zeros").materialise(device))
    assert_same_bits(attend(batch.materialise(device)), clean)


@given(data=st.data())
def test_nan_in_one_request_changes_that_request_alone(backend, device, data):
    batch = draw_batch(data, backend, device)
    assume(batch.kv_lens)
    victim = data.draw(st.integers(0, len(batch.kv_lens) - 1))
    others = [r for r in range(len(batch.kv_lens)) if r != victim]
    own = set(batch.pages[victim]) - {page for r in others for page in batch.pages[r]}
    step = batch.materialise(device)
    poisoned = replace(step, kv_cache=step.kv_cache.clone())
    poisoned.kv_cache[torch.tensor(sorted(own), dtype=torch.int64, device=device)] = torch.nan
    attend = attend_with(backend)
    before, after = attend(step), attend(poisoned)
    kept = rows_of(step, others)
    assert_same_bits(pick(after, kept), pick(before, kept))
    if own == set(batch.pages[victim]):  # nothing is shared: every row of it that sees a key is NaN
        hit = pick(after, rows_of(step, [victim]))
        seen = visible_mask(batch.spec, batch.qo_lens[victim], batch.kv_lens[victim]).any(1)
        assert hit.out[seen.to(device)].isnan().all()
        assert (hit.out[~seen.to(device)] == 0).all()


@given(data=st.data())
def test_a_query_of_zeros_gets_the_mean_of_what_it_sees(backend, device, data):
    batch = replace(draw_batch(data, backend, device), values="zero_query")
    step = batch.materialise(device)
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    lse = torch.full(step.q.shape[:2], -torch.inf, dtype=torch.float64)
    for request, (qo_len, kv_len) in enumerate(zip(step.qo_lens, step.kv_lens, strict=True)):
        alone = repack(select_requests(step, [request]), max(kv_len, 1))  # one page holds all
        mask = visible_mask(step.spec, qo_len, kv_len)
        for row, seen in zip(rows_of(step, [request]).tolist(), mask, strict=True):
            if seen.any():
                v = alone.kv_cache[0, 1].cpu().double()[seen]
                out[row] = v.mean(0).repeat_interleave(step.spec.group_size, dim=0)
                lse[row] = seen.sum().double().log()
    expected = AttentionOutput(out, lse)
    bound = allowed_error(step, expected, arithmetic_of(backend))
    assert_related(attend_with(backend)(step), expected, bound)


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


@pytest.mark.parametrize("shift", [-60000.0, -1000.0, 3.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adding_a_constant_to_all_scores_shifts_the_lse_alone(backend, device, shift, dtype):
    spec = AttentionSpec(4, 2, 64, dtype)
    require_support(backend, spec, 4, device)
    if shift == -60000:
        require_low_scores(backend)
    step = batch_of(spec, 4, (37, 9, 0), (1, 9, 2), garbage="zeros").materialise(device)
    step.q[..., -1] = 64
    step.kv_cache[:, 0, ..., -1] = 0
    expected = oracle(step)
    step.kv_cache[:, 0, ..., -1] = shift / (64 * spec.scale)
    exact_shift = step.kv_cache[0, 0, 0, 0, -1].item() * 64 * spec.scale
    shifted = AttentionOutput(expected.out, expected.lse + exact_shift)
    bound = allowed_error(step, shifted, arithmetic_of(backend))
    assert_related(attend_with(backend)(step), shifted, bound)


@given(data=st.data())
def test_identical_requests_get_the_same_rows(backend, device, data):
    step = draw_batch(data, backend, device).materialise(device)
    assume(step.kv_lens)
    twins = select_requests(step, [0, *range(len(step.kv_lens)), 0])
    answer, bound = attend_with(backend)(twins), bound_of(backend, twins)
    first, first_bound = (pick(each, rows_of(twins, [0])) for each in (answer, bound))
    for other in (1, len(twins.kv_lens) - 1):
        # within rounding: a schedule may cut the same keys in other places
        rows = rows_of(twins, [other])
        assert_related(pick(answer, rows), first, first_bound, pick(bound, rows))


@given(data=st.data())
def test_other_requests_and_their_order_do_not_matter(backend, device, data):
    step = draw_batch(data, backend, device).materialise(device)
    everyone = list(range(len(step.kv_lens)))
    order = data.draw(st.permutations(everyone)) if everyone else []
    kept = order[: data.draw(st.integers(0, len(order)))]
    fewer = select_requests(step, kept)
    attend, index = attend_with(backend), rows_of(step, kept)
    bound = pick(bound_of(backend, step), index)
    assert_related(attend(fewer), pick(attend(step), index), bound, bound)


@given(data=st.data(), page_size=st.sampled_from([1, 2, 3, 5, 7, 16, 64]))
def test_the_page_size_does_not_matter(backend, device, data, page_size):
    step = draw_batch(data, backend, device).materialise(device)
    assume(not unsupported_reasons(backend, step.spec, page_size, device))
    attend, bound = attend_with(backend), bound_of(backend, step)
    assert_related(attend(repack(step, page_size)), attend(step), bound, bound)


@given(data=st.data())
def test_a_decode_row_is_the_last_row_of_its_prefill(backend, device, data):
    step = draw_batch(data, backend, device, mode="prefill").materialise(device)
    attend, index = attend_with(backend), last_rows(step, 1)
    bound = pick(bound_of(backend, step), index)
    assert_related(attend(last_queries(step, 1)), pick(attend(step), index), bound, bound)


@given(data=st.data())
def test_a_decode_row_does_not_change_in_a_mixed_step(backend, device, data):
    step = draw_batch(data, backend, device, mode="mixed").materialise(device)
    decodes = [r for r, qo_len in enumerate(step.qo_lens) if qo_len == 1]
    attend, index = attend_with(backend), rows_of(step, decodes)
    bound = pick(bound_of(backend, step), index)
    alone = attend(select_requests(step, decodes))
    assert_related(alone, pick(attend(step), index), bound, bound)


@given(data=st.data())
def test_chunks_of_keys_merged_by_their_lse_are_one_pass(backend, device, data):
    step = draw_batch(data, backend, device, max_window_left=-1).materialise(device)
    most = []
    for kv_len, qo_len in zip(step.kv_lens, step.qo_lens, strict=True):
        visible_to_all = max(0, kv_len - qo_len + 1) if step.spec.causal else kv_len
        most.append(min(visible_to_all, kv_len) // step.page_size)
    first, rest = split_keys(step, [data.draw(st.integers(0, pages)) for pages in most])
    attend = attend_with(backend)
    merged, allowed = merge(
        attend(first), bound_of(backend, first), attend(rest), bound_of(backend, rest)
    )
    assert_related(merged, attend(step), allowed, bound_of(backend, step))


def merge(
    a: AttentionOutput, a_bound: Bound, b: AttentionOutput, b_bound: Bound
) -> tuple[AttentionOutput, Bound]:
    """Merge two answers over disjoint keys, in float64, with the error that theirs allow.

    The weights are `exp(lse - merged lse)`; errors `x` and `y` of the two LSEs move the output by
    at most `(exp(x + y) - 1) w_a w_b |a - b|` to first order.
    """
    (a_out, a_lse), (b_out, b_lse) = ((t.double().cpu() for t in answer) for answer in (a, b))
    lse = torch.logaddexp(a_lse, b_lse)
    empty = lse == -torch.inf
    w_a, w_b = (torch.exp(part - lse).masked_fill(empty, 0)[..., None] for part in (a_lse, b_lse))
    out = w_a * a_out + w_b * b_out
    moved = torch.expm1(a_bound.lse + b_bound.lse)[..., None] * w_a * w_b * (a_out - b_out).abs()
    out_bound = w_a * a_bound.out + w_b * b_bound.out + moved
    lse_bound = w_a[..., 0] * a_bound.lse + w_b[..., 0] * b_bound.lse
    tiny = 1e-12 * (1 + lse.masked_fill(empty, 0).abs())
    return AttentionOutput(out, lse), Bound(out_bound + 1e-12, lse_bound + tiny)


@pytest.mark.parametrize(
    "option",
    [{"causal": False}, {"window_left": 5}, {"sm_scale": 0.5}, {"logits_soft_cap": 1.0}],
    ids=lambda option: next(iter(option)),
)
def test_every_option_changes_the_answer(backend, device, option):
    plain = AttentionSpec(4, 2, 64, half(backend))
    spec = replace(plain, **option)
    require_support(backend, spec, 4, device)
    step = batch_of(plain, 4, (37, 20), (1, 9), garbage="zeros").materialise(device)
    attend = attend_with(backend)
    without, with_option = attend(step), attend(replace(step, spec=spec))
    again = attend(step)  # in the same process, after the option
    assert_same_bits(again, without)
    allowed = bound_of(backend, step)
    changed = (with_option.out.double() - without.out.double()).abs().cpu() > 4 * allowed.out
    # the last query of a request sees the same keys, causal or not
    rows = range(1, 9) if "causal" in option else range(10)
    assert all(changed[row].any() for row in rows)

"""Every bad input is refused through the facade, by name, with what was got and expected."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable
from pagedattn.validation import check_page_table

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float16)
PAGE_SIZE = 4
LENS = [5, 3]  # three pages


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good_table() -> PageTable:
    return PageTable.from_lengths(LENS, PAGE_SIZE)


@pytest.fixture
def attn() -> PagedAttention:
    return PagedAttention(SPEC, PAGE_SIZE, backend="reference", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_indptr": torch.tensor([0, 2, 3])},
            "kv_indptr must be int32, got torch.int64",
        ),
        (
            {"kv_indices": torch.tensor([0, 1, 2])},
            "kv_indices must be int32, got torch.int64",
        ),
        ({"kv_lens": torch.tensor([5, 3])}, "kv_lens must be int32, got torch.int64"),
        (
            {"kv_lens": torch.tensor([5.0, 3.0])},
            "kv_lens must be int32, got torch.float32",
        ),
        (
            {"kv_indptr": int32(0, 9, 2, 9, 3)[::2]},
            r"kv_indptr must be contiguous, got stride \(2,\)",
        ),
        (
            {"kv_indices": int32(0, 9, 1, 9, 2)[::2]},
            r"kv_indices must be contiguous, got stride \(2,\)",
        ),
        ({"kv_lens": int32(5, 9, 3)[::2]}, r"kv_lens must be contiguous, got stride \(2,\)"),
        ({"kv_indptr": int32(0)}, r"kv_indptr must have shape \[3\], got \[1\]"),
        ({"kv_indptr": int32(0, 2, 3, 3)}, r"kv_indptr must have shape \[3\], got \[4\]"),
        ({"kv_indices": int32(0, 1)}, r"kv_indices must have shape \[3\], got \[2\]"),
        ({"kv_indices": int32(0, 1, 2, 3)}, r"kv_indices must have shape \[3\], got \[4\]"),
        ({"kv_lens": int32(5, 3)[None]}, r"kv_lens must have shape \[batch\], got \[1, 2\]"),
        ({"kv_indptr": int32(0, 3, 2)}, "kv_indptr must not decrease, got 3 then 2 at entry 2"),
        ({"kv_indptr": int32(1, 2, 3)}, "kv_indptr must start at 0, got 1"),
        ({"kv_indptr": int32(0, -1, 3)}, "kv_indptr must not decrease, got 0 then -1 at entry 1"),
        ({"kv_indptr": int32(0, 2**31 - 1, 3)}, "kv_indptr must not decrease, got 2147483647"),
        ({"kv_indptr": int32(0, -(2**31), 3)}, "kv_indptr must not decrease, got 0 then -2147"),
        ({"kv_lens": int32(5, -(2**31))}, "kv_lens must not be negative, got -2147483648"),
        ({"kv_lens": int32(-3, 3)}, "kv_lens must not be negative, got -3"),
        ({"kv_indptr": int32(0, 2, 3).to("meta")}, "page_table must be on one device"),
        ({"kv_lens": int32(5, -1)}, "kv_lens must not be negative, got -1"),
        (
            {"kv_lens": int32(9, 3)},
            "request 0 has kv_len 9 and 2 pages of 4 tokens, expected 3 pages",
        ),
        (
            {"kv_lens": int32(5, 0)},
            "request 1 has kv_len 0 and 1 pages of 4 tokens, expected 0 pages",
        ),
        (
            {"kv_lens": int32(4, 3)},
            "request 0 has kv_len 4 and 2 pages of 4 tokens, expected 1 pages",
        ),
        (
            {"kv_lens": int32(5, 2**31 - 1)},
            "request 1 has kv_len 2147483647 and 1 pages of 4 tokens, expected 536870912 pages",
        ),
        ({"kv_indices": int32(0, 1, -1)}, "kv_indices must not be negative, got page id -1"),
        ({"page_size": 8}, "page_table.page_size is 8, expected 4"),
    ],
)
def test_a_wrong_page_table_is_refused(attn, changes, message):
    with pytest.raises(ValueError, match=message):
        attn.plan(replace(good_table(), **changes))


EDGES = [-(2**31), -(2**30), -17, -16, -1, 0, 1, 2, 15, 16, 17, 33, 2**28, 2**31 - 16, 2**31 - 1]


@given(
    page_size=st.sampled_from([1, 3, 16]),
    lens=st.lists(st.sampled_from([0, 1, 15, 16, 17, 33]), min_size=1, max_size=4),
    changes=st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from(EDGES)), max_size=3
    ),
)
def test_a_table_is_accepted_exactly_where_every_request_is_right(page_size, lens, changes):
    table = PageTable.from_lengths(lens, page_size)
    for to_lens, place, value in changes:
        array = table.kv_lens if to_lens else table.kv_indptr
        array[place % len(array)] = value
    lens, bounds = table.kv_lens.tolist(), table.kv_indptr.tolist()
    right = bounds[0] == 0 and bounds[-1] == len(table.kv_indices)
    for kv_len, begin, end in zip(lens, bounds, bounds[1:], strict=False):
        right = right and kv_len >= 0 and end - begin == -(-kv_len // page_size)
    with nullcontext() if right else pytest.raises(ValueError, match=r"expected|must"):
        check_page_table(table, page_size)


@pytest.mark.parametrize(
    ("qo_indptr", "message"),
    [
        (torch.tensor([0, 1, 2]), "qo_indptr must be int32, got torch.int64"),
        ([0, 1, 2], "qo_indptr must be an int32 tensor, got list"),
        (int32(0, 9, 1, 9, 2)[::2], r"qo_indptr must be contiguous, got stride \(2,\)"),
        (int32(0, 1), r"qo_indptr must have shape \[3\], got \[2\]"),
        (int32(0, 1, 2)[None], r"qo_indptr must have shape \[3\], got \[1, 3\]"),
        (int32(0, 3, 2), "qo_indptr must not decrease, got 3 then 2 at entry 2"),
        (int32(1, 2, 3), "qo_indptr must start at 0, got 1"),
    ],
)
def test_a_wrong_qo_indptr_is_refused(attn, qo_indptr, message):
    with pytest.raises(ValueError, match=message):
        attn.plan(good_table(), qo_indptr)


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"), [((9, 4), (5, 3)), ((0, 0), (5, 3)), ((2, 1), (0, 0)), ((), ())]
)
def test_unusual_lengths_are_legal(attn, qo_lens, kv_lens):
    qo_indptr = torch.tensor([0, *qo_lens]).cumsum(0).int()
    attn.plan(PageTable.from_lengths(kv_lens, PAGE_SIZE), qo_indptr)
    assert attn.run(good_q(sum(qo_lens)), good_cache()).shape[0] == sum(qo_lens)


def test_the_last_page_of_the_cache_is_inside_and_the_next_is_outside(attn):
    attn.plan(PageTable.from_lengths(LENS, PAGE_SIZE, [0, 2, 1]))
    attn.run(good_q(), good_cache(3))
    attn.plan(PageTable.from_lengths(LENS, PAGE_SIZE, [0, 3, 1]))
    with pytest.raises(ValueError, match=r"kv_cache has 3 pages, .* table holds page id 3"):
        attn.run(good_q(), good_cache(3))


def good_q(num_tokens: int = 2) -> torch.Tensor:
    return torch.ones(num_tokens, 4, 16, dtype=torch.float16)


def good_cache(num_pages: int = 3) -> torch.Tensor:
    return torch.ones(num_pages, 2, PAGE_SIZE, 2, 16, dtype=torch.float16)


def good_pages(num_pages: int = 3) -> torch.Tensor:
    return good_cache(num_pages)[:, 0].contiguous()


SHAPE_OF_Q = r"must have shape \[2, 4, 16\] \[tokens, num_qo_heads, head_dim\]"


@pytest.mark.parametrize("name", ["q", "out"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (good_q(3), SHAPE_OF_Q + r", got \[3, 4, 16\]"),
        (good_q()[:, :2], SHAPE_OF_Q + r", got \[2, 2, 16\]"),
        (good_q()[..., :8], SHAPE_OF_Q + r", got \[2, 4, 8\]"),
        (good_q().flatten(1), SHAPE_OF_Q + r", got \[2, 64\]"),
        (good_q().bfloat16(), "must be torch.float16, got torch.bfloat16"),
        (good_q().float(), "must be torch.float16, got torch.float32"),
        (good_q().to("meta"), "must be on cpu, got meta"),
        (good_q().transpose(1, 2).contiguous().transpose(1, 2), "must be dense in its last two"),
        (good_q().repeat(1, 2, 1)[:, ::2], "must be dense in its last two dimensions"),
    ],
)
def test_a_wrong_q_or_out_is_refused(attn, name, tensor, message):
    attn.plan(good_table())
    tensors = {"q": good_q(), "out": None} | {name: tensor}
    with pytest.raises(ValueError, match=f"^{name} {message}"):
        attn.run(tensors["q"], good_cache(), out=tensors["out"])


@pytest.mark.parametrize(
    ("lse", "message"),
    [
        (torch.ones(2, 3), r"lse must have shape \[2, 4\] \[tokens, num_qo_heads\], got \[2, 3\]"),
        (torch.ones(4, 2), r"lse must have shape \[2, 4\] \[tokens, num_qo_heads\], got \[4, 2\]"),
        (torch.ones(2, 4).double(), "lse must be torch.float32, got torch.float64"),
        (torch.ones(2, 4, device="meta"), "lse must be on cpu, got meta"),
        (torch.ones(4, 2).t(), r"lse must be contiguous, got stride \(1, 2\)"),
    ],
)
def test_a_wrong_lse_is_refused(attn, lse, message):
    attn.plan(good_table())
    with pytest.raises(ValueError, match=message):
        attn.run_return_lse(good_q(), good_cache(), lse=lse)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            good_cache()[..., :8],
            r"kv_cache must have shape \[pages, 2, 4, 2, 16\] .* got \[3, 2, 4, 2, 8\]",
        ),
        (good_cache()[:, :, :3], "kv_cache must have shape .* got"),
        (good_cache()[:, :, :, :1], "kv_cache must have shape .* got"),
        (good_cache().transpose(0, 1), r"kv_cache must have shape .* got \[2, 3, 4, 2, 16\]"),
        (good_cache().transpose(2, 3), r"kv_cache must have shape .* got \[3, 2, 2, 4, 16\]"),
        (good_cache()[None], r"kv_cache must have shape .* got \[1, 3, 2, 4, 2, 16\]"),
        (good_cache(2), "kv_cache has 2 pages, but the planned page table holds page id 2"),
        (good_cache().float(), "kv_cache must be torch.float16, got torch.float32"),
        (good_cache().to("meta"), "kv_cache must be on cpu, got meta"),
        (good_cache().repeat(1, 1, 1, 1, 2)[..., ::2], "kv_cache must be dense in its last two"),
        ((good_pages(), good_pages()[:, :3]), r"v_pages must have shape \[pages, 4, 2, 16\]"),
        ((good_pages()[..., :8], good_pages()), r"k_pages must have shape .* got \[3, 4, 2, 8\]"),
        ((good_pages(), good_pages(2)), "v_pages has 2 pages, but the planned page table"),
        ((good_pages().bfloat16(), good_pages()), "k_pages must be torch.float16, got"),
        ((good_pages(), good_pages().to("meta")), "v_pages must be on cpu, got meta"),
        ((good_pages(), good_pages(), good_pages()), "kv_cache must be one tensor or two, got 3"),
    ],
)
def test_a_wrong_cache_is_refused(attn, cache, message):
    attn.plan(good_table())
    with pytest.raises(ValueError, match=message):
        attn.run(good_q(), cache)


def test_sizes_that_could_be_read_in_two_ways_are_told_apart():
    """With two pages, [2, pages, ...] and [pages, 2, ...] look alike but for their other sizes."""
    attn = PagedAttention(SPEC, PAGE_SIZE, backend="reference", device="cpu")
    attn.plan(PageTable.from_lengths([8], PAGE_SIZE))
    heads_first = torch.ones(2, 2, 2, PAGE_SIZE, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"kv_cache must have shape .* got \[2, 2, 2, 4, 16\]"):
        attn.run(good_q(1), heads_first)


def test_nothing_is_written_before_the_checks_pass(attn):
    attn.plan(good_table())
    out, lse = torch.full((2, 4, 16), 7.0).half(), torch.full((2, 4), 7.0)
    with pytest.raises(ValueError, match="kv_cache has 1 pages"):
        attn.run_return_lse(good_q(), good_cache(1), out=out, lse=lse)
    with pytest.raises(ValueError, match="lse must be contiguous"):
        attn.run_return_lse(good_q(), good_cache(), out=out, lse=torch.ones(4, 2).t())
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 4), "max_batch_size must be at least 1, got 0"),
        ((2, 0, 4), "max_tokens must be at least 1, got 0"),
        ((2, 4, 0), "max_pages must be at least 1, got 0"),
        ((4, 2, 4), "max_tokens=2 must be at least max_batch_size=4"),
    ],
)
def test_a_wrong_capacity_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Capacity(*arguments)


def test_a_step_above_the_capacity_is_refused_with_every_bound_that_it_breaks():
    attn = PagedAttention(
        SPEC, PAGE_SIZE, backend="reference", device="cpu", capacity=Capacity(2, 3, 3)
    )
    attn.plan(good_table())
    with pytest.raises(ValueError, match="max_pages=3 but the step has 4") as error:
        attn.plan(PageTable.from_lengths([8, 3, 3], PAGE_SIZE), int32(0, 2, 3, 4))
    assert "max_batch_size=2 but the step has 3" in str(error.value)
    assert "max_tokens=3 but the step has 4" in str(error.value)

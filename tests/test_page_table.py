"""`PageTable`, its conversions and `write_slots`, against brute force and their inverses."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import PageTable, write_slots
from pagedattn.testing import page_tables, query_lengths


def lists(table: PageTable) -> tuple[int, list[int], list[int], list[int]]:
    fields = (table.kv_indptr, table.kv_indices, table.kv_lens)
    assert all(field.dtype == torch.int32 and field.is_contiguous() for field in fields)
    return (table.page_size, *(field.tolist() for field in fields))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_from_lengths_deals_out_pages_in_order():
    table = PageTable.from_lengths([5, 0, 8, 1], 4, page_ids=[9, 3, 7, 1, 5, 2])
    assert lists(table) == (4, [0, 2, 2, 4, 5], [9, 3, 7, 1, 5], [5, 0, 8, 1])


@given(table=page_tables())
def test_every_request_has_the_pages_that_its_length_needs(table):
    for request, kv_len in enumerate(table.kv_lens.tolist()):
        assert table.pages_of(request).numel() == -(-kv_len // table.page_size)


@given(table=page_tables())
def test_arrays_are_over_the_memory_of_their_own_tensors(table):
    assert table.arrays is table.arrays  # made once, so that a copy could take them along
    for each in [table, copy.copy(table), copy.deepcopy(table), pickle.loads(pickle.dumps(table))]:
        tensors = (each.kv_indptr, each.kv_indices, each.kv_lens)
        for array, tensor in zip(each.arrays, tensors, strict=True):
            assert array.tolist() == tensor.tolist()
            assert np.shares_memory(array, tensor.numpy()) or not tensor.numel()


@given(table=page_tables())
def test_csr_goes_to_its_last_page_lengths_and_back(table):
    back = PageTable.from_csr(
        table.kv_indptr, table.kv_indices, table.last_page_len, table.page_size
    )
    assert lists(back) == lists(table)


@given(table=page_tables())
def test_last_page_len_is_what_whole_pages_leave(table):
    for kv_len, last in zip(table.kv_lens.tolist(), table.last_page_len.tolist(), strict=True):
        assert 0 <= last <= table.page_size
        assert (kv_len - last) % table.page_size == 0
        assert (last == 0) == (kv_len == 0)


@given(table=page_tables(), extra=st.integers(0, 3))
def test_a_block_table_goes_there_and_back_however_wide(table, extra):
    block_table = table.to_block_table(fill=-7)
    wide = torch.nn.functional.pad(block_table, (0, extra), value=2**31 - 1)
    back = PageTable.from_block_table(wide, table.kv_lens, table.page_size)
    assert lists(back) == lists(table)


def test_a_block_table_is_filled_after_each_request():
    table = PageTable.from_lengths([5, 0, 3], 2, page_ids=[4, 2, 0, 1, 3])
    assert table.to_block_table().tolist() == [[4, 2, 0], [-1, -1, -1], [1, 3, -1]]
    assert table.to_block_table(fill=0).tolist()[1] == [0, 0, 0]


@given(table=page_tables())
def test_a_token_map_goes_back_to_its_table(table):
    width = int(table.kv_lens.max()) if table.batch_size else 0
    slots = torch.full((table.batch_size, width), -5, dtype=torch.int32)
    for request, kv_len in enumerate(table.kv_lens.tolist()):
        for token in range(kv_len):
            page = int(table.pages_of(request)[token // table.page_size])
            slots[request, token] = page * table.page_size + token % table.page_size
    back = PageTable.from_token_map(slots, table.kv_lens, table.page_size)
    assert lists(back) == lists(table)


@given(table=page_tables(min_batch_size=2), data=st.data())
def test_write_slots_are_where_each_new_token_belongs(table, data):
    kv_lens = table.kv_lens.tolist()
    mode = data.draw(st.sampled_from(["prefill", "decode", "mixed"]))
    qo_lens = data.draw(query_lengths(kv_lens, mode=mode))
    expected = []
    for request, (kv_len, qo_len) in enumerate(zip(kv_lens, qo_lens, strict=True)):
        for position in range(kv_len - qo_len, kv_len):
            if position < 0:
                expected.append(-1)
            else:
                page = int(table.pages_of(request)[position // table.page_size])
                expected.append(page * table.page_size + position % table.page_size)
    slots = write_slots(table, torch.tensor([0, *qo_lens]).cumsum(0).int())
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected


def test_write_slots_do_not_overflow_32_bits():
    table = PageTable.from_lengths([5], page_size=4, page_ids=[0, 2**31 - 1])
    assert write_slots(table, int32(0, 1)).tolist() == [(2**31 - 1) * 4]


def test_write_slots_of_an_empty_batch_are_empty():
    table = PageTable.from_lengths([], page_size=4)
    assert write_slots(table, int32(0)).tolist() == []
    assert table.to_block_table().shape == (0, 0)


def test_to_keeps_the_table(device):
    table = PageTable.from_lengths([5, 2], page_size=4)
    assert lists(table.to(device).to("cpu")) == lists(table)
    assert table.to("cpu") is table


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PageTable.from_lengths([3], 0), "page_size must be at least 1, got 0"),
        (lambda: PageTable.from_lengths([3, -1], 4), "kv_lens must not be negative, got -1"),
        (lambda: PageTable.from_lengths([9], 4, [1, 2]), "page_ids has 2 pages, kv_lens need 3"),
        (lambda: PageTable.from_lengths(torch.tensor([3]), 4), "kv_lens must be int32, got .*64"),
        (lambda: PageTable(4, [0, 1], [7], [3]), "kv_indptr must be an int32 tensor, got list"),
        (lambda: PageTable.from_lengths(int32(3)[None], 4), "kv_lens must have 1 dim"),
        (lambda: PageTable.from_csr([0, 1, 2], [5, 6], [1], 4), "kv_indptr has 3 entries.* 2"),
        (lambda: PageTable.from_csr([0, 1], [5], [5], 4), r"last_page_len\[0\] is 5.* 1 to 4"),
        (lambda: PageTable.from_csr([0, 1], [5], [0], 4), r"last_page_len\[0\] is 0.* 1 to 4"),
        (lambda: PageTable.from_csr([0, 0], [], [1], 4), r"last_page_len\[0\] is 1.* 0, as it"),
        (
            lambda: PageTable.from_csr(int32(0, 1), int32(5), torch.tensor([1]), 4),
            "last_page_len must be int32, got torch.int64",
        ),
        (
            lambda: PageTable.from_block_table([[1], [2]], [4, 5], 4),
            "block_table has 1 columns, request 1 with kv_len 5 needs 2",
        ),
        (
            lambda: PageTable.from_block_table([[1], [2]], [4], 4),
            "block_table has 2 rows, kv_lens 1",
        ),
        (
            lambda: PageTable.from_token_map([[0, 1, 2, 5]], [4], 4),
            r"token_slots\[0, 3\] is 5: with page_size 4",
        ),
        (
            lambda: PageTable.from_token_map([[2, 3]], [2], 4),
            r"token_slots\[0, 0\] is 2: with page_size 4",
        ),
        (
            lambda: PageTable.from_token_map([[0, 1]], [3], 4),
            r"token_slots is \[1, 2\], kv_lens asks for 1 rows of at least 3 tokens",
        ),
    ],
)
def test_arrays_that_disagree_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Pictures: every page once, every slot as it is, nothing wider than a terminal."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pagedattn import AttentionSpec, PageAllocator, PageTable
from pagedattn.backends.reference import visible_range
from pagedattn.checking.dense import visible_mask
from pagedattn.draw import Picture, draw_allocator, draw_mask, draw_pages
from pagedattn.draw.mask import build_mask, visible_ranges
from pagedattn.draw.palette import OWNERS, ink_on
from pagedattn.draw.pool import PageKind, SlotState, build_pool
from pagedattn.draw.requests import build_requests
from pagedattn.testing import page_tables, query_lengths, windows

SVG = "{http://www.w3.org/2000/svg}"


def indptr(lens):
    return torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32)


def pool_of(table, qo_indptr=None, window_left=-1, num_pages=None, sink_page=None):
    requests = build_requests(table, qo_indptr, window_left, None)
    return build_pool(table, requests, num_pages, sink_page, None)


@st.composite
def drawn_steps(draw):
    """A table, queries of each of its requests and a window."""
    table = draw(page_tables(max_kv_len=80))
    kv_lens = table.kv_lens.tolist()
    qo_lens = draw(query_lengths(kv_lens, mode="prefill", max_qo_len=90)) if kv_lens else ()
    return table, indptr(qo_lens), draw(windows(page_size=table.page_size, max_window_left=90))


def width_of(picture: Picture) -> int:
    return max(len(line) for line in picture.text.splitlines())


@given(drawn_steps())
def test_every_page_is_drawn_once_and_owned_pages_with_all_their_owners(step):
    table, qo_indptr, window_left = step
    pages = pool_of(table, qo_indptr, window_left).drawn_pages()
    if pages is None:  # more than fit: a map
        return
    covered = [page for drawn in pages for page in range(drawn.first, drawn.last + 1)]
    assert covered == list(range(len(covered)))
    owned = {(drawn.first, owner.request, owner.index) for drawn in pages for owner in drawn.owners}
    expected = {
        (page, request, index)
        for request in range(table.batch_size)
        for index, page in enumerate(table.pages_of(request).tolist())
    }
    assert owned == expected
    assert all(drawn.first == drawn.last for drawn in pages if drawn.owners)


@given(drawn_steps())
def test_a_slot_is_drawn_as_the_highest_of_what_its_owners_make_of_it(step):
    table, qo_indptr, window_left = step
    spec = AttentionSpec(1, 1, 16, causal=True, window_left=window_left)
    states = {page: [0] * table.page_size for page in table.kv_indices.tolist()}
    for request, (kv_len, qo_len) in enumerate(
        zip(table.kv_lens.tolist(), qo_indptr.diff().tolist(), strict=True)
    ):
        seen = visible_mask(spec, qo_len, kv_len).any(0)
        pages = table.pages_of(request).tolist()
        for token in range(kv_len):
            state = SlotState.HELD if seen[token] else SlotState.UNSEEN
            state = SlotState.NEW if token >= kv_len - qo_len else state
            page, offset = divmod(token, table.page_size)
            slots = states[pages[page]]
            slots[offset] = max(slots[offset], state)
    pool = pool_of(table, qo_indptr, window_left)
    drawn = pool.drawn_pages()
    if drawn is not None:
        assert {page.first: list(page.slots) for page in drawn if page.owners} == states
    unseen = [page for page, slots in states.items() if max(slots) == SlotState.UNSEEN]
    assert np.flatnonzero(pool.is_unseen).tolist() == sorted(unseen)
    assert pool.num_unused == sum(slots.count(SlotState.UNUSED) for slots in states.values())


@given(drawn_steps(), st.sampled_from([None, 0]))
def test_pictures_fit_80_columns_and_are_well_formed(step, sink_page):
    table, qo_indptr, window_left = step
    options = {"qo_indptr": qo_indptr, "window_left": window_left}
    pictures = [draw_pages(table, **options, sink_page=sink_page)]
    pictures += [draw_mask(table, r, **options) for r in range(table.batch_size)]
    for picture in pictures:
        assert width_of(picture) <= 80
        ElementTree.fromstring(picture.svg)
        assert picture.svg.count("NaN") == 0


@given(drawn_steps())
def test_the_same_input_gives_the_same_picture(step):
    table, qo_indptr, window_left = step
    first, second = (
        draw_pages(table, qo_indptr=qo_indptr, window_left=window_left) for _ in range(2)
    )
    assert (first.text, first.svg) == (second.text, second.svg)


@given(st.integers(-40, 40), st.integers(0, 40), st.booleans(), st.integers(-1, 50))
def test_a_query_sees_in_pictures_what_it_sees_in_the_oracle(position, kv_len, causal, window):
    spec = AttentionSpec(1, 1, 16, causal=causal, window_left=window)
    low, high = visible_ranges(np.array([position]), kv_len, causal, window)
    begin, end = visible_range(spec, kv_len, position)
    assert set(range(low[0], high[0])) == set(range(begin, end))


@given(
    kv_len=st.integers(0, 700),
    qo_len=st.integers(0, 200),
    page_size=st.sampled_from([1, 3, 16, 100]),
    causal=st.booleans(),
    window_left=st.integers(-1, 300),
)
def test_blocks_of_a_mask_count_every_pair_once(kv_len, qo_len, page_size, causal, window_left):
    table = PageTable.from_lengths([kv_len], page_size)
    mask = build_mask(table, 0, indptr([qo_len]), causal, window_left)
    spec = AttentionSpec(1, 1, 16, causal=causal, window_left=window_left)
    expected = visible_mask(spec, qo_len, kv_len).int().numpy()
    for row in range(mask.num_rows):
        first, last = mask.queries_of(row)
        for column in range(mask.num_columns):
            keys = slice(column * mask.slots_per_column, (column + 1) * mask.slots_per_column)
            assert mask.visible[row, column] == expected[first : last + 1, keys].sum()
    assert mask.visible.sum() == expected.sum()
    assert mask.sizes.sum() == kv_len * qo_len


@pytest.mark.parametrize("num_pages", [65, 1000, 100_000, 1_000_000])
def test_pictures_of_large_pools_stay_small(num_pages):
    ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
    kv_lens = [16 * (num_pages // 40)] * 20
    picture = draw_pages(PageTable.from_lengths(kv_lens, 16, ids), num_pages=num_pages)
    assert width_of(picture) <= 80
    assert len(picture.text.splitlines()) < 70
    assert len(picture.svg) < 250_000
    in_use = num_pages // 40 * 20
    assert f"{num_pages} pages of 16 slots: {in_use} in use" in picture.text


def test_a_large_pool_with_few_pages_in_use_is_drawn_page_by_page():
    table = PageTable.from_lengths([9, 4], 4, page_ids=[90_000, 17, 16, 3])
    text = draw_pages(table, num_pages=100_000).text
    for label in ("─90000", "r0[0]", "─17─", "r0[1]", "─16─", "r0[2]", "─3─", "r1[0]"):
        assert text.count(label) == 1
    assert all(f"to {last}" in text for last in (15, 89_999, 99_999))


def test_a_mask_of_a_long_request_stays_small():
    table = PageTable.from_lengths([100_000], 16)
    picture = draw_mask(table, qo_indptr=indptr([8192]), window_left=4096)
    assert width_of(picture) <= 80
    assert len(picture.text.splitlines()) < 40
    assert len(picture.svg) < 300_000


def test_shared_pages_new_tokens_and_the_window_look_like_this():
    table = PageTable.from_block_table([[1, 2, 4], [1, 5, 0]], [10, 6], page_size=4)
    picture = draw_pages(table, qo_indptr=indptr([1, 2]), window_left=4, num_pages=12, sink_page=0)
    assert picture.text == "\n".join([
        "12 pages of 4 slots: 4 in use (1 shared), 7 free, 1 sink",
        "2 requests, 16 tokens in 12 slots (shared); 4 slots unused (25 %)",
        "┌─0────────┬─1────────┬─2────────┬─3────────┬─4────────┬─5────────┬─6────────┐",
        "│ sink     │ r0+r1[0] │ r0[1]    │ free     │ r0[2]    │ r1[1]    │ 6 free   │",
        "│          │ ████     │ ░███     │          │ █+╱╱     │ ++╱╱     │ to 11    │",
        "└──────────┴──────────┴──────────┴──────────┴──────────┴──────────┴──────────┘",
        "█ token  + new in this step  ░ seen by no query (window_left=4)  ╱ unused",
        "r0[i]: page i of r0  ×n[i]: page i of n requests, shared",
        "request  tokens     new  unused  pages: kv_indices[begin:end], in order",
        "r0           10       1       2  [0:3]  1 2 4",
        "r1            6       2       2  [3:5]  1 5",
    ])  # fmt: skip


def test_a_mask_looks_like_this():
    table = PageTable.from_lengths([3, 6], page_size=4, page_ids=[5, 2, 7])
    qo_indptr = indptr([3, 3])
    assert draw_mask(table, 1, qo_indptr=qo_indptr, window_left=2).text == "\n".join([
        "request 1: 3 queries, 6 keys in 2 pages of 4; causal, window_left=2",
        "query i is at position i + 3, the last query at the last key",
        "  page │2   │7   │",
        "0 at 3 │·███│··╱╱│",
        "1 at 4 │··██│█·╱╱│",
        "2 at 5 │···█│██╱╱│",
        "█ sees the key  · hidden  ╱ unused slot",
    ])  # fmt: skip


def test_a_query_before_its_requests_first_token_is_said_to_see_no_key():
    text = draw_mask(PageTable.from_lengths([1], 4), qo_indptr=indptr([2])).text
    assert "0 at -1 │·╱╱╱│ no key" in text
    assert text.count("no key") == 1


def test_an_allocator_is_drawn_with_its_names_and_pages_of_other_requests():
    allocator = PageAllocator(num_pages=8, page_size=4)
    allocator.extend("anna", 6)
    allocator.extend("bob", 3)
    assert "anna[1]" in draw_allocator(allocator).text
    others = draw_allocator(allocator, ["bob"])
    assert "2 of other requests" in others.text
    assert "anna" not in others.text
    assert others.text.count("others'") == 2


def test_the_svg_says_where_each_page_is():
    table = PageTable.from_lengths([5, 2], page_size=4, page_ids=[2, 0, 1])
    hints = [e.text for e in ElementTree.fromstring(draw_pages(table).svg).iter(f"{SVG}title")]
    assert hints[1:] == [
        "page 0: page 1 of r0; 1 of 4 slots used",
        "page 1: page 0 of r1; 2 of 4 slots used",
        "page 2: page 0 of r0; 4 of 4 slots used",
    ]


def test_names_are_escaped_in_svg_and_html():
    table = PageTable.from_lengths([1], 4)
    svg = draw_pages(table, names=["<b>&"]).svg
    assert "<b>" not in svg
    ElementTree.fromstring(svg)


def test_colour_adds_nothing_to_the_letters():
    table = PageTable.from_lengths([5, 2], page_size=4)
    picture = draw_pages(table)
    console = Console(width=80, force_terminal=True, color_system="truecolor", record=True)
    with console.capture() as captured:
        console.print(picture, end="")
    assert "\x1b[" in captured.get()
    assert re.sub(r"\x1b\[[0-9;]*m", "", captured.get()) == picture.text


def test_letters_stand_out_from_every_owners_colour():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    for colour in OWNERS:
        dark, light = sorted([luminance(colour), luminance(ink_on(colour))])
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_a_table_shows_itself_in_a_notebook_and_a_wrong_one_says_what_is_wrong():
    table = PageTable.from_lengths([5], 4)
    assert table._repr_html_() == draw_pages(table).svg
    wrong = PageTable(4, table.kv_indptr, table.kv_indices, torch.tensor([50], dtype=torch.int32))
    assert "request 0 has kv_len 50 and 2 pages of 4 tokens" in wrong._repr_html_()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 1}, "num_pages is 1, but page_table holds page id 1"),
        ({"sink_page": 9, "num_pages": 4}, "sink_page must be 0 to 3 or None, got 9"),
        ({"window_left": -2}, "window_left must be -1"),
        ({"ref_counts": [1]}, "ref_counts has 1 entries, expected 2 pages"),
        ({"ref_counts": [1, 0]}, "ref_counts[1] is 0, but page_table names page 1 1 times"),
        ({"names": ["a", "b"]}, "names has 2 entries, page_table 1 requests"),
        ({"qo_indptr": torch.tensor([0])}, "qo_indptr must be int32"),
        ({"num_pages": 1 << 30}, "1073741824 pages are too many to draw"),
    ],
)
def test_what_contradicts_the_table_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_pages(PageTable.from_lengths([5], 4), **options)


def test_a_request_that_does_not_exist_has_no_mask():
    with pytest.raises(ValueError, match="request must be 0 to 0"):
        draw_mask(PageTable.from_lengths([5], 4), 1)


def test_a_sink_page_in_a_table_is_drawn_as_sink_with_its_owner():
    table = PageTable.from_lengths([2], 4, page_ids=[0])
    pool = pool_of(table, sink_page=0)
    assert pool.count(PageKind.SINK) == 1
    assert "sink" in draw_pages(table, sink_page=0).text


def test_saving_writes_what_the_name_says(tmp_path):
    picture = draw_pages(PageTable.from_lengths([5], 4))
    for name, content in (("p.svg", picture.svg), ("p.txt", picture.text)):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == content

"""`pagedattn show`: what it draws is the table of the file, and what it refuses it explains."""

import json
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given

from pagedattn import PageTable
from pagedattn.cli import main
from pagedattn.draw import draw_mask, draw_pages
from pagedattn.draw.table_file import read_table
from pagedattn.testing import page_tables

FIELDS = {
    "page_size": 4,
    "kv_lens": [10, 6],
    "pages": [[3, 1, 4], [3, 5]],
    "qo_lens": [1, 6],
    "window_left": 3,
    "num_pages": 8,
    "sink_page": 0,
    "names": ["anna", "bob"],
}
TABLE = PageTable.from_lengths([10, 6], 4, page_ids=[3, 1, 4, 3, 5])
QO_INDPTR = torch.tensor([0, 1, 7], dtype=torch.int32)


def show(*arguments, fields=None, text=None):
    text = json.dumps(FIELDS if fields is None else fields) if text is None else text
    return CliRunner().invoke(main, ["show", "-", *map(str, arguments)], input=text)


def test_it_prints_the_picture_of_the_table():
    picture = draw_pages(
        TABLE,
        qo_indptr=QO_INDPTR,
        window_left=3,
        num_pages=8,
        sink_page=0,
        names=["anna", "bob"],
    )
    result = show()
    assert result.exit_code == 0
    assert result.output == picture.text + "\n"


def test_it_prints_a_requests_mask_and_writes_svg(tmp_path):
    picture = draw_mask(TABLE, 1, qo_indptr=QO_INDPTR, window_left=3)
    result = show("--mask", 1, "--svg", tmp_path / "mask.svg")
    assert result.output == picture.text + "\n"
    assert (tmp_path / "mask.svg").read_text(encoding="utf-8") == picture.svg
    ElementTree.parse(tmp_path / "mask.svg")


def test_it_reads_a_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(FIELDS))
    result = CliRunner().invoke(main, ["show", str(path)])
    assert result.output == show().output


def test_a_mask_that_is_not_causal_is_drawn_so():
    assert "not causal" in show("--mask", 0, fields={**FIELDS, "causal": False}).output


@given(page_tables())
def test_a_table_written_as_json_is_read_as_it_was(table):
    fields = {
        "page_size": table.page_size,
        "kv_lens": table.kv_lens.tolist(),
        "pages": [table.pages_of(request).tolist() for request in range(table.batch_size)],
    }
    read = read_table(json.dumps(fields)).page_table
    for name in ("kv_indptr", "kv_indices", "kv_lens"):
        assert torch.equal(getattr(read, name), getattr(table, name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size must be 1 to 2147483647, got 0"),
        ({"page_size": "4"}, 'page_size must be an integer, got "4"'),
        ({"page_size": True}, "page_size must be an integer, got true"),
        ({"kv_lens": 10}, "kv_lens must be a list, got 10"),
        ({"kv_lens": [10, -1]}, "kv_lens[1] must be 0 to 2147483647, got -1"),
        ({"pages": [[3, 1, 4]]}, "pages has 1 rows, expected 2"),
        ({"pages": [[3, 1], [3, 5]]}, "pages[0] has 2 entries, expected 3: kv_lens[0] is 10"),
        ({"pages": [[3, 1, None], [3, 5]]}, "pages[0][2] must be an integer, got null"),
        ({"qo_lens": [1]}, "qo_lens has 1 entries, expected 2"),
        ({"window_left": -2}, "window_left must be -1 to"),
        ({"num_pages": 5}, "num_pages is 5, but page_table holds page id 5"),
        ({"sink_page": 8}, "sink_page must be 0 to 7 or None, got 8"),
        ({"names": ["anna"]}, "names has 1 entries, expected 2"),
        ({"causal": 1}, "causal must be true or false, got 1"),
        ({"window": 3}, "unknown field window"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    result = show(fields={**FIELDS, **changes})
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["page_size", "kv_lens", "pages"])
def test_a_missing_field_is_named(name):
    result = show(fields={key: value for key, value in FIELDS.items() if key != name})
    assert result.exit_code == 1
    assert f"{name} is missing" in result.output


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[1]", "expected an object"), ("", "not JSON")]
)
def test_what_is_no_object_is_refused(text, message):
    result = show(text=text)
    assert result.exit_code == 1
    assert message in result.output


def test_a_request_that_does_not_exist_is_refused():
    result = show("--mask", 2)
    assert result.exit_code == 1
    assert "request must be 0 to 1" in result.output


def test_a_file_that_does_not_exist_is_named():
    result = CliRunner().invoke(main, ["show", "nowhere.json"])
    assert result.exit_code == 2
    assert "nowhere.json" in result.output

"""The JSON form of a step's page table, for `pagedattn show`.

An object with these fields and no others:

| field | meaning |
|---|---|
| `page_size` | tokens in one page |
| `kv_lens` | tokens of each request |
| `pages` | physical pages of each request, in its tokens' order |
| `qo_lens` | optional: queries of each request |
| `window_left` | optional, as in `AttentionSpec`; -1 |
| `causal` | optional, as in `AttentionSpec`; true |
| `num_pages` | optional: pages of the cache |
| `sink_page` | optional: the page that only padding uses |
| `names` | optional: a name for each request |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagedattn.page_table import PageTable

_REQUIRED = ("page_size", "kv_lens", "pages")
_OPTIONAL = ("qo_lens", "window_left", "causal", "num_pages", "sink_page", "names")
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TableFile:
    """What a file says, fields as in the module's table."""

    page_table: PageTable
    qo_indptr: Tensor | None  # i32[batch + 1]
    window_left: int
    causal: bool
    num_pages: int | None
    sink_page: int | None
    names: list[str] | None


def read_table(text: str) -> TableFile:
    """Read a table from JSON.

    Raises:
        ValueError: It is no JSON, or a field is missing, unknown or wrong; the message names it.

    Example:
        >>> read = read_table('{"page_size": 4, "kv_lens": [5, 2], "pages": [[7, 0], [3]]}')
        >>> read.page_table.kv_indices.tolist()
        [7, 0, 3]
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(_REQUIRED)}, got {_kind(fields)}")
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"{missing[0]} is missing, expected {', '.join(_REQUIRED)}")
    for name in fields:
        if name not in _REQUIRED + _OPTIONAL:
            known = ", ".join(_REQUIRED + _OPTIONAL)
            raise ValueError(f"unknown field {name}, expected some of {known}")
    page_table = _page_table(fields)
    causal = fields.get("causal", True)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be true or false, got {_kind(causal)}")
    return TableFile(
        page_table,
        _qo_indptr(fields, page_table.batch_size),
        _integer(fields.get("window_left", -1), "window_left", -1),
        causal,
        _optional_integer(fields, "num_pages"),
        _optional_integer(fields, "sink_page"),
        _names(fields, page_table.batch_size),
    )


def _page_table(fields: Mapping[str, object]) -> PageTable:
    page_size = _integer(fields["page_size"], "page_size", 1)
    kv_lens = _integers(fields["kv_lens"], "kv_lens")
    rows = _list(fields["pages"], "pages")
    pages = [_integers(row, f"pages[{request}]") for request, row in enumerate(rows)]
    if len(pages) != len(kv_lens):
        raise ValueError(f"pages has {len(pages)} rows, expected {len(kv_lens)}, as kv_lens")
    for request, (kv_len, row) in enumerate(zip(kv_lens, pages, strict=True)):
        needed = -(-kv_len // page_size)
        if len(row) != needed:
            raise ValueError(
                f"pages[{request}] has {len(row)} entries, expected {needed}: "
                f"kv_lens[{request}] is {kv_len} and page_size {page_size}"
            )
    return PageTable.from_lengths(kv_lens, page_size, [page for row in pages for page in row])


def _qo_indptr(fields: Mapping[str, object], batch_size: int) -> Tensor | None:
    if fields.get("qo_lens") is None:
        return None
    qo_lens = _integers(fields["qo_lens"], "qo_lens")
    if len(qo_lens) != batch_size:
        raise ValueError(f"qo_lens has {len(qo_lens)} entries, expected {batch_size}, as kv_lens")
    return torch.tensor([0, *accumulate(qo_lens)], dtype=torch.int32)


def _names(fields: Mapping[str, object], batch_size: int) -> list[str] | None:
    if fields.get("names") is None:
        return None
    names = [str(name) for name in _list(fields["names"], "names")]
    if len(names) != batch_size:
        raise ValueError(f"names has {len(names)} entries, expected {batch_size}, as kv_lens")
    return names


def _optional_integer(fields: Mapping[str, object], name: str) -> int | None:
    return None if fields.get(name) is None else _integer(fields[name], name, 0)


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {_kind(value)}")
    return value


def _integers(value: object, name: str) -> list[int]:
    """Integers that are 0 or more."""
    return [_integer(v, f"{name}[{i}]", 0) for i, v in enumerate(_list(value, name))]


def _integer(value: object, name: str, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {_kind(value)}")
    if not minimum <= value <= MAX_INT32:
        raise ValueError(f"{name} must be {minimum} to {MAX_INT32}, got {value}")
    return value


def _kind(value: object) -> str:
    """A JSON value in an error, long ones by their kind."""
    written = json.dumps(value)
    return written if len(written) <= 30 else f"a {type(value).__name__}"

"""Faults planted in the source of the Triton kernels are caught, where Triton interprets them."""

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from attention_steps import batch_of, require_support

from pagedattn import AttentionSpec, kernels
from pagedattn.checking.compare import check_backend

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU other kernels may run than the ones changed here"
)

KERNELS_OF_THE_BACKEND = {
    "short": "short_attention",
    "long": "long_attention",
    "plan": "build_schedule",
}


@dataclass(frozen=True)
class Change:
    """In one file, every occurrence of `old` (at least one) becomes `new`."""

    file: str
    old: str
    new: str


FAULTS = {
    "window one key short": [
        Change("masks", "position - window_left, 0", "position - window_left + 1, 0")
    ],
    "window one key long": [
        Change("masks", "position - window_left, 0", "position - window_left - 1, 0")
    ],
    "diagonal one key early": [Change("masks", "position + 1, kv_len", "position, kv_len")],
    "diagonal one key late": [Change("masks", "position + 1, kv_len", "position + 2, kv_len")],
    "no mask on V, short kernel": [
        Change(
            "short", "tl.load(v_pointers, mask=owned", "tl.load(v_pointers, mask=in_head[None, :]"
        )
    ],
    "no mask on V, long kernel": [
        Change("long", "mask=owned[:, None] & in_head[None, :]", "mask=in_head[None, :]")
    ],
    "one page too many": [
        Change("short", "tl.range(low, high, TILE", "tl.range(low, high + PAGE_SIZE, TILE"),
        Change("short", "owned = key < high", "owned = key < high + PAGE_SIZE"),
        Change(
            "short", "end_key(position, kv_len", "end_key(position + PAGE_SIZE, kv_len + PAGE_SIZE"
        ),
    ],
    "page ids of the tile before": [Change("short", "begin + TILE, low_key", "begin, low_key")],
    "page ids of the tile before, long kernel": [Change("long", "start + TILE, low", "start, low")],
    "LSE in base 2": [Change("softmax", ") * LN_2", ")")],
    "finite minus infinity": [
        Change("short", 'tl.full([ROWS], float("-inf")', "tl.full([ROWS], -50000.0"),
        Change("long", 'tl.full([ROWS], float("-inf")', "tl.full([ROWS], -50000.0"),
    ],
    "old sums not rescaled": [Change("short", "l_of_lanes * rescale[None, :]", "l_of_lanes")],
    "old sums not rescaled, long kernel": [Change("long", "l * rescale +", "l +")],
    "tanh of another argument": [Change("softmax", "2.8853900817779268", "2.0")],
    "a piece is not merged": [Change("merge", "+ i < num_pieces", "+ i < num_pieces - 1")],
    "pieces merged without their weights": [Change("merge", "acc1 * w1[None, :]", "acc1")],
    "query heads of another KV head": [
        Change("short", "kv_head * GROUP + row % GROUP", "row % GROUP * num_kv_heads + kv_head")
    ],
    "query heads of another KV head, long kernel": [
        Change("long", "kv_head * GROUP + row % GROUP", "row % GROUP * num_kv_heads + kv_head")
    ],
    "whole tiles begin a tile early": [
        Change("long", "right = tl.maximum(right, left)", "right = tl.maximum(right, left) + TILE")
    ],
    "last tile of a chunk dropped": [
        Change("short", "tile_end) * TILE, kv_len", "tile_end - 1) * TILE, kv_len")
    ],
}


WINDOWED = AttentionSpec(4, 2, 40, torch.float16, window_left=21)
PROBES = [
    batch_of(WINDOWED, 3, (45, 130), (2, 40)),  # a short request, and a long one
    batch_of(replace(WINDOWED, causal=False, window_left=-1), 3, (45, 130), (2, 40)),
    batch_of(replace(WINDOWED, window_left=-1), 3, (45, 130), (2, 40), values="low_scores"),
    batch_of(replace(WINDOWED, window_left=-1), 3, (1000,), (1,)),  # in pieces
    batch_of(replace(WINDOWED, logits_soft_cap=5.0), 3, (45,), (2,), values="large_logits"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernels_is_caught(fault, tmp_path, monkeypatch):
    require_support("triton", WINDOWED, 3, torch.device("cpu"))
    use_changed_kernels(FAULTS[fault], tmp_path, monkeypatch)
    assert any(not check_backend("triton", probe.materialise()).ok for probe in PROBES)


def test_unchanged_kernels_are_right(tmp_path, monkeypatch):
    require_support("triton", WINDOWED, 3, torch.device("cpu"))
    use_changed_kernels([], tmp_path, monkeypatch)
    for probe in PROBES:
        comparison = check_backend("triton", probe.materialise())
        assert comparison.ok, comparison.worst


def use_changed_kernels(changes, folder: Path, monkeypatch) -> None:
    """Write a changed copy of the kernels to `folder` and let the backend launch it."""
    name = "kernels_" + re.sub(r"\W", "_", str(folder.name))
    package = folder / name
    package.mkdir()
    sources = {path.stem: path.read_text() for path in Path(kernels.__file__).parent.glob("*.py")}
    for change in changes:
        assert change.old in sources[change.file], f"{change.file}.py no longer has {change.old!r}"
        sources[change.file] = sources[change.file].replace(change.old, change.new)
    for stem, source in sources.items():
        renamed = source.replace("pagedattn.kernels", name)
        (package / f"{stem}.py").write_text(renamed)
    monkeypatch.syspath_prepend(str(folder))
    for stem, kernel in KERNELS_OF_THE_BACKEND.items():
        changed = getattr(importlib.import_module(f"{name}.{stem}"), kernel)
        monkeypatch.setattr(f"pagedattn.backends.triton.backend.{kernel}", changed)

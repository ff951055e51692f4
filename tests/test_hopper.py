"""The Gluon kernel against float64, at its edges, beside its plain twins.

Without such a GPU only the choice of the kernel is tested here; its logic is tested in
test_gluon_on_cpu.py, and what it compiles to in test_compile.py.
"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TextIO

import pytest
import torch
from hopper_cases import CASES
from hopper_child import strided

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable
from pagedattn.backends.triton.tiles import (
    DeviceFacts,
    choose_hopper_tiles,
    choose_kinds,
    hopper_refusals,
)
from pagedattn.kernels import gluon_names

H200 = DeviceFacts(num_sms=132, compute_capability=(9, 0))
LLAMA = AttentionSpec(32, 8, 128)
SECONDS = 90  # a case takes one or two, and some to compile


def hopper_here() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def compute(cases: list[dict]) -> list[dict]:
    """The child's answers; a case that hangs is ended, and those after it get a new child."""
    answers = []
    while len(answers) < len(cases):
        with tempfile.TemporaryFile("w+") as errors:
            answers += compute_until_death(cases[len(answers) :], errors)
            if len(answers) < len(cases):
                errors.seek(0)
                answers.append({"error": f"hangs, or died: {errors.read()[-2000:]}"})
    return answers


def compute_until_death(cases: list[dict], errors: TextIO) -> list[dict]:
    """The answers of one child before it hangs or dies."""
    script = str(Path(__file__).parent / "hopper_child.py")
    command = [sys.executable, script, json.dumps(cases)]
    answers = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
        while len(answers) < len(cases):
            timer = threading.Timer(SECONDS, child.kill)
            timer.start()
            line = child.stdout.readline()
            timer.cancel()
            if not line:
                break
            answers.append(json.loads(line))
    return answers


def by_kernel() -> dict[str, list[str]]:
    """Names of cases that are compiled alike, so that one child computes them, by the first."""
    kinds: dict[str, list[str]] = {}
    for name, case in CASES.items():
        spec = case["spec"] | {"window_left": "window_left" in case["spec"]}
        kinds.setdefault(json.dumps([spec, case["page_size"]]), []).append(name)
    return {names[0]: names for names in kinds.values()}


@pytest.mark.gpu
@pytest.mark.parametrize("names", by_kernel().values(), ids=by_kernel().keys())
def test_gluon_and_plain_kernel_are_within_the_bound_of_float64(names):
    if not hopper_here():
        pytest.skip("needs a GPU of compute capability 9.0")
    answers = dict(zip(names, compute([CASES[name] for name in names]), strict=True))
    errors = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    assert not errors
    wrong = {
        (name, kernel): answer[kernel]["worst"]
        for name, answer in answers.items()
        for kernel in ("gluon", "plain")
        if not answer[kernel]["ok"]
    }
    assert not wrong


def test_this_triton_has_all_names_that_the_kernel_uses():
    assert gluon_names.MISSING == ()


def test_it_is_chosen_where_it_runs():
    assert hopper_refusals(LLAMA, H200) == []
    assert choose_hopper_tiles(LLAMA, 16, H200) is not None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("window_left", "cap"), [(-1, 0.0), (100, 0.0), (100, 20.0)])
def test_rings_and_rows_fit_shared_memory(head_dim, window_left, cap):
    spec = AttentionSpec(32, 8, head_dim, window_left=window_left, logits_soft_cap=cap)
    tiles = choose_hopper_tiles(spec, 16, H200)
    tiles_bytes = (128 + 2 * tiles.num_stages * tiles.tile) * head_dim * 2
    assert tiles_bytes + 1024 <= 227 * 1024  # barriers and what units are told by, and the rest
    assert tiles.num_stages >= (2 if head_dim == 256 else 3)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 7, 24, 48, 100])
def test_rows_of_pages_that_are_no_boxes_are_gathered(page_size):
    tiles = choose_hopper_tiles(LLAMA, page_size, H200)
    assert tiles is not None
    assert not tiles.has_boxes


@pytest.mark.parametrize("page_size", [8, 16, 64, 128, 256])
def test_pages_that_are_boxes_or_some_are_copied_whole(page_size):
    tiles = choose_hopper_tiles(LLAMA, page_size, H200)
    assert tiles.has_boxes
    assert page_size % tiles.tile == 0 or tiles.tile % page_size == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [{}, {"window_left": 100, "logits_soft_cap": 20.0}])
def test_each_consumer_has_a_chunk_of_short_queries_that_join_long_ones(head_dim, window):
    spec = AttentionSpec(32, 8, head_dim, **window)
    hopper = choose_hopper_tiles(spec, 16, H200)
    plain, *_, joint = choose_kinds(spec, H200, None, False, hopper)
    assert joint.joint
    assert (joint.short.rows, joint.short.tile) == (64, hopper.tile // 2)
    assert joint.short_chunks * spec.num_kv_heads == 2 * H200.num_sms
    assert joint.min_chunk * joint.short.tile == plain.min_chunk * plain.short.tile
    assert 0 < joint.long_share < joint.programs == H200.num_sms


@pytest.mark.parametrize(
    ("page_size", "batch_invariant", "capacity", "kinds"),
    [
        (16, False, None, [(16, False), (32, False), (64, True)]),
        (5, False, None, [(16, False), (32, False), (64, False)]),
        (16, True, None, [(16, False)]),
        (16, False, Capacity(64, 64, 9999), [(16, False)]),
        (16, False, Capacity(64, 256, 9999), [(16, False)]),
        (16, False, Capacity(64, 8 * 64, 9999), [(64, True)]),
        (16, False, Capacity(64, 64 + 2048, 9999), [(64, True)]),
        (5, False, Capacity(64, 64 + 2048, 9999), [(16, False)]),
        (16, True, Capacity(64, 64 + 2048, 9999), [(16, False)]),
        (16, False, Capacity(20, 8 * 20, 9999), [(32, False)]),
    ],
)
def test_short_queries_join_long_ones_where_those_may_be_or_blocks_are_high(
    page_size, batch_invariant, capacity, kinds
):
    hopper = choose_hopper_tiles(LLAMA, page_size, H200)
    chosen = choose_kinds(LLAMA, H200, capacity, batch_invariant, hopper)
    assert [(tiles.short.rows, tiles.joint) for tiles in chosen] == kinds


@pytest.mark.parametrize(
    ("num_qo_heads", "kind"),
    [(8, (16, False)), (32, (32, False)), (64, (64, True)), (128, (64, False))],
)
def test_drafts_of_one_joint_block_join(num_qo_heads, kind):
    spec = AttentionSpec(num_qo_heads, 8, 128)
    hopper = choose_hopper_tiles(spec, 16, H200)
    (tiles,) = choose_kinds(spec, H200, Capacity(20, 8 * 20, 9999), False, hopper)
    assert (tiles.short.rows, tiles.joint) == kind


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (LLAMA, DeviceFacts(num_sms=108, compute_capability=(8, 0))),
        (LLAMA, DeviceFacts(num_sms=148, compute_capability=(10, 0))),
        (LLAMA, DeviceFacts(num_sms=0, interpreted=True, compute_capability=(9, 0))),
        (LLAMA, DeviceFacts(132, compute_capability=(9, 0), missing_gluon=("tma",))),
        (AttentionSpec(32, 8, 96), H200),
        (AttentionSpec(32, 8, 128, torch.float32), H200),
    ],
)
def test_elsewhere_the_plain_kernel_is_chosen_for_one_stated_reason(spec, facts):
    assert len(hopper_refusals(spec, facts)) == 1
    assert choose_hopper_tiles(spec, 16, facts) is None


@pytest.mark.skipif(bool(gluon_names.MISSING), reason=f"no {gluon_names.MISSING}")
def test_only_caches_that_are_matrices_are_reached():
    from pagedattn.backends.triton.hopper_maps import unreachable_reasons

    kv_cache = torch.zeros(5, 2, 16, 2, 64, dtype=torch.float16)
    assert unreachable_reasons(kv_cache[:, 1]) == []
    assert unreachable_reasons(strided(kv_cache, "heads")[:, 1]) == []
    assert len(unreachable_reasons(strided(kv_cache, "pages")[:, 1])) == 1
    assert len(unreachable_reasons(kv_cache[:0, 0])) == 1
    shifted = torch.zeros(kv_cache.numel() + 1, dtype=torch.float16)[1:].view(kv_cache.shape)
    assert len(unreachable_reasons(shifted[:, 0])) == 1
    huge = kv_cache[:1, 0].expand(2**27, 16, 2, 64)
    assert unreachable_reasons(huge) == []  # page_stride 0: every page is the first
    shape, strides = (2**26 + 1, 16, 2, 64), (4096, 128, 64, 1)
    far = torch.empty_strided(shape, strides, dtype=torch.float16, device="meta")
    assert "2 ** 31 rows" in " ".join(unreachable_reasons(far))


@pytest.mark.skipif(bool(gluon_names.MISSING), reason=f"no {gluon_names.MISSING}")
def test_a_map_is_made_once_a_cache_and_finds_its_slots():
    from pagedattn.backends.triton.hopper import Hopper
    from pagedattn.backends.triton.launch import LayerPointers

    tiles = choose_hopper_tiles(LLAMA, 16, H200)
    spec = AttentionSpec(4, 2, 64, torch.float16)
    kernel = Hopper(spec, 16, tiles, torch.device("cpu"))
    kv_cache = torch.zeros(5, 2, 16, 2, 64, dtype=torch.float16)
    q = torch.zeros(1, 4, 64, dtype=torch.float16)

    def maps_of(cache):
        return kernel.maps.of(LayerPointers.of(q, cache, q, q))

    def matrices_of(cache):
        return [
            (half.base.data_ptr() - kv_cache.data_ptr(), list(half.shape), list(half.strides))
            for half in maps_of(cache).values
        ]

    maps = maps_of(kv_cache)
    assert maps_of(kv_cache) is maps
    assert maps_of(kv_cache.unbind(1)) is not None
    rows = [4 * 32 + 16, 2 * 64]
    assert matrices_of(kv_cache) == [(0, rows, [128, 1]), (4096, rows, [128, 1])]
    assert matrices_of(kv_cache.unbind(1)) == matrices_of(kv_cache)
    assert matrices_of((kv_cache[:, 1], kv_cache[:, 0])) == matrices_of(kv_cache)[::-1]
    assert matrices_of(kv_cache[:3])[0] == (0, [2 * 32 + 16, 2 * 64], [128, 1])


@pytest.mark.gpu
def test_launches_without_the_encoding_read_the_cache_that_they_are_given(device):
    """Ordinary launches are the first of each cache; a hang here is one in the cases above."""
    from pagedattn.backends.triton.hopper_maps import TensorDescriptor

    if not hopper_here():
        pytest.skip("needs a GPU of compute capability 9.0")
    spec = AttentionSpec(8, 2, 128)
    attn = PagedAttention(spec, 16, backend="triton", device=device)
    attn.plan(PageTable.from_lengths([700, 90], 16), torch.tensor([0, 700, 790]).int())
    generator = torch.Generator(device).manual_seed(0)
    options = {"dtype": spec.dtype, "device": device, "generator": generator}
    q = torch.randn(790, 8, 128, **options)
    caches = [torch.randn(50, 2, 16, 2, 128, **options) for _ in range(3)]
    caches += [caches[0].flip(1), caches[1].unbind(1)]
    ordinary = [attn.run(q, cache) for cache in caches]
    for _ in range(2):
        for cache, expected in zip(caches, ordinary, strict=True):
            assert torch.equal(attn.run(q, cache), expected)
    assert not torch.equal(ordinary[0], ordinary[1])
    assert torch.equal(ordinary[1], ordinary[4])
    remembered = attn._backend._hopper._launches[False, False]._remembered.values()
    assert len(remembered) == 5
    for launch in remembered:
        assert not any(isinstance(value, TensorDescriptor) for value in launch.descriptors)


@pytest.mark.skipif(bool(gluon_names.MISSING), reason=f"no {gluon_names.MISSING}")
@pytest.mark.parametrize("page_size", [5, 16])
def test_what_the_engine_does_not_reach_is_gathered_where_rows_are_aligned(page_size):
    from pagedattn.backends.triton.hopper import Hopper
    from pagedattn.backends.triton.hopper_maps import TensorDescriptor
    from pagedattn.backends.triton.launch import LayerPointers, Pointers

    spec = AttentionSpec(4, 2, 64, torch.float16)
    tiles = choose_hopper_tiles(spec, page_size, H200)
    kernel = Hopper(spec, page_size, tiles, torch.device("cpu"))
    calls = []
    kernel._launches = {
        key: lambda *_, descriptors, key=key, **__: calls.append((key, descriptors))
        for key in kernel._launches
    }
    kv_cache = torch.zeros(5, 2, page_size, 2, 64, dtype=torch.float16)
    q = torch.zeros(1, 4, 64, dtype=torch.float16)

    def gathers(cache):
        """Whether a launch gathers; `None` where the kernel cannot reach the cache."""
        layer = LayerPointers.of(q, cache, q, q)
        maps = kernel.maps.of(layer)
        if maps is None:
            return None
        kernel.prepare(maps, True, layer, Pointers.of(q))(7)
        (is_gather, with_lse), descriptors = calls.pop()
        assert with_lse
        assert descriptors is maps
        if is_gather:
            assert tuple(each.data_ptr() for each in maps.values) == layer.addresses[1:3]
        else:
            assert all(isinstance(each, TensorDescriptor) for each in maps.values)
        return is_gather

    keys, values = kv_cache.unbind(1)
    assert gathers(kv_cache) is (page_size == 5)
    assert gathers(strided(kv_cache, "pages")) is True
    assert gathers(strided(kv_cache, "odd")) is None
    assert gathers((keys, strided(kv_cache, "pages")[:, 1])) is True  # one way for both
    assert gathers((keys, strided(kv_cache, "odd")[:, 1])) is None
    assert gathers((keys, values[:0])) is True
    assert gathers(kv_cache[:, :, :1].expand_as(kv_cache)) is True  # its tokens are all one
    shifted = torch.zeros(kv_cache.numel() + 1, dtype=torch.float16)[1:].view(kv_cache.shape)
    assert gathers((keys, shifted[:, 1])) is None

"""Capsules: what is kept comes back bit for bit, and what a stranger damaged is refused by name."""

import json
import os
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from pagedattn import AttentionSpec
from pagedattn.attention import AttentionOutput
from pagedattn.checking import capsule as capsule_module
from pagedattn.checking.batch import Batch
from pagedattn.checking.capsule import load_capsule, save_capsule
from pagedattn.checking.capsule_checks import MAX_FILE_BYTES, REQUIRED
from pagedattn.checking.capsule_metadata import CapsuleMetadata, printable
from pagedattn.checking.step import attend_with, oracle
from pagedattn.testing import batches

SPEC = AttentionSpec(4, 2, 16, dtype=torch.bfloat16, window_left=5, sm_scale=0.3)
BATCH = Batch(SPEC, 4, 12, (6, 0, 3), (2, 1, 1), ((11, 3), (), (3,)), garbage="nan", seed=4)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


def assert_same_bits(got, expected):
    assert (got.dtype, got.shape, bits(got)) == (expected.dtype, expected.shape, bits(expected))


def saved(path, batch=BATCH, with_answer=True):
    """A capsule in a file, with what it was made of."""
    step = batch.materialise()
    expected = oracle(step)
    got = None
    if with_answer:
        got = attend_with("reference")(step)
        got.out[:1] = torch.nan
    words = "out is wrong"
    save_capsule(path, step, got, expected, backend="mine", problem=words, seed=batch.seed)
    return step, got, expected


@given(batch=batches(), with_answer=st.booleans())
def test_what_is_kept_comes_back_bit_for_bit(tmp_path_factory, batch, with_answer):
    path = tmp_path_factory.mktemp("capsule") / "case.safetensors"
    step, got, expected = saved(path, batch, with_answer)
    capsule = load_capsule(path)
    assert capsule.metadata.spec == step.spec
    assert capsule.metadata.num_pages == step.kv_cache.shape[0]
    assert (capsule.metadata.backend, capsule.metadata.problem) == ("mine", "out is wrong")
    assert capsule.metadata.seed == batch.seed
    assert capsule.metadata.versions["torch"] == torch.__version__
    assert_same_bits(capsule.expected.out, expected.out)
    assert_same_bits(capsule.expected.lse, expected.lse)
    if with_answer:
        assert_same_bits(capsule.got.out, got.out)
        assert_same_bits(capsule.got.lse, got.lse)
    else:
        assert capsule.got is None

    again = capsule.step_on("cpu")
    assert capsule.keeps_page_numbers
    for name in ("kv_indptr", "kv_indices", "kv_lens"):
        assert_same_bits(getattr(again.page_table, name), getattr(step.page_table, name))
    assert again.page_size == step.page_size
    assert_same_bits(again.qo_indptr, step.qo_indptr)
    assert_same_bits(again.q, step.q)
    used = step.page_table.kv_indices.unique().long()
    assert_same_bits(again.kv_cache[used], step.kv_cache[used])  # unused slots included
    others = torch.ones(step.kv_cache.shape[0], dtype=torch.bool)
    others[used] = False
    assert again.kv_cache[others].isnan().all()


def test_only_pages_in_use_are_kept(tmp_path):
    big = replace(BATCH, num_pages=4000)
    for name, batch in (("small", BATCH), ("big", big)):
        saved(tmp_path / name, batch)
    assert load_capsule(tmp_path / "big").step.kv_cache.shape[0] == 2
    sizes = [(tmp_path / name).stat().st_size for name in ("small", "big")]
    assert abs(sizes[0] - sizes[1]) < 64


def test_pages_of_a_huge_cache_get_new_numbers_and_the_same_answer(tmp_path, monkeypatch):
    path = tmp_path / "case.safetensors"
    step, _, _ = saved(path)
    capsule = load_capsule(path)
    monkeypatch.setattr(capsule_module, "MAX_POOL_BYTES", 0)
    assert not capsule.keeps_page_numbers
    small = capsule.step_on("cpu")
    assert small.kv_cache.shape[0] == 2
    assert torch.equal(oracle(small).out, oracle(step).out)
    assert capsule.original_table.kv_indices.tolist() == [11, 3, 3]


def test_every_field_of_a_spec_is_kept():
    # a spec that grows needs `capsule_metadata._spec` to grow with it
    changed = AttentionSpec(
        6, 2, 24, torch.float16, causal=False, window_left=3, sm_scale=0.7, logits_soft_cap=9.0
    )
    plain = AttentionSpec(1, 1, 1)
    assert all(getattr(changed, f.name) != getattr(plain, f.name) for f in fields(AttentionSpec))
    metadata = CapsuleMetadata(changed, 4, 9, "mine", "x", None, {"torch": "2"})
    assert CapsuleMetadata.from_json(metadata.to_json()) == metadata


def test_nothing_is_written_that_could_not_be_read(tmp_path):
    path = tmp_path / "case.safetensors"
    step = BATCH.materialise()
    right = oracle(step)
    short = AttentionOutput(right.out[1:], right.lse)
    with pytest.raises(ValueError, match=r"got_out must have shape \[4, 4, 16\], got \[3, 4, 16\]"):
        save_capsule(path, step, short, right, backend="mine")
    with pytest.raises(ValueError, match=r"expected_out must be torch\.float64"):
        save_capsule(path, step, None, attend_with("reference")(step), backend="mine")
    assert not path.exists()


def test_words_for_a_terminal_hold_no_control_characters(tmp_path):
    path = tmp_path / "case.safetensors"
    step = BATCH.materialise()
    save_capsule(path, step, None, oracle(step), backend="mine", problem="\x1b[2J a\nb" + "x" * 999)
    problem = load_capsule(path).metadata.problem
    assert problem.startswith("?[2J a bxx")
    assert len(problem) == 400
    assert printable("é × ok") == "é × ok"


# what strangers send


def rewrite(path, edit):
    """Change the tensors and the JSON of a capsule without any check."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
        metadata = json.loads(file.metadata()["capsule"])
    edit(tensors, metadata)
    save_file(tensors, path, {"capsule": json.dumps(metadata)})


def refused(path, message):
    with pytest.raises(ValueError, match=message):
        load_capsule(path)


JSON_DAMAGE = [
    ("format", "pagedattn capsule 9", "format must be 'pagedattn capsule 1'"),
    ("page_size", 0, "page_size must be 1 to 65536, got 0"),
    ("page_size", 8, r"kv_cache must have shape \[2, 2, 8, 2, 16\], got \[2, 2, 4, 2, 16\]"),
    ("page_size", 4.0, "page_size must be an integer, got 4.0"),
    ("page_size", True, "page_size must be an integer, got true"),
    ("num_pages", 11, "page_ids must be 0 to num_pages - 1 = 10, got 3 to 11"),
    ("num_pages", 2**31, "num_pages must be 0 to"),
    ("backend", "\x1b]0;owned\x07", "backend must be a printable text"),
    ("backend", None, "backend must be a printable text"),
    ("problem", "x" * 401, "problem must be a printable text of 400 characters"),
    ("seed", -1, "seed must be 0 to"),
    ("seed", "4", 'seed must be an integer, got "4"'),
    ("versions", [], "versions must be an object"),
    ("versions", {"torch": "\n"}, "versions.torch must be a printable text"),
    ("versions", {"\x1b[2J": "1"}, "a name in versions must be a printable text"),
    ("spec", None, "spec must be an object, got null"),
    ("spec.dtype", "float8_e4m3fn", "spec.dtype must be one of"),
    ("spec.dtype", "float16", "q must be torch.float16, got torch.bfloat16"),
    ("spec.dtype", ["float16"], "spec.dtype must be one of"),
    ("spec.causal", 1, "spec.causal must be true or false, got 1"),
    ("spec.head_dim", 2**40, "spec.head_dim must be 1 to 4096"),
    ("spec.head_dim", 32, r"q must have shape \[4, 4, 32\], got \[4, 4, 16\]"),
    ("spec.num_qo_heads", 3, "num_qo_heads=3 must be divisible by num_kv_heads=2"),
    ("spec.num_qo_heads", 8, r"must have shape \[4, 8"),
    ("spec.num_kv_heads", 0, "spec.num_kv_heads must be 1 to"),
    ("spec.window_left", -2, "spec.window_left must be -1 to"),
    ("spec.sm_scale", -1, "sm_scale must be finite and above 0"),
    ("spec.sm_scale", "0.3", "spec.sm_scale must be a number"),
    ("spec.sm_scale", 10**400, "metadata is not JSON|spec.sm_scale must be a number"),
    ("spec.sm_scale", float("nan"), "metadata is not JSON: NaN is no number"),
    ("spec.logits_soft_cap", float("inf"), "metadata is not JSON: Infinity is no number"),
    ("spec.logits_soft_cap", None, "spec.logits_soft_cap must be a number"),
    ("spec.extra", 1, 'spec has the unknown field "extra"'),
    ("__reduce__", "os.system", "unknown field"),
]


@pytest.mark.parametrize(("name", "value", "message"), JSON_DAMAGE)
def test_damaged_metadata_is_refused_by_name(tmp_path, name, value, message):
    path = tmp_path / "case.safetensors"
    saved(path)

    def edit(tensors, metadata):
        *outer, last = name.split(".")
        target = metadata[outer[0]] if outer else metadata
        target[last] = value

    rewrite(path, edit)
    refused(path, message)


@pytest.mark.parametrize("name", ["format", *(f.name for f in fields(CapsuleMetadata))])
def test_missing_metadata_is_named(tmp_path, name):
    path = tmp_path / "case.safetensors"
    saved(path)
    rewrite(path, lambda tensors, metadata: metadata.pop(name))
    refused(path, f"metadata lacks {name}")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


TENSOR_DAMAGE = [
    ("kv_lens", int32(6, -1, 3), "kv_lens must not be negative"),
    ("kv_lens", int32(9, 0, 3), "request 0 has kv_len 9 and 2 pages of 4 tokens, expected 3"),
    ("kv_lens", int32(6, 0), r"kv_indptr must have shape \[3\], got \[4\]"),
    ("kv_lens", torch.tensor([6, 0, 3]), "kv_lens has dtype I64"),
    ("kv_lens", torch.tensor([6.0, 0, 3]), "kv_lens must be torch.int32, got torch.float32"),
    ("kv_lens", torch.tensor(6, dtype=torch.int32), "must have shape"),
    ("kv_indptr", int32(0, 2, 1, 3), "kv_indptr must not decrease"),
    ("kv_indptr", int32(1, 2, 2, 3), "kv_indptr must start at 0"),
    ("kv_indptr", int32(0, 2, 2, 2**31 - 1), r"kv_indices must have shape \[2147483647\]"),
    ("kv_indices", int32(1, 0, 2), "kv_indices holds page 2, but page_ids has 2"),
    ("kv_indices", int32(1, 0, -1), "kv_indices must not be negative, got page id -1"),
    ("kv_indices", int32(1, 0), r"kv_indices must have shape \[3\], got \[2\]"),
    ("qo_indptr", int32(0, 2, 3, 9), "qo_indptr must end at 4, the rows of q, got 9"),
    ("qo_indptr", int32(0, 3, 2, 4), "qo_indptr must not decrease"),
    ("page_ids", int32(3, 12), "page_ids must be 0 to num_pages - 1 = 11, got 3 to 12"),
    ("page_ids", int32(-3, 11), "page_ids must be 0 to num_pages - 1 = 11, got -3 to 11"),
    ("page_ids", int32(3, 3), "page_ids must increase"),
    ("page_ids", int32(3, 4, 11), r"kv_cache must have shape \[3, 2, 4, 2, 16\]"),
    ("q", torch.zeros(5, 4, 16, dtype=torch.bfloat16), r"must have shape \[5, 4"),
    ("q", torch.zeros(4, 4, 16), "q must be torch.bfloat16, got torch.float32"),
    ("kv_cache", torch.zeros(2, 4, 2, 2, 16, dtype=torch.bfloat16), "kv_cache must have shape"),
    ("expected_out", torch.zeros(4, 4, 16), "expected_out must be torch.float64"),
    ("expected_lse", torch.zeros(4, 4, 1).double(), "expected_lse must have shape"),
    ("got_out", torch.zeros(4, 4, 8, dtype=torch.bfloat16), "got_out must have shape"),
    ("got_lse", torch.zeros(4, 4, dtype=torch.int32), "got_lse must be torch.float32 or"),
    ("weights", torch.zeros(1), "unknown tensor 'weights'"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), TENSOR_DAMAGE)
def test_a_damaged_tensor_is_refused_by_name(tmp_path, name, tensor, message):
    path = tmp_path / "case.safetensors"
    saved(path)
    rewrite(path, lambda tensors, metadata: tensors.update({name: tensor}))
    refused(path, message)


@pytest.mark.parametrize("name", [*REQUIRED, "got_out"])
def test_a_missing_tensor_is_named(tmp_path, name):
    path = tmp_path / "case.safetensors"
    saved(path)
    rewrite(path, lambda tensors, metadata: tensors.pop(name))
    refused(path, f"tensor {name} is missing")


def bomb(num_requests, num_pages, qo_len, page_size=4):
    """A small file: every page of every request is the same one."""

    def edit(tensors, metadata):
        rows = num_requests * qo_len
        tensors["kv_lens"] = torch.full((num_requests,), num_pages * page_size).int()
        tensors["kv_indptr"] = (torch.arange(num_requests + 1) * num_pages).int()
        tensors["kv_indices"] = torch.zeros(num_requests * num_pages, dtype=torch.int32)
        tensors["qo_indptr"] = (torch.arange(num_requests + 1) * qo_len).int()
        for name in ("q", "expected_out", "expected_lse", "got_out", "got_lse"):
            tensors[name] = tensors[name].new_zeros(rows, *tensors[name].shape[1:])

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (bomb(1, 2**20 + 1, 1), "ask for 268435712 elements of keys"),
        (bomb(1, 2**15, 2**11 + 1), "ask for 268566528 pairs of a query and a key"),
        (bomb(40, 2**13, 2**10), "ask for 5368709120 scores"),
    ],
)
def test_a_small_file_cannot_ask_for_endless_work(tmp_path, edit, message):
    path = tmp_path / "case.safetensors"
    saved(path)
    rewrite(path, edit)
    refused(path, message)


def test_a_small_file_cannot_ask_for_a_huge_padded_table(tmp_path):
    path = tmp_path / "case.safetensors"
    saved(path)

    def edit(tensors, metadata):
        bomb(2**15, 1, 0)(tensors, metadata)
        tensors["kv_lens"][0] = 4 * 2**10
        tensors["kv_indptr"][1:] += 2**10 - 1
        tensors["kv_indices"] = torch.zeros(2**15 + 2**10 - 1, dtype=torch.int32)

    rewrite(path, edit)
    refused(path, "ask for 134217728 slots of a padded table")


def test_what_is_no_safetensors_file_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "case.safetensors"
    saved(path)
    good = path.read_bytes()
    for content, message in (
        (b"", "the file has 0 bytes, expected 8"),
        (good[:7], "the file has 7 bytes"),
        ((2**63).to_bytes(8, "little") + good[8:], f"cut short: the header has {2**63} bytes"),
        ((2**18 + 1).to_bytes(8, "little") + b" " * 2**19, "the header has 262145 bytes"),
        (good[:-1], "not a safetensors file"),
        (good + b"\0", "not a safetensors file"),
        (good[:8] + b"[" * (len(good) - 8), "not a safetensors file"),
    ):
        path.write_bytes(content)
        refused(path, message)


def test_a_pickle_is_refused(tmp_path):
    class Command:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "case.safetensors"
    torch.save({"q": Command()}, path)
    with pytest.raises(ValueError):
        load_capsule(path)
    assert not (tmp_path / "executed").exists()


def test_a_file_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "case.safetensors"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse
    refused(path, f"the file has {MAX_FILE_BYTES + 1} bytes")


def test_what_is_no_ordinary_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path, "not an ordinary file")
    refused(tmp_path / "pipe", "not an ordinary file")


def test_other_metadata_is_refused(tmp_path):
    path = tmp_path / "case.safetensors"
    for metadata in (None, {"format": "pt"}, {"capsule": "{}", "more": ""}):
        save_file({"q": torch.zeros(1)}, path, metadata)
        refused(path, "the header must hold 'capsule' alone")
    for text, message in (
        ("[" * 10**4, "metadata is not JSON"),
        ("[]", "metadata must be an object"),
        ("1" * 2**16 + "1", "metadata has 65537 characters"),
    ):
        save_file({"q": torch.zeros(1)}, path, {"capsule": text})
        refused(path, message)


@given(data=st.data())
def test_any_changed_bytes_give_a_capsule_or_a_value_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "case.safetensors"
    saved(path)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        last = data.draw(st.sampled_from([header - 1, len(content) - 1]))
        content[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        capsule = load_capsule(path)
    except ValueError:
        return
    assert oracle(capsule.step_on("cpu")).out.shape == capsule.expected.out.shape


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = [f.name for f in fields(CapsuleMetadata)]
SPEC_FIELDS = [f"spec.{f.name}" for f in fields(AttentionSpec)]


@given(name=st.sampled_from(["format", *FIELDS, *SPEC_FIELDS]), value=JSON_VALUES)
def test_any_json_in_any_field_gives_metadata_or_a_value_error(name, value):
    metadata = json.loads(CapsuleMetadata(SPEC, 4, 9, "mine").to_json())
    *outer, last = name.split(".")
    (metadata[outer[0]] if outer else metadata)[last] = value
    try:
        read = CapsuleMetadata.from_json(json.dumps(metadata))
    except ValueError:
        return
    assert CapsuleMetadata.from_json(read.to_json()) == read

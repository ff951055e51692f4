"""`pagedattn explain`: its answers are those of the backends, its bytes those of the planners."""

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, Capacity, backend_names
from pagedattn.backends.flashinfer import backend as flashinfer_backend
from pagedattn.backends.flashinfer import head_dim, need, workspace_need
from pagedattn.backends.flashinfer.need import DeviceFacts
from pagedattn.backends.triton.backend import TritonBackend
from pagedattn.cli import main
from pagedattn.explain import command
from pagedattn.explain.answers import ADVICE, H200, answers_elsewhere, answers_here
from pagedattn.explain.kernels import capacity_needs, eager_choices, known_defects

OLD, NEW = (0, 6, 18), (0, 7, 4)
A100 = DeviceFacts(num_processors=108, compute_capability=(8, 0))
CUDA = torch.device("cuda", 0)
LLAMA = ["explain", "--qo-heads", "32", "--kv-heads", "8", "--head-dim", "128"]


@st.composite
def specs(draw) -> AttentionSpec:
    num_kv_heads = draw(st.sampled_from([1, 2, 8]))
    return AttentionSpec(
        num_qo_heads=num_kv_heads * draw(st.sampled_from([1, 4, 7])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 80, 128, 256, 320])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, 0, 100])),
    )


@st.composite
def capacities(draw) -> Capacity:
    batch_size = draw(st.integers(1, 300))
    return Capacity(batch_size, draw(st.integers(batch_size, 10000)), 1)


def pretend(monkeypatch, version: tuple[int, ...], capability: tuple[int, int]) -> None:
    """A machine with this FlashInfer and a GPU of this capability."""
    library = SimpleNamespace(__version__=".".join(map(str, version)))
    for module in (flashinfer_backend, head_dim, need):
        monkeypatch.setattr(module, "load_flashinfer", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU of a test")


@given(specs(), capacities(), st.sampled_from([OLD, NEW]), st.sampled_from([H200, A100]))
def test_the_wrappers_bytes_are_those_of_the_whole(spec, capacity, version, facts):
    needs = capacity_needs(spec, capacity, facts, version)
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend(monkeypatch, version, facts.compute_capability)
        whole = workspace_need(spec, capacity, facts)
    assert max(n.float_bytes for n in needs) == whole.float_bytes
    assert max(n.int_bytes for n in needs) == whole.int_bytes


@given(specs(), st.sampled_from([OLD, NEW, (0, 6, 0)]), st.sampled_from([H200, A100]))
def test_of_a_gpu_that_is_not_here_the_tables_tell_what_the_backends_would(spec, version, facts):
    told = answers_elsewhere(spec, 16, "a GPU", version)
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend(monkeypatch, version, facts.compute_capability)
        own = {
            "flashinfer": flashinfer_backend.FlashInferBackend.unsupported_reasons(spec, 16, CUDA),
            "triton": TritonBackend.unsupported_reasons(spec, 16, CUDA),
            "reference": [],
        }
    assert [answer.backend for answer in told] == backend_names()
    for answer in told:
        assert not answer.asked
        assert len(answer.reasons) == len(own[answer.backend])


@pytest.mark.gpu
@given(specs())
def test_on_a_gpu_the_tables_agree_with_the_backends(spec):
    pytest.importorskip("flashinfer")
    version, _ = command._version(None)
    device = torch.device("cuda", torch.cuda.current_device())
    asked = answers_here(spec, 16, device, version)
    told = answers_elsewhere(spec, 16, "this", version)
    assert [bool(a.reasons) for a in asked] == [bool(a.reasons) for a in told]


def test_every_advice_answers_a_reason_that_a_backend_gives(monkeypatch):
    spec = AttentionSpec(8, 2, 320, dtype=torch.float32)
    cpu = torch.device("cpu")
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    reasons = flashinfer_backend.FlashInferBackend.unsupported_reasons(spec, 16, cpu)
    reasons += TritonBackend.unsupported_reasons(spec, 16, cpu)
    pretend(monkeypatch, (0, 6, 0), (7, 5))
    reasons += TritonBackend.unsupported_reasons(spec, 16, CUDA)
    for head_size in (80, 320):
        other = AttentionSpec(8, 2, head_size)
        reasons += flashinfer_backend.FlashInferBackend.unsupported_reasons(other, 16, CUDA)
    monkeypatch.setattr(flashinfer_backend, "load_flashinfer", lambda: 1 / 0)
    reasons += flashinfer_backend.FlashInferBackend.unsupported_reasons(spec, 16, CUDA)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "flashinfer" else find_spec(name)
    )
    [answer] = [a for a in answers_here(spec, 16, cpu, NEW) if a.backend == "flashinfer"]
    reasons += [reason.why for reason in answer.reasons]
    unused = [phrase for phrase, _ in ADVICE if not any(phrase in reason for reason in reasons)]
    assert not unused


def test_without_flashinfer_the_other_reasons_are_told_too(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "flashinfer" else find_spec(name)
    )
    spec = AttentionSpec(8, 2, 80, dtype=torch.float32)
    [answer] = [
        a for a in answers_here(spec, 16, torch.device("cpu"), NEW) if a.backend == "flashinfer"
    ]
    phrases = ("not installed", "NVIDIA GPU", "float32", "head_dim=80")
    assert len(answer.reasons) == len(phrases)
    for reason, phrase in zip(answer.reasons, phrases, strict=True):
        assert phrase in reason.why


@given(specs(), st.sampled_from([H200, A100]))
def test_hopper_kernels_are_named_only_where_they_are(spec, facts):
    kernels = {choice.kernel for choice in eager_choices(spec, facts)}
    if facts is A100 or spec.head_dim not in (64, 128, 256) or spec.window_left >= 0:
        assert kernels == {"fa2"}
    else:
        assert kernels == {"fa2", "fa3"}


def test_a_defect_is_named_in_its_versions_and_on_its_kernels_alone():
    spec = AttentionSpec(8, 2, 128)
    (on_new,) = known_defects(spec, H200, NEW)
    assert on_new.name == "fa2 with a causal mask and more queries than keys"
    assert on_new.first_right is None
    assert known_defects(spec, A100, NEW) == [on_new]
    assert known_defects(replace(spec, causal=False), A100, NEW) == []
    on_old = {d.name for d in known_defects(spec, H200, OLD)}
    assert on_old - {d.name for d in known_defects(spec, A100, OLD)} == {
        "fa3 with a causal mask and more queries than keys"
    }


def run(*options: str) -> str:
    result = CliRunner().invoke(main, [*LLAMA, *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_tables_fit_80_columns_and_no_address_is_cut():
    text = run("--non-causal", "--window-left", "100", "--batch-size", "64", "--soft-cap", "30")
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "https://github.com/flashinfer-ai/flashinfer/issues/4972" in text


def test_json_has_every_answer_and_bucket():
    said = json.loads(
        run("--json", "--batch-size", "64", "--max-tokens", "8192", "--batch-size", "2",
            "--max-tokens", "2", "--flashinfer-version", "0.6.18.post1")
    )  # fmt: skip
    assert {answer["backend"] for answer in said["answers"]} == set(backend_names())
    assert said["flashinfer"].startswith("0.6.18.post1 (")
    if said["needs"]:
        buckets = {need["bucket"] for need in said["needs"]}
        assert buckets == {"no capacity", "64 requests, 8192 tokens", "2 requests, 2 tokens"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the GPU that is here is explained")
def test_without_a_gpu_both_devices_are_named():
    said = json.loads(run("--json"))
    devices = {(answer["device"], answer["asked"]) for answer in said["answers"]}
    assert devices == {("cpu", True), ("H200", False)}
    assert said["gpu"] == "H200"
    assert said["choices"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-heads", "5"], "num_kv_heads=5"),
        (["--batch-size", "4", "--max-tokens", "2"], "max_tokens=2"),
        (["--batch-size", "4", "--max-tokens", "8", "--max-tokens", "9"], "one --max-tokens"),
    ],
)
def test_impossible_questions_are_usage_errors(options, named):
    result = CliRunner().invoke(main, [*LLAMA, *options])
    assert result.exit_code == 2
    assert named in result.output

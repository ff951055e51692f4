"""A planted fault from end to end: the check fails, keeps a capsule, and replay shows it again."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

from pagedattn import backends
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking import evidence
from pagedattn.checking.capsule import load_capsule
from pagedattn.cli import main
from pagedattn.draw import draw_mask, draw_pages


class ShortWindow(ReferenceBackend):
    """A window one key short."""

    def __init__(self, spec, page_size, device, capacity, batch_invariant):
        if spec.window_left > 0:
            spec = replace(spec, window_left=spec.window_left - 1)
        super().__init__(spec, page_size, device, capacity)


class Raising(ReferenceBackend):
    """Cannot compute longer requests, and finds out late."""

    def plan(self, page_table, qo_indptr):
        if int(page_table.kv_lens.max()) > 5:
            raise ZeroDivisionError("too many\nkeys \x1b[31m")
        super().plan(page_table, qo_indptr)


class SmallHeads(ReferenceBackend):
    """Supports little."""

    @classmethod
    def unsupported_reasons(cls, spec, page_size, device):
        return ["a head is too large"] if spec.head_dim == 16 else []


@pytest.fixture(autouse=True)
def planted(monkeypatch, tmp_path):
    """Backends that are wrong, and no one of those that this machine happens to have."""
    monkeypatch.chdir(tmp_path)
    for name in ("triton", "flashinfer"):
        monkeypatch.delitem(backends._BACKENDS, name)
    for cls in (ShortWindow, Raising, SmallHeads):
        entry = backends._Entry(f"{__name__}.{cls.__name__}", needs="torch", install="")
        monkeypatch.setitem(backends._BACKENDS, cls.__name__.lower(), entry)


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def failed_check(backend="shortwindow", *arguments):
    """What a failing check printed, and the path of its one capsule."""
    result = run(
        "check",
        "--backend",
        backend,
        "--property",
        "agreement",
        "--mode",
        "mixed",
        "--examples",
        6,
        "--device",
        "cpu",
        *arguments,
    )
    assert result.exit_code == 1, result.output
    command = re.search(r"replay: pagedattn (replay .*)", result.stdout).group(1)
    return result.stdout, shlex.split(command)


def test_a_failing_check_keeps_its_smallest_case_and_replay_shows_it_again(tmp_path):
    printed, command = failed_check()
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"capsule-shortwindow-agreement-mixed-seed\d+\.safetensors", path.name)
    capsule = load_capsule(Path(path))
    # shrunk to one query of one request that just leaves its window
    assert (capsule.step.kv_lens, capsule.step.qo_lens) == ([2], [1])
    assert capsule.metadata.spec.window_left == 1
    assert f"smallest: {capsule.metadata.problem}" in printed
    picture = draw_pages(
        capsule.original_table,
        qo_indptr=capsule.step.qo_indptr,
        window_left=1,
        num_pages=capsule.metadata.num_pages,
    )
    assert picture.text in printed

    result = run(*command)
    assert result.exit_code == 1
    wrong = "shortwindow vs float64 reference: WRONG, worst at "
    assert f"kept answer: {wrong}{capsule.metadata.problem}" in result.stdout
    now = (
        f"now: shortwindow on cpu vs float64 reference: WRONG, worst at {capsule.metadata.problem}"
    )
    assert now in result.stdout
    assert re.search(r"error \S+, allowed \S+ \(request 0 of 1, query 0 of 1, kv_len 2\)", now)


def test_a_right_backend_replays_with_0_and_the_kept_answer_is_still_wrong():
    _, (_, path, *_) = failed_check()
    result = run("replay", path, "--backend", "reference", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "kept answer: shortwindow vs float64 reference: WRONG" in result.stdout
    assert "now: reference on cpu vs dense float64: ok, worst at" in result.stdout


def test_without_names_all_that_support_it_are_run_and_the_others_listed():
    _, (_, path, *_) = failed_check()
    result = run("replay", path, "--device", "cpu")
    assert result.exit_code == 1
    assert "smallheads is left out: a head is too large" in result.stdout
    named = re.findall(r"now: (\w+) on cpu vs \w+ \w+: (\w+)", result.stdout)
    assert named == [("reference", "ok"), ("shortwindow", "WRONG"), ("raising", "ok")]


def test_an_error_is_kept_without_an_answer_and_raised_again(tmp_path):
    _, command = failed_check("raising")
    (path,) = tmp_path.iterdir()
    capsule = load_capsule(Path(path))
    assert capsule.got is None
    problem = r"raised ZeroDivisionError: too many keys \?\[31m \(test_replay_command\.py:\d+\)"
    assert re.fullmatch(problem, capsule.metadata.problem)
    assert (capsule.step.kv_lens, capsule.step.qo_lens) == ([6], [1])
    assert "kept answer: none" in run(*command).stdout
    assert "WRONG, raised ZeroDivisionError" in run(*command).stdout
    assert run(*command).exit_code == 1


def test_the_folder_of_capsules_can_be_named_and_is_made(tmp_path):
    _, (_, path, *_) = failed_check("shortwindow", "--capsule-dir", "new folder/of mine")
    assert path.startswith("new folder/of mine/capsule-shortwindow-agreement-mixed-seed")
    assert (tmp_path / path).is_file()


def test_a_folder_that_cannot_be_written_does_not_hide_the_mismatch(tmp_path):
    (tmp_path / "file").touch()
    result = run(
        *("check", "--backend", "shortwindow", "--property", "agreement"),
        *("--mode", "mixed", "--examples", 6),
        *("--device", "cpu", "--capsule-dir", "file/inside"),
    )
    assert result.exit_code == 1
    assert "MISMATCH" in result.stdout
    assert "no capsule written:" in result.stdout


def test_a_machine_that_dies_while_shrinking_leaves_the_case_as_it_was_found(monkeypatch, tmp_path):
    def die(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(evidence, "shrink_batch", die)
    printed, _ = failed_check()
    capsule = load_capsule(next(tmp_path.iterdir()))
    assert capsule.got is None
    assert len(capsule.step.kv_lens) > 1  # a mixed step, as it was drawn
    assert f"first: {capsule.metadata.problem}" in printed


def test_a_right_check_writes_nothing(tmp_path):
    arguments = ["--backend", "reference", "--mode", "decode", "--examples", 2, "--device", "cpu"]
    assert run("check", *arguments).exit_code == 0
    assert not list(tmp_path.iterdir())


def test_a_float64_answer_that_is_not_that_of_the_inputs_is_called_wrong():
    _, (_, path, *_) = failed_check()
    right = run("replay", path, "--backend", "reference", "--device", "cpu")
    assert "kept float64 answer" not in right.stdout
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
        metadata = file.metadata()
    tensors["expected_out"] += 1
    save_file(tensors, path, metadata)
    result = run("replay", path, "--backend", "reference", "--device", "cpu")
    assert "kept float64 answer: WRONG" in result.stdout
    assert result.exit_code == 0


def test_bad_usage_and_bad_files_exit_with_2(tmp_path):
    _, (_, path, *_) = failed_check()
    for arguments, message in (
        ([path, "--backend", "cutlass"], "unknown backend 'cutlass'"),
        ([path, "--backend", "smallheads"], "a head is too large"),
        ([path, "--device", "toaster"], "--device toaster"),
        (["nowhere.safetensors"], "nowhere.safetensors"),
        ([], "FILE"),
        ([tmp_path], "is a directory"),
    ):
        result = run("replay", *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output
    (tmp_path / "bad.safetensors").write_bytes(b"\0" * 100)
    result = run("replay", "bad.safetensors")
    assert result.exit_code == 2
    assert "bad.safetensors: not a safetensors file" in result.output
    assert "Traceback" not in result.output


def test_show_draws_a_capsule():
    _, (_, path, *_) = failed_check()
    capsule = load_capsule(Path(path))
    table, qo_indptr = capsule.original_table, capsule.step.qo_indptr
    num_pages = capsule.metadata.num_pages
    pages = draw_pages(table, qo_indptr=qo_indptr, window_left=1, num_pages=num_pages)
    assert run("show", path).output == pages.text + "\n"
    mask = draw_mask(
        table, 0, qo_indptr=qo_indptr, causal=capsule.metadata.spec.causal, window_left=1
    )
    assert run("show", path, "--mask", 0).output == mask.text + "\n"


def test_show_refuses_a_damaged_capsule(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"\0" * 100)
    result = run("show", "bad.safetensors")
    assert result.exit_code == 1
    assert "bad.safetensors: not a safetensors file" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not need the interpreter")
def test_on_a_cpu_it_asks_triton_to_interpret_in_time(monkeypatch):
    _, (_, path, *_) = failed_check()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = (
        "import sys, os\n"
        "from pagedattn.checking.replay import replay\n"
        "assert 'triton' not in sys.modules and 'TRITON_INTERPRET' not in os.environ\n"
        f"replay([{path!r}, '--backend', 'triton'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "now: triton on cpu vs float64 reference: ok" in done.stdout

"""`pagedattn doctor`: right on a machine without GPU and FlashInfer, and never ended by either."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pagedattn import backend_names
from pagedattn.cli import main
from pagedattn.doctor import abilities, command
from pagedattn.doctor.abilities import Ability, Problem, abilities_of, import_failure
from pagedattn.doctor.machine import Gpu, Machine, Package, examine
from pagedattn.toolchain import (
    FLASHINFER_PACKAGE,
    Nvcc,
    cache_folders,
    family_words,
    find_nvcc,
    package_version,
)

BARE = Machine(
    python="3.11.7",
    packages=(Package("pagedattn", "0.1.0"), Package("torch", "2.13.0")),
    torch_cuda=None,
    gpus=(),
    driver=None,
    nvcc=None,
    cxx=None,
    ninja=None,
    triton_interprets=None,
    cache="/home/somebody/.cache/flashinfer",
    compiled=(),
)
SERVER = dataclasses.replace(
    BARE,
    packages=(*BARE.packages, Package(FLASHINFER_PACKAGE, "0.7.4")),
    torch_cuda="13.0",
    gpus=(Gpu("NVIDIA H200", "9.0"),),
    driver="580.1",
    nvcc=Nvcc("nvcc", "13.0"),
    cxx="c++ 12",
    ninja="1.11",
)


def install_fake_flashinfer(folder: Path, code: str) -> None:
    """A distribution of FlashInfer whose import runs this code."""
    (folder / "flashinfer").mkdir()
    (folder / "flashinfer" / "__init__.py").write_text(code)
    info = folder / "flashinfer_python-0.6.18.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: flashinfer-python\nVersion: 0.6.18.post1\n")


def executable(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def problems(machine: Machine, name: str) -> list[str]:
    [ability] = [a for a in abilities_of(machine) if a.name == name]
    return [problem.what for problem in ability.problems]


def test_a_flashinfer_whose_import_ends_the_process_is_not_imported_without_a_gpu(tmp_path):
    install_fake_flashinfer(tmp_path, "import os; os._exit(7)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", "from pagedattn.cli import main; main()", "doctor", "--json"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {"name": FLASHINFER_PACKAGE, "version": "0.6.18.post1"} in said["machine"]["packages"]
    works = {ability["name"]: ability["works"] for ability in said["abilities"]}
    assert works["backend reference"]
    assert not works["backend flashinfer"]


def test_an_import_that_ends_the_process_is_a_problem_and_no_end(tmp_path, monkeypatch):
    install_fake_flashinfer(tmp_path, "import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_failure("flashinfer") == "the process ended with 7"
    assert problems(SERVER, "backend flashinfer") == [
        "import flashinfer failed: the process ended with 7"
    ]


def test_the_last_line_of_a_failed_import_is_told():
    failure = import_failure("a_module_that_is_not")
    assert failure == "ModuleNotFoundError: No module named 'a_module_that_is_not'"
    assert import_failure("json") is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gpus": (), "driver": None}, "there is no NVIDIA driver"),
        ({"gpus": (), "torch_cuda": None}, "torch was built without CUDA"),
        ({"gpus": ()}, "torch, built for CUDA 13.0, sees no GPU"),
        ({"packages": BARE.packages}, "FlashInfer is not installed"),
    ],
)
def test_what_a_gpu_backend_lacks_is_named(change, what):
    assert problems(dataclasses.replace(SERVER, **change), "backend flashinfer") == [what]


def test_kernels_that_nothing_can_compile_are_a_problem_unless_they_are_there(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(abilities, "import_failure", lambda module: None)
    monkeypatch.setattr(abilities, "unsupported_reasons", lambda *args: [])
    assert problems(SERVER, "backend flashinfer") == []
    without = dataclasses.replace(SERVER, nvcc=None)
    assert problems(without, "backend flashinfer") == ["its kernels are compiled on first use"]
    for folder in (tmp_path / "0.7.4" / "90a" / "cached_ops" / name for name in ("made", "begun")):
        folder.mkdir(parents=True)
        (folder / "build.ninja").touch()
    (folder.parent / "made" / "made.so").touch()
    compiled = tuple(cache_folders(tmp_path))
    assert [(c.kernels, c.unfinished) for c in compiled] == [(("made",), ("begun",))]
    assert problems(dataclasses.replace(without, compiled=compiled), "backend flashinfer") == []


def test_every_compiler_that_is_missing_is_named():
    name = "compile FlashInfer's kernels"
    assert problems(SERVER, name) == []
    lacks = [
        "FlashInfer is not installed",
        "there is no nvcc",
        "there is no c++",
        "there is no ninja",
    ]
    assert problems(BARE, name) == lacks


def test_every_problem_has_a_cure_and_every_backend_is_told_of():
    told = [*abilities_of(BARE), *abilities_of(examine())]
    assert all(p.what and p.cure for ability in told for p in ability.problems)
    backends = [ability.name for ability in told if ability.is_backend]
    assert backends == 2 * [f"backend {name}" for name in backend_names()]


def test_the_tables_fit_80_columns_and_cut_nothing(monkeypatch):
    monkeypatch.setattr(command, "examine", lambda: BARE)
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output
    assert 'pip install "pagedattn[flashinfer]"' in result.output
    assert BARE.cache in result.output


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_it_fails_only_where_no_backend_works(monkeypatch, works, code):
    no = (Problem("broken", "mend it"),)
    said = [
        Ability("backend a", True, no),
        Ability("backend b", True, () if works else no),
        Ability("something else", False, ()),
    ]
    monkeypatch.setattr(command, "abilities_of", lambda machine: said)
    assert CliRunner().invoke(main, ["doctor", "--json"]).exit_code == code


def test_an_nvcc_that_answers_is_found_behind_one_that_does_not(tmp_path, monkeypatch):
    executable(tmp_path / "broken" / "bin" / "nvcc", "exit 1")
    executable(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.1'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "broken"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert find_nvcc() == Nvcc(str(tmp_path / "bin" / "nvcc"), "12.9")


def test_families_are_named_in_words():
    name = (
        "batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_"
        "head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_True_f16qk_False"
    )
    assert family_words(name) == "fa2 f16 head_dim 128, soft cap"
    assert family_words(f"{name}_kv_stride_equal") == (
        "fa2 f16 head_dim 128, soft cap (kv_stride_equal)"
    )
    assert family_words(f"{name}_sm90") == "fa3 f16 head_dim 128, soft cap"
    assert family_words("page") == "page"


def test_versions_come_without_an_import():
    assert package_version("pytest") == pytest.__version__
    assert package_version("a-package-that-is-not") is None

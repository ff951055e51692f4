"""`pagedattn precompile`, with a FlashInfer that builds nothing and compilers that do nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from ninja_outputs import CACHE, COMPILE, OUTPUTS

from pagedattn.cli import main
from pagedattn.kernels import gluon_names
from pagedattn.precompile import command, environment, lock
from pagedattn.precompile.environment import build_environment, header_folders, library_folders
from pagedattn.precompile.events import Event, read_event
from pagedattn.precompile.failures import failure_in
from pagedattn.precompile.families import families_of
from pagedattn.precompile.lock import LOCK_NAME, Held, only_one
from pagedattn.toolchain import Nvcc, flashinfer_cache

FAKE_MODULES = """
import os
from pathlib import Path

class Spec:
    is_aot = False
    sources = ["x.cu"]

    def __init__(self, name):
        cache = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / ".cache" / "flashinfer"
        self.path = cache / os.environ["FLASHINFER_CUDA_ARCH_LIST"] / f"{name}.so"

    def get_library_path(self):
        return self.path

    def build(self, verbose=None, need_lock=False):
        assert verbose and need_lock
        print("[1/2] nvcc -gencode= -o /x error: of no meaning", flush=True)
        if "BUILD_OUTPUT" in os.environ:
            print(os.environ["BUILD_OUTPUT"], flush=True)
            raise RuntimeError("Ninja build failed.")
        print("[2/2] c++ -o /y", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(" ".join(map(str, self.args)))

def describe(kind, *args):
    spec = Spec(f"{kind}_{args[0]}_{args[5]}")
    spec.args = args
    return spec

def gen_batch_prefill_module(*args):
    return describe("public", *args)
"""
FAKE_PRIMARY = """
def _gen_batch_prefill_primary_module(*args):
    return describe("equal_strides", *args)
"""

FAKE_ENDLESS = """
import os, subprocess
from pathlib import Path

class Spec:
    sources = []

    def build(self, verbose):
        compiler = subprocess.Popen(["sleep", "100"])
        unfinished = Path(os.environ["COMPILER_FILE"] + ".new")
        unfinished.write_text(str(compiler.pid))
        unfinished.rename(os.environ["COMPILER_FILE"])
        compiler.wait()

def gen_batch_prefill_module(*args):
    return Spec()
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache, and compilers that are said to be there."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "home"))
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    programs = tmp_path / "bin"
    for name, prints in (("nvcc", "release 12.9, V12.9.1"), ("ninja", "1.11")):
        programs.mkdir(exist_ok=True)
        (programs / name).write_text(f"#!/bin/sh\necho '{prints}'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return tmp_path / "home"


def install(folder: Path, monkeypatch, modules: str) -> None:
    """A FlashInfer whose import needs what the real one needs: a torch that has CUDA."""
    package = folder / "site" / "flashinfer"
    (package / "jit" / "attention").mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\ntorch.version.cuda.split('.')\n")
    (package / "jit" / "__init__.py").touch()
    (package / "jit" / "attention" / "__init__.py").touch()
    (package / "jit" / "attention" / "modules.py").write_text(modules)
    information = folder / "site" / "flashinfer_python-0.7.4.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: flashinfer-python\nVersion: 0.7.4\n")
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    monkeypatch.syspath_prepend(str(folder / "site"))


def run(*options: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["precompile", *options], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.stdout if code != 2 else result.output


@pytest.mark.parametrize(
    ("modules", "fa2"), [(FAKE_MODULES, "public"), (FAKE_MODULES + FAKE_PRIMARY, "equal_strides")]
)
def test_the_libraries_are_those_that_the_wrappers_load(home, tmp_path, monkeypatch, modules, fa2):
    install(tmp_path, monkeypatch, modules)
    text = run("--head-dim", "64", "--head-dim", "80", "--window", "--arch", "9.0a")
    built = sorted((flashinfer_cache() / "9.0a").iterdir())
    assert [path.stem for path in built] == sorted(
        [f"{fa2}_fa2_64", "public_fa3_64", f"{fa2}_fa2_80"]
    )
    for path in built:
        assert str(path) in text
        kernel, *dtypes, index, head_dim, same, rotary, window, cap, half = path.read_text().split()
        assert path.stem.split("_")[-2:] == [kernel, head_dim]
        assert [*dtypes, index] == ["torch.bfloat16"] * 3 + ["torch.int32"]
        assert (same, rotary, window, cap, half) == (head_dim, "0", "True", "False", "False")
    assert text.count("ready") == 3


def test_a_failure_tells_the_first_real_error_and_no_page(home, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, FAKE_MODULES)
    output, error, hint = OUTPUTS["header"]
    monkeypatch.setenv("BUILD_OUTPUT", output)
    text = run("--head-dim", "64", "--arch", "9.0a", code=1)
    assert " ".join(error.split()) in " ".join(text.split())
    assert hint in " ".join(text.split())
    assert len(text.splitlines()) < 10
    assert output in (flashinfer_cache() / command.LOG_NAME).read_text()


def test_errors_come_without_folders_and_without_the_commands_that_failed():
    for output, error, hint in OUTPUTS.values():
        failure = failure_in(output.splitlines(), 1)
        assert failure.error == error
        assert hint in failure.hint
        assert CACHE not in failure.error
    only_commands = failure_in([f"[1/2] {COMPILE} error: none", "done"], 3)
    assert "exit code 3" in only_commands.error


def test_a_process_that_the_system_ended_ran_out_of_memory():
    assert "--jobs 1" in failure_in([], -9).hint
    assert "signal 15" in failure_in([], -15).error


def test_what_is_missing_is_told_before_anything_is_built(home, tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(command, "package_version", lambda package: None)
        assert "FlashInfer is not installed" in run("--head-dim", "64", "--arch", "9.0a", code=1)
    install(tmp_path, monkeypatch, FAKE_MODULES)
    monkeypatch.setattr(command, "find_nvcc", lambda: None)
    assert "there is no nvcc" in run("--head-dim", "64", "--arch", "9.0a", code=1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--arch", "9.0a 10.0a"], "one architecture"),
        (["--arch", "hopper"], "'hopper'"),
        (["--arch", "9.0a", "--backend", "triton"], "--qo-heads and --kv-heads"),
        (["--arch", "9.0a", "--qo-heads", "3", "--kv-heads", "2"], "divisible"),
    ],
)
def test_impossible_wishes_are_usage_errors(home, options, named):
    assert named in run("--head-dim", "64", *options, code=2)


def test_fa3_is_for_hopper_and_its_head_sizes_unless_asked_for():
    def kernels(head_dim: int, arch: str, *asked: str) -> list[str]:
        return [f.kernel for f in families_of((head_dim,), ("bf16",), asked, arch, False, False)]

    assert kernels(128, "9.0a") == ["fa2", "fa3"]
    assert kernels(128, "10.0a") == kernels(80, "9.0a") == ["fa2"]
    assert kernels(128, "9.0a", "fa3", "fa3") == ["fa3"]


def test_no_variable_that_changes_a_command_line_is_set(tmp_path, monkeypatch):
    for name in ("LIBRARY_PATH", "CPATH", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    made = build_environment(Nvcc("/nowhere/bin/nvcc", "13.0"), "9.0a", 3, tmp_path)
    changed = {name for name, value in made.items() if os.environ.get(name) != value}
    harmless = {"LIBRARY_PATH", "CPATH", "MAX_JOBS", "NINJA_STATUS", environment.RELEASE_VARIABLE}
    assert changed - harmless == {"FLASHINFER_CUDA_ARCH_LIST"}


def test_a_toolkit_that_has_everything_is_taken_as_it_is(tmp_path, monkeypatch):
    toolkit = tmp_path / "cuda"
    for path in ("lib64/libcudart.so", "lib64/stubs/libcuda.so", "include/curand_kernel.h"):
        (toolkit / path).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / path).touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    nvcc, links = Nvcc(str(toolkit / "bin" / "nvcc"), "13.0"), tmp_path / "links"
    assert library_folders(nvcc, links) == [toolkit / "lib64", toolkit / "lib64" / "stubs"]
    assert header_folders(nvcc, links) == []
    assert not links.exists()


def test_what_packages_have_and_the_toolkit_lacks_is_linked(tmp_path, monkeypatch):
    package = tmp_path / "nvidia" / "cu13"
    for name in ("lib/libcudart.so.13", "include/curand_kernel.h", "include/cuda.h"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    monkeypatch.setattr(environment, "_package_folders", lambda name: [package / name])
    monkeypatch.setattr(environment, "toolkit_folders", lambda nvcc: [])
    monkeypatch.setattr(environment, "_system_libraries", lambda: [])
    nvcc, links = Nvcc("nvcc", "13.0"), tmp_path / "links"
    assert library_folders(nvcc, links) == [links]
    assert (links / "libcudart.so").resolve() == package / "lib" / "libcudart.so.13"
    [headers] = header_folders(nvcc, links)
    assert [path.name for path in headers.iterdir()] == ["curand_kernel.h"]
    stub = links / "libcuda.so"
    if stub.exists():  # there is a compiler here
        assert b"libcuda.so.1" in stub.read_bytes()
        library_folders(nvcc, links)  # made anew without complaint


# the module alone: its package would bring torch
HOLD = """
import runpy, sys
from pathlib import Path
with runpy.run_path(sys.argv[1])["only_one"](Path(sys.argv[2]), "fa2 bf16", None):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of the folder `tmp_path` until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, lock.__file__, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_second_process_learns_who_is_at_work(tmp_path, holder):
    with (
        pytest.raises(Held, match=f"process {holder.pid} on .*: fa2 bf16"),
        only_one(tmp_path, "mine", None),
    ):
        raise AssertionError("two hold one lock")


def test_a_second_process_waits_until_the_first_is_done(tmp_path, holder):
    told = []

    def waiting(who: str) -> None:
        told.append(who)
        holder.stdin.close()

    with only_one(tmp_path, "mine", waiting):
        assert f"process {os.getpid()} " in (tmp_path / LOCK_NAME).read_text()
    assert len(told) == 1
    assert f"process {holder.pid} " in told[0]


def test_a_process_that_was_killed_holds_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    with only_one(tmp_path, "mine", None):
        pass


def test_the_command_refuses_while_another_compiles(home, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, FAKE_MODULES)
    with only_one(flashinfer_cache(), "something", None):
        result = CliRunner().invoke(
            main, ["precompile", "--head-dim", "64", "--arch", "9.0a", "--no-wait"]
        )
    assert result.exit_code == 1
    assert f"process {os.getpid()} " in result.output


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux what is running")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_the_command_ends_its_compilers(home, tmp_path, monkeypatch, number):
    install(tmp_path, monkeypatch, FAKE_ENDLESS)
    monkeypatch.setenv("COMPILER_FILE", str(tmp_path / "compiler"))
    code = "from pagedattn.cli import main; main()"
    options = ["precompile", "--head-dim", "64", "--arch", "9.0a"]
    process = subprocess.Popen([sys.executable, "-c", code, *options])
    deadline = time.monotonic() + 60
    while not (tmp_path / "compiler").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    compiler = int((tmp_path / "compiler").read_text())
    assert is_running(compiler)
    process.send_signal(number)
    assert process.wait(30) != 0
    while is_running(compiler) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(compiler)


def test_marked_lines_are_events_and_others_are_not():
    line = '@pagedattn {"kind": "done", "name": "a", "path": "b"}'
    assert read_event(line) == Event("done", "a", "b")
    assert read_event("[1/2] nvcc") is None


@pytest.mark.parametrize(
    ("head_dim", "group_size", "options", "long_kernel"),
    [
        (16, 32, True, "long_attention"),  # blocks of 32 rows and of 64
        pytest.param(
            64, 64, False, "attention_hopper",  # the Gluon kernel has all queries
            marks=pytest.mark.skipif(bool(gluon_names.MISSING), reason=f"no {gluon_names.MISSING}"),
        ),
    ],
)  # fmt: skip
def test_tritons_kernels_are_compiled_once_for_a_gpu_that_is_not_here(
    tmp_path, head_dim, group_size, options, long_kernel
):
    layer = {
        "num_qo_heads": group_size, "num_kv_heads": 1, "head_dim": head_dim, "dtype": "bf16",
        "causal": True, "window": options, "soft_cap": options, "page_size": 16, "capability": 90,
    }  # fmt: skip
    variables = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip

    def warm() -> set[Path]:
        subprocess.run(
            [sys.executable, "-m", "pagedattn.precompile.triton_child", json.dumps([layer])],
            env=variables, capture_output=True, check=True,
        )  # fmt: skip
        return set((tmp_path / "cache").rglob("*.cubin"))

    compiled = warm()
    names = [path.stem for path in compiled]
    assert {"build_schedule", long_kernel, "_append_kernel"} <= set(names)
    # without and with LSE
    assert names.count(long_kernel) == 2
    assert names.count("short_attention") == (0 if long_kernel == "attention_hopper" else 4)
    assert warm() == compiled

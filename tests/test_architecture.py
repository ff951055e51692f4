"""The floors of the house: a file imports only from floors below its own."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pagedattn

ROOT = Path(pagedattn.__file__).parent

# The longest matching prefix of a module's path decides its floor.
FLOORS = {
    "spec": 0,
    "device": 0,
    "page_table": 0,
    "slots": 0,
    "capacity": 0,
    "validation": 1,
    "staging": 1,
    "watch": 1,
    "page_allocator": 1,
    "operators": 1,
    "kv_cache": 3,  # it launches kernels/append.py
    "kernels": 2,
    "backends/base": 3,
    "backends/reference": 3,
    "backends/triton": 3,
    "backends/flashinfer": 3,
    "backends/__init__": 3,
    "attention": 4,
    "checking": 5,
    "draw": 5,
    "testing": 5,
    "registration": 5,  # of strategies, with hypothesis
    "integrations": 5,
    "flashinfer": 5,  # re-exports the wrapper layer
    "toolchain": 5,
    "explain": 5,
    "doctor": 5,
    "precompile": 5,
    "bench": 5,
    "cli": 5,
    "__init__": 6,
}
# A notebook asks a table for its picture: imported inside that method and nowhere else.
UPWARD = {("page_table", "draw/__init__")}
BACKENDS = ("backends/reference", "backends/triton", "backends/flashinfer")


def home(name: str) -> str:
    return max((key for key in FLOORS if name == key or name.startswith(f"{key}/")), key=len)


def imports_of(path: Path) -> list[str]:
    """Paths below the package, "backends/base" for pagedattn.backends.base, of its imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [n.removeprefix("pagedattn.") for n in names if n.startswith("pagedattn.")]
    paths = []
    for name in ours:
        parts = name.split(".")
        while parts and not (ROOT.joinpath(*parts).with_suffix(".py")).exists():
            if (ROOT.joinpath(*parts) / "__init__.py").exists():
                parts.append("__init__")
                break
            parts.pop()
        paths.append("/".join(parts) or "__init__")
    return paths


def test_every_file_imports_only_from_its_own_floor_or_below():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        for used in imports_of(path):
            if FLOORS[home(used)] > FLOORS[home(name)] and (name, used) not in UPWARD:
                wrong.append(f"{name} imports {used} from a higher floor")
    assert not wrong


def test_backends_never_import_one_another_and_kernels_import_only_kernels():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        for used in imports_of(path):
            both_backends = home(name) in BACKENDS and home(used) in BACKENDS
            if both_backends and home(name) != home(used):
                wrong.append(f"{name} imports {used}")
            if home(name) == "kernels" and home(used) != "kernels":
                wrong.append(f"{name} imports {used}")
    assert not wrong


def test_checks_of_what_users_give_are_no_asserts():
    """`python -O` drops asserts: each is of our own bugs, and says so here."""
    ours = {"precompile/runner": 1, "checking/mismatch": 1}
    found = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        found[name] += sum(
            isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))
        )
    assert {name: number for name, number in found.items() if number} == ours


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_brings_in_torch_and_nothing_heavier():
    heavy = ["triton", "flashinfer", "transformers", "hypothesis", "rich", "click", "matplotlib"]
    code = (
        "import sys, torch; before = set(sys.modules); import pagedattn; "
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    assert run_python(code) == "[]"


def test_import_adds_less_than_a_fifth_of_a_second_to_torch():
    code = (
        "import time, torch; begin = time.perf_counter(); import pagedattn; "
        "print(time.perf_counter() - begin)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.2

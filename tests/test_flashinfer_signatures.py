"""The stand-in takes what the installed FlashInfer takes, read from its source: no import."""

import ast
import importlib.util
import inspect
from pathlib import Path

import flashinfer_stand_in
import pytest

MODULES = {
    "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
    "BatchDecodeWithPagedKVCacheWrapper": "decode.py",
}
METHODS = ("__init__", "plan", "_plan_impl", "run", "reset_workspace_buffer")
CASES = [(c, m) for c in MODULES for m in METHODS if hasattr(getattr(flashinfer_stand_in, c), m)]


def installed_method(class_name: str, method: str) -> ast.FunctionDef:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer-python is not installed: nothing to compare the stand-in with")
    source = (Path(spec.origin).parent / MODULES[class_name]).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            found = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == method]
            return found[-1]  # behind its overloads
    raise AssertionError(f"{class_name} is not in {MODULES[class_name]}")


def parameters_of(function: ast.FunctionDef) -> dict[str, str | None]:
    """Name to default, as source text; `None` where there is none."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    return {arg.arg: None if value is None else ast.unparse(value) for arg, value in pairs}


def stand_in_parameters(class_name: str, method: str) -> dict[str, str | None]:
    function = getattr(getattr(flashinfer_stand_in, class_name), method)
    tree = ast.parse(inspect.getsource(function).replace("\n    ", "\n").strip())
    return parameters_of(tree.body[0])


@pytest.mark.parametrize(("class_name", "method"), CASES)
def test_the_stand_in_takes_what_flashinfer_takes(class_name, method):
    real = parameters_of(installed_method(class_name, method))
    ours = stand_in_parameters(class_name, method)
    newer = {"lse_base"}  # the wrappers ask for it by name: older versions lack it
    shared = [name for name in ours if name in real]
    assert set(ours) - set(real) <= newer
    assert {n: ours[n] for n in shared} == {n: real[n] for n in shared}
    positional = [name for name in real if name in ours]
    assert shared == positional, "in another order"
    left_out = [name for name in real if name not in ours]
    assert all(real[name] is not None for name in left_out), "without a default"

"""The stand-in takes what the installed FlashInfer takes, read from its source: no import."""

import ast
import importlib.util
import inspect
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import flashinfer_stand_in
import pytest
import torch

from pagedattn.backends.flashinfer.library import Version, flashinfer_version, load_flashinfer
from pagedattn.backends.flashinfer.planner import LAST_ARGUMENTS, Planner

MODULES = {
    "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
    "BatchDecodeWithPagedKVCacheWrapper": "decode.py",
}
METHODS = ("__init__", "plan", "_plan_impl", "run", "reset_workspace_buffer")
CASES = [(c, m) for c in MODULES for m in METHODS if hasattr(getattr(flashinfer_stand_in, c), m)]


def installed_source(name: str) -> str:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer-python is not installed: nothing to compare the stand-in with")
    return (Path(spec.origin).parent / name).read_text()


def installed_method(class_name: str, method: str) -> ast.FunctionDef:
    source = installed_source(MODULES[class_name])
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


def arguments_of_module_plan(function: ast.FunctionDef) -> list[str]:
    """Source texts of what FlashInfer's plan hands its fa2 module's plan, in order."""
    texts: list[str] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "args":
            texts = [ast.unparse(element) for element in node.value.elts]
        appends = isinstance(node, ast.Call) and ast.unparse(node.func) == "args.append"
        if appends:
            texts.append(ast.unparse(node.args[0]))
    return texts


def installed_version() -> Version:
    """Of an unpacked wheel without metadata too, where it can be imported."""
    if torch.cuda.is_available():
        return flashinfer_version(load_flashinfer())
    return flashinfer_version(SimpleNamespace(__version__=metadata.version("flashinfer-python")))


@pytest.mark.parametrize(
    ("class_name", "method", "decodes"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper", "plan", False),
        ("BatchDecodeWithPagedKVCacheWrapper", "_plan_impl", True),
    ],
)
def test_a_direct_plan_hands_over_what_flashinfers_plan_does(class_name, method, decodes):
    function = installed_method(class_name, method)
    version = installed_version()
    if version not in LAST_ARGUMENTS:
        pytest.skip(f"{version} is planned by FlashInfer's plan alone")
    theirs = arguments_of_module_plan(function)
    last = LAST_ARGUMENTS[version][0 if decodes else 1]
    ours = ast.parse(inspect.getsource(Planner._plan_directly).replace("\n    ", "\n").strip())
    call = next(
        node
        for node in ast.walk(ours)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_cached_module.plan")
    )
    assert len(theirs) == len(call.args) - 1 + 2 + len(last)
    names = [text.split(".")[-1] for text in theirs]
    for place, arg in enumerate(call.args[:-1]):
        text = ast.unparse(arg)
        if text.startswith(("wrapper.", "spec.num", "step.batch", "step.page")):
            assert text.split(".")[-1] == names[place]
    for text, value in zip(theirs[-len(last) :], last, strict=True):
        if text in ("0", "1", "True", "False"):  # else a variable, whose default is ours
            assert text == str(value)
    attributes = {ast.unparse(n) for n in ast.walk(ours) if isinstance(n, ast.Attribute)}
    used = {text for text in attributes if text.startswith("wrapper._")}
    if decodes:
        used.remove("wrapper._qo_indptr_last")  # the prefill wrapper's
    source = installed_source(MODULES[class_name])
    assert all(text.replace("wrapper.", "self.") in source for text in used)

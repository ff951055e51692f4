"""The Gluon kernels on a CPU, from their own source: what an interpreter of Gluon would do.

Triton interprets no Gluon. So the kernels' modules are executed here once more, with the language
of `gluon_language.py` behind the names that they import.
"""

from __future__ import annotations

import builtins
import random
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gluon_language import LOCAL, MODULES, Program
from gluon_values import Pointer, Value

from pagedattn.validation import halves_of


class Kernels:
    """The kernels' modules, executed with that language; faults can be planted in them.

    Args:
        fault: In every module, what is replaced and by what.
    """

    def __init__(self, fault: tuple[str, str] | None = None) -> None:
        self.fault = fault
        self.is_planted = False
        self.modules: dict[str, Any] = dict(MODULES)

    def __call__(self, name: str, globals: Any, locals: Any, names: Any, level: int = 0) -> Any:
        """What `import` does in those modules."""
        if not name.startswith(("triton", "pagedattn.kernels.")):
            return builtins.__import__(name, globals, locals, names, level)
        if name not in self.modules:
            path = Path(find_spec(name).origin)
            module = self.modules[name] = ModuleType(name)
            module.__dict__["__builtins__"] = vars(builtins) | {"__import__": self}
            exec(compile(self.source_of(path), path, "exec"), module.__dict__)
        return self.modules[name]

    def source_of(self, path: Path) -> str:
        source = path.read_text()
        if self.fault and self.fault[0] in source:
            source, self.is_planted = source.replace(*self.fault), True
        return source


def launch(kernel: Callable, grid: int, arguments: list, constants: dict, seed: int) -> None:
    """Run every program of a kernel, one after the other in an order drawn from the seed.

    Args:
        kernel: Of a module of `Kernels`.
        grid: Programs.
        arguments: `Pointer`, a matrix in the place of a descriptor, or a number.
        constants: The compile-time arguments.
        seed: Of all that is drawn.
    """
    choice = random.Random(seed)
    for index in choice.sample(range(grid), grid):
        LOCAL.program = Program(index, grid, choice)
        kernel(*arguments, **constants)


class Launches:
    """In the place of the backend's `Launch` of Gluon kernels, and of what it keeps of caches."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.caches: dict[int, torch.Tensor] = {}  # by address: descriptors keep no more
        self.counts: Counter[str] = Counter()

    def of_kernel(
        self, kernel: Any, _device: torch.device, constants: dict, _options: dict
    ) -> Callable[..., None]:
        name = kernel.fn.__name__
        kernel = getattr(self.kernels(kernel.fn.__module__, None, None, (name,)), name)
        assert self.kernels.is_planted or not self.kernels.fault, "there is no place for the fault"

        def launch_it(
            grid: int, pointers: Any, more: Any, *, descriptors: Any, stream: object = None
        ) -> None:
            self.counts[name] += 1
            given = [*descriptors.values, *pointers.tensors, *more.tensors]
            arguments = [self.argument(each) for each in given]
            launch(kernel, grid, arguments, constants, seed=self.counts[name])

        return launch_it

    def argument(self, given: Any) -> Any:
        if isinstance(given, int):
            dtype = torch.int64 if abs(given) >= 2**31 else torch.int32
            return Value(torch.tensor(given, dtype=dtype))
        if isinstance(given, float):
            return Value(torch.tensor(given))
        if isinstance(given, torch.Tensor):
            return Pointer.to_tensor(given)
        if hasattr(given, "base"):  # a descriptor
            return self.caches[given.base.data_ptr()].as_strided(given.shape, given.strides)
        return Pointer.to_tensor(self.caches[given.data_ptr()])


def use(monkeypatch: Any, num_sms: int, fault: tuple[str, str] | None = None) -> Counter[str]:
    """Let `TritonBackend` take a CPU for an H200 with few SMs, and its Gluon kernels run here.

    Returns:
        Of each kernel, how often it was launched since.
    """
    from pagedattn.backends.triton import hopper, hopper_maps
    from pagedattn.backends.triton.tiles import DeviceFacts

    facts = DeviceFacts(num_sms, compute_capability=(9, 0))
    launches = Launches(Kernels(fault))

    def noted(cache: Any) -> Any:
        halves = halves_of(cache)
        launches.caches |= {pages.data_ptr(): pages for pages in halves}
        return halves

    monkeypatch.setattr("pagedattn.backends.triton.backend._device_facts", lambda device: facts)
    monkeypatch.setattr(hopper_maps, "halves_of", noted)
    monkeypatch.setattr(hopper, "Launch", launches.of_kernel)
    return launches.counts

"""Launching a kernel again: what Triton compiled for the same kinds of arguments, called directly.

`kernel[grid](...)` binds its arguments, describes each of them and looks the description up before
every launch, which costs the host more than a short step takes on the GPU. Here the lookup is one
dictionary, and what it finds is called at once. What it does not find takes the ordinary way, so
Triton alone decides what to compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from pagedattn.backends.triton.descriptors import NO_DESCRIPTORS, Descriptors, expand
from pagedattn.device import NOTHING
from pagedattn.validation import KVCache, halves_of

POINTER_ALIGNMENT = 16
"""Bytes: Triton compiles one kernel for addresses that are multiples of it, and one for others."""

MAX_INT32 = 2**31 - 1
MAX_REMEMBERED = 4096  # kinds of arguments; far more than layouts of tensors that exist


class Pointers(NamedTuple):
    """Tensor arguments, described once for any number of launches."""

    tensors: tuple[Any, ...]
    addresses: tuple[Any, ...]
    kind: str  # what a kernel is compiled for, and more: dtypes and alignment

    @classmethod
    def of(cls, *tensors: Tensor) -> Pointers:
        """Describe tensors, whose memory must not move while this is in use."""
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        alignments = [address % POINTER_ALIGNMENT for address in addresses]
        # a text: its hash is computed once
        return cls(tensors, addresses, f"{[tensor.dtype for tensor in tensors]}{alignments}")

    def before(self, *numbers: int | float) -> Pointers:
        """These, and numbers that stay as long; all of them are what a kernel is compiled for.

        Their values, not what Triton makes of them (1, multiples of 16, 32 bits or 64): so this
        holds for every version. A text tells 1, 1.0 and True from one another.
        """
        kind = f"{self.kind}{numbers}"
        return Pointers((*self.tensors, *numbers), (*self.addresses, *numbers), kind)


class LayerPointers(NamedTuple):
    """What one run gives to its launches: `Pointers` to q, keys, values, out and lse.

    K and V in one tensor are told apart by their addresses: views cost more than all else here. One
    launch is given the same five dtypes always, so its kind is of alignments alone.
    """

    q: Tensor
    kv_cache: KVCache
    out: Tensor
    lse: Tensor
    page_strides: tuple[int, ...]  # pages and tokens of K, pages and tokens of V
    addresses: tuple[int, ...]
    kind: str

    @classmethod
    def of(cls, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor) -> LayerPointers:
        """Describe the tensors of one run."""
        if isinstance(kv_cache, Tensor):
            page_stride, half_stride, token_stride = kv_cache.stride()[:3]
            k_at = kv_cache.data_ptr()  # 0 where there are no pages, then of values too
            v_at = k_at + half_stride * kv_cache.itemsize if k_at else 0
            strides: tuple[int, ...] = page_stride, token_stride, page_stride, token_stride
        else:
            k_pages, v_pages = kv_cache
            k_at, v_at = k_pages.data_ptr(), v_pages.data_ptr()
            strides = *k_pages.stride()[:2], *v_pages.stride()[:2]
        addresses = q_at, _, _, out_at, lse_at = (
            q.data_ptr(), k_at, v_at, out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        kind = ""
        if (q_at | k_at | v_at | out_at | lse_at) % POINTER_ALIGNMENT:
            kind = repr([address % POINTER_ALIGNMENT for address in addresses])
        return cls(q, kv_cache, out, lse, strides, addresses, kind)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What an ordinary launch is given."""
        return self.q, *halves_of(self.kv_cache), self.out, self.lse


class _Remembered(NamedTuple):
    """What a launch calls, and what stays of its arguments."""

    run: Any
    function: Any
    packed_metadata: Any
    descriptors: tuple[Any, ...]  # as `run` takes them


class Launch:
    """One kernel with its compile-time arguments, launched on one device's current stream.

    The kernel's parameters are in this order: descriptors, pointers, numbers, compile-time
    arguments. Pointers have names in capitals.

    Args:
        kernel: What `triton.jit` returned. In the interpreter, which has no compiled kernels, every
            launch is an ordinary one; so it is on a CPU.
        device: Must be the current one at every launch.
        constants: The compile-time arguments, by name.
        options: Of the compiler and the launch: `num_warps` and the like.

    Knobs of Triton that change what is compiled must be set before the first launch. Its launch
    hooks are honoured: with one set, every launch is an ordinary one.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        constants: Mapping[str, int | bool],
        options: Mapping[str, int],
    ) -> None:
        self._kernel = kernel
        self._options = {**constants, **options}
        names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        self._constants = tuple(constants[name] for name in names)
        self._remembered: dict[tuple[object, ...], _Remembered] = {}
        self._is_for_any_numbers = _is_for_any_numbers(kernel)
        self.remembers = isinstance(kernel, JITFunction) and device.type == "cuda"
        if self.remembers:
            self._device_index = device.index
            self._current_stream = triton.runtime.driver.active.get_current_stream

    def __call__(
        self,
        grid: int,
        pointers: Pointers | LayerPointers,
        more: Pointers,
        *numbers: int | float,
        descriptors: Descriptors = NO_DESCRIPTORS,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Launch `grid` programs.

        Args:
            grid: Programs, at least 1.
            pointers: The kernel's first arguments after its descriptors.
            more: The arguments after those, which usually stay for many launches.
            numbers: The arguments after all those, which do not.
            descriptors: The kernel's first arguments, where it has descriptors.
            stream: Where to launch; `None`: on the current stream.
        """
        if not self.remembers or self._is_watched():
            self._launch_ordinarily(grid, pointers, more, numbers, descriptors, stream)
            return
        if not numbers or (self._is_for_any_numbers and max(numbers) <= MAX_INT32):
            key: tuple[object, ...] = (pointers.kind, more.kind, descriptors)
        else:  # values and types, as in `Pointers.before`
            key = (pointers.kind, more.kind, descriptors, numbers, *map(type, numbers))
        remembered = self._remembered.get(key)
        if remembered is None:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            compiled = self._launch_ordinarily(grid, pointers, more, numbers, descriptors, stream)
            others = (*pointers.addresses, *more.addresses, *numbers, *self._constants)
            run, expanded = expand(compiled.run, descriptors.values, others)
            self._remembered[key] = _Remembered(
                run, compiled.function, compiled.packed_metadata, expanded
            )
            return
        run, function, packed_metadata, expanded = remembered
        run(
            grid, 1, 1, stream.cuda_stream if stream else self._current_stream(self._device_index),
            function, packed_metadata, None, None, None,  # no hooks
            *expanded, *pointers.addresses, *more.addresses, *numbers, *self._constants,
        )  # fmt: skip

    def _launch_ordinarily(
        self,
        grid: int,
        pointers: Pointers | LayerPointers,
        more: Pointers,
        numbers: tuple[int | float, ...],
        descriptors: Descriptors,
        stream: torch.cuda.Stream | None,
    ) -> Any:
        with NOTHING if stream is None else torch.cuda.stream(stream):
            return self._kernel[(grid,)](
                *descriptors.values, *pointers.tensors, *more.tensors, *numbers, **self._options
            )

    def _is_watched(self) -> bool:
        knobs = triton.knobs.runtime
        return bool(
            _calls(knobs.launch_enter_hook)
            or _calls(knobs.launch_exit_hook)
            or self._kernel.pre_run_hooks
        )


def _is_for_any_numbers(kernel: Any) -> bool:
    """Whether nothing is compiled for the value of a number, as long as it fits 32 bits."""
    if not isinstance(kernel, JITFunction):
        return False
    numbers = [p for p in kernel.params if not p.is_constexpr and p.name.islower()]
    return all(p.do_not_specialize and not p.annotation for p in numbers)


def _calls(hook: Any) -> Any:
    """What a hook would call: a chain of hooks is always there, and usually empty."""
    return getattr(hook, "calls", hook)

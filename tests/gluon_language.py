"""Gluon's language on a CPU: tensors are torch's, see `gluon_values.py`, partitions are threads.

One partition runs at a time; at every barrier they are switched, in an order drawn from a seed.
What is asynchronous happens early or late, as the seed has it: so what is read before it was
awaited, or given back before it was read, is wrong or NaN. Partitions that wait for what never
comes raise `Deadlock`; reads and writes outside a tensor raise `IndexError`.

Layouts, fences and registers are not modelled: of these `test_compile.py` knows more.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from gluon_values import (
    Pointer,
    Shared,
    Value,
    atomic_add,
    combined,
    filled,
    load,
    reduced,
    store,
    where,
)


class Deadlock(Exception):
    """Every partition waits."""


class NotAwaited(Exception):
    """What is still being computed is read."""


class Barrier:
    """An mbarrier: a phase ends when all arrived and all announced bytes are there."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += num_bytes
        assert self.pending >= 0, "more arrivals than expected"
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1


class Program:
    """One program of a grid: its partitions, their barriers, and copies under way."""

    def __init__(self, index: int, grid: int, choice: random.Random) -> None:
        self.index = index
        self.grid = grid
        self.choice = choice
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[Callable[[], None]] = []
        self.turn = threading.Condition()
        self.waiting: dict[int, Callable[[], bool] | None] = {}  # of the partitions that live
        self.error: BaseException | None = None

    def specialize(self, partitions: list, _warps: list, _registers: list) -> None:
        threads = [
            threading.Thread(target=self.partition, args=(number, *each))
            for number, each in enumerate(partitions)
        ]
        self.waiting = dict.fromkeys(range(len(threads)))
        self.running = 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        assert not self.copies, "the program ends before its copies do"

    def partition(self, number: int, function: Callable, arguments: tuple) -> None:
        LOCAL.program, LOCAL.number, LOCAL.products, LOCAL.groups = self, number, [], [[]]
        try:
            self.wait_for_turn(number)
            function(*arguments)
        except BaseException as error:
            self.error = self.error or error
        with self.turn:
            del self.waiting[number]
            self.hand_on()

    def wait_for_turn(self, number: int) -> None:
        with self.turn:
            while self.running != number and not self.error:
                self.turn.wait()
        if self.error:
            raise Deadlock("another partition failed")

    def hand_on(self) -> None:
        """Choose who runs next; copies land between, or when all wait for them."""
        while self.waiting:
            if self.copies and self.choice.random() < 0.3:
                self.land()
            able = [n for n, ready in self.waiting.items() if ready is None or ready()]
            if able:
                self.running = self.choice.choice(able)
                break
            if self.copies:
                self.land()
                continue
            self.error = self.error or Deadlock("every partition waits")
            break
        self.turn.notify_all()

    def land(self) -> None:
        self.copies.pop(self.choice.randrange(len(self.copies)))()

    def switch(self, ready: Callable[[], bool] | None = None) -> None:
        """Let another partition run, and this one again once it is ready."""
        number = LOCAL.number
        with self.turn:
            self.waiting[number] = ready
            self.hand_on()
        self.wait_for_turn(number)
        self.waiting[number] = None


LOCAL = threading.local()


def barrier_of(cell: Shared) -> Barrier:
    return LOCAL.program.barriers[cell.data.data_ptr()]


def init(cell: Shared, count: int) -> None:
    LOCAL.program.barriers[cell.data.data_ptr()] = Barrier(count)


def wait(cell: Shared, phase: Any) -> None:
    barrier, phase = barrier_of(cell), int(phase)
    LOCAL.program.switch(lambda: barrier.phase != phase)


def arrive(cell: Shared, count: int = 1) -> None:
    barrier_of(cell).change(arrivals=count)
    LOCAL.program.switch()


def expect(cell: Shared, num_bytes: Any) -> None:
    barrier_of(cell).change(arrivals=1, num_bytes=int(num_bytes))


def copy_box(pages: Any, place: list, cell: Shared, buffer: Shared) -> None:
    """`pages`: a matrix. The copy engine copies whole boxes, and zeros from outside."""
    barrier = barrier_of(cell)
    row, column = [int(each) for each in place]
    rows, columns = buffer.shape

    def land() -> None:
        inside = pages[row : row + rows, column : column + columns]
        buffer.data.zero_()
        buffer.data[: inside.shape[0], : inside.shape[1]] = inside
        barrier.change(num_bytes=-buffer.data.numel() * buffer.data.itemsize)

    LOCAL.program.copies.append(land)


def copy_rows(buffer: Shared, pointer: Pointer, mask: Any = None) -> None:
    LOCAL.groups[-1].append(lambda: buffer.store(load(pointer, mask)))


def wait_group(later: int) -> None:
    while len(LOCAL.groups) > later + 1:
        for copy in LOCAL.groups.pop(0):
            copy()


class Product(Value):
    """A product that is made when it is begun or when it is awaited, and not read before."""

    def __init__(self, a: Any, b: Shared, acc: Value, use_acc: bool) -> None:
        self.operands = a, b, acc, use_acc
        self.made = self.multiply() if LOCAL.program.choice.random() < 0.5 else None
        self.awaited = False

    @property
    def data(self) -> torch.Tensor:
        if not self.awaited:
            raise NotAwaited("a product is read")
        return self.made

    def multiply(self) -> torch.Tensor:
        a, b, acc, use_acc = self.operands
        product = a.data.float() @ b.data.float()
        return product + acc.data if use_acc else product

    def wait(self) -> None:
        self.made = self.multiply() if self.made is None else self.made
        self.awaited = True


def warpgroup_mma(
    a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False
) -> Product:
    assert is_async, "the kernels await their products"
    LOCAL.products.append(Product(a, b, acc, use_acc))
    return LOCAL.products[-1]


def warpgroup_mma_wait(later: int, deps: list) -> Any:
    while len(LOCAL.products) > later:
        LOCAL.products.pop(0).wait()
    return tuple(deps) if len(deps) > 1 else deps[0]


def jit(function: Callable | None = None, **_options: object) -> Callable:
    return function if function else lambda each: each


_LAYOUT = SimpleNamespace(get_default_for=lambda *_: None)
_LANGUAGE = SimpleNamespace(
    constexpr=lambda value: value, static_range=range, load=load, store=store,
    atomic_add=atomic_add, where=where, allocate_shared_memory=Shared.allocate,
    maximum=combined(torch.maximum), minimum=combined(torch.minimum),
    max=reduced(torch.amax), sum=reduced(torch.sum),
    exp2=lambda x: Value(torch.exp2(x.data)), log2=lambda x: Value(torch.log2(x.data)),
    full=filled, zeros=lambda shape, dtype, layout=None: filled(shape, 0, dtype),
    zeros_like=lambda x: Value(torch.zeros_like(x.data)),
    arange=lambda begin, end, layout=None: Value(torch.arange(begin, end, dtype=torch.int32)),
    convert_layout=lambda x, layout: x,
    program_id=lambda axis: Value(torch.tensor(LOCAL.program.index, dtype=torch.int32)),
    num_programs=lambda axis: Value(torch.tensor(LOCAL.program.grid, dtype=torch.int32)),
    warp_specialize=lambda *arguments: LOCAL.program.specialize(*arguments),
    int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
    NVMMASharedLayout=_LAYOUT,
    **dict.fromkeys(
        ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DotOperandLayout",
         "NVMMADistributedLayout"),
        lambda *_, **__: None,
    ),
)  # fmt: skip
_MBARRIER = SimpleNamespace(
    init=init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: None
)
MODULES = {
    "triton": SimpleNamespace(jit=jit, language=_LANGUAGE),
    "triton.language": SimpleNamespace(jit=jit, language=_LANGUAGE),  # `import a.b` gives a
    "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=jit)),
    "triton.experimental.gluon": SimpleNamespace(language=_LANGUAGE),
    "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(
        fence_async_shared=lambda: None, mbarrier=_MBARRIER, warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    ),
    "pagedattn.kernels.gluon_names": SimpleNamespace(
        copy_box=copy_box, copy_rows=copy_rows, sync_threads=lambda: None,
        async_copy=SimpleNamespace(
            commit_group=lambda: LOCAL.groups.append([]), wait_group=wait_group
        ),
    ),
}  # fmt: skip

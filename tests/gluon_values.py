"""What a Gluon kernel computes with, on a CPU: values in registers, pointers, shared memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Value:
    """A tensor or a number in registers."""

    type = SimpleNamespace(layout=None)

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.data.to(dtype))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def wrapped(value: Any) -> torch.Tensor:
    if isinstance(value, Value):
        return value.data
    if isinstance(value, bool):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32)


def alike(*values: Any) -> list[torch.Tensor]:
    """Operands of one type: a number takes that of a tensor, and 64 bits win over 32."""
    tensors = [wrapped(value) for value in values]
    given = [each for each, value in zip(tensors, values, strict=True) if isinstance(value, Value)]
    dtype = given[0].dtype if given else tensors[0].dtype
    for each in given:
        dtype = torch.promote_types(dtype, each.dtype)
    if not dtype.is_floating_point and any(each.dtype.is_floating_point for each in tensors):
        dtype = torch.float32
    return [each.to(dtype) for each in tensors]


def _operator(function: Callable, reverse: bool = False) -> Callable:
    def apply(left: Value, right: Any) -> Any:
        if isinstance(right, Pointer):
            return right + left
        a, b = alike(*((right, left) if reverse else (left, right)))
        return Value(function(a, b))

    return apply


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    # as in C: towards zero
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.fmod,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
for _name, _function in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _operator(_function))
    setattr(Value, f"__r{_name}__", _operator(_function, reverse=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(getattr(operator, _name)))


class Pointer:
    """Addresses of elements of one tensor's memory."""

    def __init__(self, memory: torch.Tensor, offset: torch.Tensor) -> None:
        self.memory = memory
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        return cls(tensor.as_strided((size,), (1,), 0), torch.tensor(tensor.storage_offset()))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + wrapped(more).long())

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets, and which of them are meant; all of those are inside the memory."""
        live = wrapped(True if mask is None else mask)
        offset, live = torch.broadcast_tensors(self.offset, live)
        outside = live & ((offset < 0) | (offset >= len(self.memory)))
        if outside.any():
            raise IndexError(f"element {offset[outside][0]} of {len(self.memory)}")
        return offset, live


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Value:
    offset, live = pointer.places(mask)
    values = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    values[live] = pointer.memory[offset[live]]
    return Value(values)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, live = pointer.places(mask)
    values = wrapped(value).to(pointer.memory.dtype).expand(offset.shape)
    pointer.memory[offset[live]] = values[live]


def atomic_add(pointer: Pointer, value: Any, sem: str = "acq_rel") -> Value:
    before = load(pointer)
    store(pointer, before + value)
    return before


class Shared:
    """A part of shared memory; what was never written is NaN or a number that stands out."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.dtype = data.dtype
        self.shape = data.shape

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: list[int], _layout: object) -> Shared:
        return cls(torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype))

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: Any, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, _layout: object) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)


def reduced(function: Callable) -> Callable:
    return lambda x, axis: Value(function(x.data, axis))


def combined(function: Callable) -> Callable:
    return lambda a, b: Value(function(*alike(a, b)))


def where(condition: Any, a: Any, b: Any) -> Value:
    return Value(torch.where(wrapped(condition), *alike(a, b)))


def filled(shape: list[int], value: Any, dtype: torch.dtype, _layout: object = None) -> Value:
    return Value(torch.full(shape, wrapped(value).item(), dtype=dtype))

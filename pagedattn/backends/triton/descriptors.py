"""Tensor descriptors, encoded once: Triton's launcher encodes each again at every launch.

It does so in a wrapper around the function that launches, which walks over all arguments and puts
a map for the copy engine and some numbers in a descriptor's place. For one descriptor these are
always the same. So the wrapper is asked for them once, and then left out.

Where the wrapper is, no interface of Triton says. So nothing of what it does is written down here:
it is watched, and unless it hands on all other arguments as they are, it is not left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Tensor descriptors that stay for many launches; another object is another key."""

    values: tuple[Any, ...]


NO_DESCRIPTORS = Descriptors(())


class Expanded(NamedTuple):
    """A launcher, and what it is given in the place of a kernel's descriptors."""

    run: Any
    arguments: tuple[Any, ...]


def expand(run: Any, descriptors: tuple[Any, ...], others: Sequence[object]) -> Expanded:
    """Have a kernel's descriptors encoded.

    Args:
        run: Triton's launcher of the compiled kernel.
        descriptors: The kernel's first arguments.
        others: All its other arguments.

    Returns:
        A launcher without the wrapper, and the encoded descriptors. Both as they were given, where
        there are no descriptors or Triton's launcher is not as expected here.
    """
    as_given = Expanded(run, descriptors)
    wrapper = getattr(run, "launch", None)
    if not descriptors or not isinstance(wrapper, FunctionType):
        return as_given
    if "launcher" not in wrapper.__code__.co_freevars:
        return as_given
    wrapped = _handed_on(run, lambda launcher: _around(wrapper, launcher), [*descriptors, *others])
    plain = _handed_on(run, lambda launcher: launcher, others)
    begin, end = len(plain) - len(others), len(wrapped) - len(others)
    arguments = tuple(wrapped[begin:end])
    is_expected = wrapped[:begin] + wrapped[end:] == plain and plain[begin:] == [*others]
    if not is_expected or not arguments or any(given in descriptors for given in arguments):
        return as_given
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    return Expanded(_with_launch(run, cells["launcher"].cell_contents), arguments)


def _handed_on(
    run: Any,
    launch_by: Callable[[Callable[..., None]], Callable[..., None]],
    arguments: Sequence[object],
) -> list[object]:
    """What the function behind a launcher is called with, the last arguments in one or not."""
    handed_on: list[object] = []

    def record(*given: Any) -> None:
        *front, last = given
        handed_on.extend([*front, *last] if isinstance(last, (list, tuple)) else given)

    # one program on stream 0 of no function: nothing is launched
    _with_launch(run, launch_by(record))(1, 1, 1, 0, 0, None, None, None, None, *arguments)
    return handed_on


def _with_launch(run: Any, launch: Callable[..., None]) -> Any:
    """A launcher like this one that calls another function."""
    run = copy(run)
    run.launch = launch
    return run


def _around(wrapper: FunctionType, launcher: Callable[..., None]) -> Callable[..., None]:
    """The same wrapper around another function."""
    names, cells = wrapper.__code__.co_freevars, wrapper.__closure__ or ()
    closure = [
        CellType(launcher) if name == "launcher" else cell
        for name, cell in zip(names, cells, strict=True)
    ]
    return FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__,
        tuple(closure),
    )  # fmt: skip

"""Float workspaces that grow when a plan runs short, until they are sealed.

FlashInfer's planners reserve room for partial results in a workspace of the caller's. How much they
need grows with heads, head_dim, batch and processor count, so a fixed size fails under load. A
`Workspace` grows instead, under the wrappers that already use it: its tensor stays the same object.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.overflow import Overflow, read_overflow

SIZE_VARIABLES = ("PAGEDATTN_WORKSPACE_BUFFER_MB", "MSTAR_WORKSPACE_BUFFER_MB")
"""Environment variables that set the size of a workspace, the first one that is set."""

DEFAULT_MB = 512
_MB = 1024 * 1024

Result = TypeVar("Result")


class WorkspaceTooSmall(RuntimeError):
    """A plan needs more room than its workspace has and may get."""


def workspace_bytes(declared_mb: float | None = None) -> int:
    """Bytes of one float workspace.

    Args:
        declared_mb: Megabytes; `None`: the environment's `PAGEDATTN_WORKSPACE_BUFFER_MB`, else its
            `MSTAR_WORKSPACE_BUFFER_MB`, else 512.

    Raises:
        ValueError: The size is no positive number; the message names where it came from.
    """
    source, value = "declared_mb", declared_mb if declared_mb is None else str(declared_mb)
    if value is None:
        source, value = next(
            ((name, os.environ[name]) for name in SIZE_VARIABLES if name in os.environ),
            ("default", str(DEFAULT_MB)),
        )
    try:
        num_bytes = int(float(value) * _MB)
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes < 1:
        raise ValueError(f"{source} must be a positive number of megabytes, got {value!r}")
    return num_bytes


def check_workspace(tensor: object, name: str) -> None:
    """Require memory in one piece: planners take its length for its size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor or a Workspace, got {type(tensor).__name__}")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with shape [bytes], got {list(tensor.shape)} with stride "
            f"{tensor.stride()}"
        )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two workspaces have memory in common: kernels on both must not run at once."""
    (begin, end), (other_begin, other_end) = (
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b)
    )
    return a is b or (begin < other_end and other_begin < end)  # an empty one may grow


class Workspace:
    """A float workspace that several wrappers may share, one kernel after the other in one stream.

    Args:
        tensor: uint8[bytes], contiguous. Growth gives this very object new memory, so that whoever
            holds it moves too.
        name: Whose workspace this is, for messages.
        sealed: See `seal`.
        floor: The setting that would have made room, for messages.

    Raises:
        ValueError: `tensor` is not one-dimensional and contiguous.

    Example:
        >>> workspace = Workspace(torch.empty(64, dtype=torch.uint8), "decode")
        >>> workspace.plan(lambda x: x + 1, 2)
        3
    """

    def __init__(
        self,
        tensor: Tensor,
        name: str,
        sealed: bool = False,
        floor: str = SIZE_VARIABLES[0],
    ) -> None:
        check_workspace(tensor, f"workspace {name!r}")
        self.tensor = tensor
        self.name = name
        self.sealed = sealed
        self.floor = floor
        # Captured graphs and queued kernels may point into memory that growth has replaced, and
        # nothing tells when the last of them is gone: it is kept as long as this object.
        self._outgrown: list[torch.UntypedStorage] = []

    @property
    def num_bytes(self) -> int:
        """Size of the current memory."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def num_outgrown_bytes(self) -> int:
        """Size of the memory that growth has replaced and that is still kept."""
        return sum(storage.nbytes() for storage in self._outgrown)

    def seal(self) -> None:
        """Never grow again: from now on a plan that does not fit raises `WorkspaceTooSmall`."""
        self.sealed = True

    def plan(self, plan: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call `plan(*args, **kwargs)`, growing the workspace until what it reserves fits.

        Raises:
            WorkspaceTooSmall: It does not fit, and the workspace is sealed, or a stream capture is
                under way (new memory would belong to the graph's pool), or FlashInfer's integer
                workspace ran short, which is not this one.
        """
        while True:
            try:
                return plan(*args, **kwargs)
            except RuntimeError as error:
                overflow = read_overflow(error)
                if overflow is None:
                    raise
                self._check_may_grow(overflow, error)
                self._grow(self._needed(overflow))

    def _needed(self, overflow: Overflow) -> int:
        """Bytes taken so far, up to where the piece that failed may begin, and that piece."""
        taken = self.num_bytes - overflow.left
        return -(-taken // overflow.alignment) * overflow.alignment + overflow.size

    def _check_may_grow(self, overflow: Overflow, error: RuntimeError) -> None:
        if overflow.is_integer:
            raise WorkspaceTooSmall(
                f"FlashInfer's integer workspace of {self.name!r} is too small for "
                f"{overflow.piece}: it asked for {overflow.size} bytes, {overflow.left} are left. "
                "Give the wrapper a larger one with reset_workspace_buffer; the float workspace "
                f"and {self.floor} have no part in it"
            ) from error
        capturing = self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if not self.sealed and not capturing:
            return
        needed_mb = -(-self._needed(overflow) // _MB)
        why = "sealed" if self.sealed else "under a stream capture, during which nothing may move"
        raise WorkspaceTooSmall(
            f"workspace {self.name!r} has {self.num_bytes} bytes and is {why}, but a plan asked "
            f"for {overflow.size} bytes for {overflow.piece} with {overflow.left} left: set "
            f"{self.floor}={needed_mb} or more, or plan the largest step before"
        ) from error

    def _grow(self, num_bytes: int) -> None:
        self._outgrown.append(self.tensor.untyped_storage())
        num_elements = -(-num_bytes // self.tensor.element_size())
        fresh = torch.zeros(num_elements, dtype=self.tensor.dtype, device=self.tensor.device)
        self.tensor.set_(fresh.untyped_storage(), 0, (num_elements,), (1,))

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "growing"
        return f"Workspace({self.name!r}, {self.num_bytes} bytes, {state}, floor={self.floor!r})"


class WorkspacePool:
    """One persistent workspace a key.

    Args:
        device: Where they are.
        size_mb: Megabytes of each at first; `None`: see `workspace_bytes`.
        owner: Whose they are, for messages.
    """

    def __init__(
        self, device: torch.device | str, size_mb: float | None = None, owner: str = "attention"
    ) -> None:
        self.device = torch.device(device)
        self.owner = owner
        self._num_bytes = workspace_bytes(size_mb)
        self._sealed = False
        self._workspaces: dict[tuple[str, int | None], Workspace] = {}

    def get(self, label: str, cg_slot: int | None = None) -> Workspace:
        """Return the workspace of this key, made on first use.

        Args:
            label: What it is used for.
            cg_slot: Which captured graph it belongs to; `None`: eager steps.
        """
        key = (label, cg_slot)
        if key not in self._workspaces:
            slot = "" if cg_slot is None else f", graph {cg_slot}"
            tensor = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self.device)
            self._workspaces[key] = Workspace(
                tensor, f"{self.owner}: {label}{slot}", sealed=self._sealed
            )
        return self._workspaces[key]

    def seal(self) -> None:
        """Seal the workspaces that are here, and those made later."""
        self._sealed = True
        for workspace in self._workspaces.values():
            workspace.seal()

    @property
    def num_bytes(self) -> int:
        """Memory of all workspaces, outgrown memory included."""
        return sum(w.num_bytes + w.num_outgrown_bytes for w in self._workspaces.values())

"""A mixed step's two kernels on one GPU at one time: short queries read memory, long ones compute.

They do not share an SM: a program of the Gluon kernel takes all registers of one. So long queries
begin on some of the SMs, and the short kernel has the others, and those that become free. What is
then left of the long units goes to the SMs that it leaves: both launches of the Gluon kernel take
units from one counter, so nobody must know beforehand which kind of work ends first.

Where the Gluon kernel has both kinds of queries this is not needed: see `kernels/hopper.py`.

Raced on an NVIDIA H200, bf16, 32/8 heads of 128 (µs, commit 3396fd5; one kernel after the other,
and with 44, 60 and 76 of the 132 SMs for long queries first): 64 x 4k decode + 2 x 2k prompts 411,
399, 352, 394; 32 x 8k + 1 x 8k 1176, 1165, 1175, 1169; 256 x 2k + 1 x 512 528, 523, 517, 516;
128 x 8k + 4 x 1k at 8k of context 1921, 1836, 1844, 2133.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class LaunchLong(Protocol):
    """Launches the kernel for long queries."""

    def __call__(self, grid: int, stream: torch.cuda.Stream | None = None) -> object:
        """Launch `grid` programs on a stream; `None`: on the current one."""


class SideBySide:
    """The second stream of one object, and how its kernels share the SMs.

    Args:
        device: Where it runs. On a CPU, where kernels for a GPU are only compiled, there are no
            streams, and the launches follow one another.
        first: Programs of the kernel for long queries that begin at once, one an SM.
        rest: Those that follow the short kernel.
    """

    def __init__(self, device: torch.device, first: int, rest: int) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # the more urgent stream: else short programs may take all SMs first
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            # Two, for every run: to record one again changes nothing for those who wait already.
            self._begun = torch.Event(device, enable_timing=False)
            self._ended = torch.Event(device, enable_timing=False)
        self._first, self._rest = first, rest

    def run(self, launch_short: Callable[[], None], launch_long: LaunchLong) -> None:
        """Launch both kernels behind the current stream's work; what comes next waits for both.

        Args:
            launch_short: Launches the one, on the current stream.
            launch_long: Launches so many programs of the other.
        """
        if self._stream is None:
            launch_short()
            launch_long(self._first + self._rest)
            return
        self._begun.record()  # on the current stream, as what names no stream here
        self._begun.wait(self._stream)
        launch_long(self._first, self._stream)
        launch_short()
        launch_long(self._rest)
        self._ended.record(self._stream)
        self._ended.wait()

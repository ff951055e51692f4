"""Which pairs of case and peer are measured, in which order, and when to stop."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import results_file
from benchmarks.cases import Case
from benchmarks.peer import Peer
from benchmarks.results_file import Machine, Result, Setting, result_of
from benchmarks.session import SEED, DeviceLost
from benchmarks.work import Work

Measure = Callable[[Case, Peer], Result]
ROOT = Path(__file__).parent.parent


def pairs_of(cases: list[Case], peers: list[Peer]) -> list[tuple[Case, Peer]]:
    """Everything to measure: a case with all its peers before the next case."""
    return [(case, peer) for case in cases for peer in peers if peer.takes(case)]


@dataclass
class Progress:
    """How far a run came."""

    num_done: int = 0
    stopped_by: str = ""


def run(
    pairs: list[tuple[Case, Peer]], measure: Measure, deadline: float, progress: Progress
) -> Iterator[Result]:
    """Measure pairs in order; none begins after the deadline.

    Args:
        pairs: What to measure.
        measure: How.
        deadline: By `time.monotonic`.
        progress: Is kept up to date.
    """
    for case, peer in pairs:
        if time.monotonic() >= deadline:
            progress.stopped_by = "the budget"
            return
        progress.num_done += 1
        try:
            yield measure(case, peer)
        except DeviceLost as lost:
            progress.stopped_by = "the loss of the GPU"
            yield lost.row
            return


@dataclass(frozen=True)
class Apart:
    """Measures each pair in a process of its own, with a time limit.

    Args:
        device: Where.
        seconds: For the repetitions of one measurement.
        limit: Seconds that a process may take, its imports included.
    """

    device: torch.device
    seconds: float
    limit: float

    def measure(self, case: Case, peer: Peer) -> Result:
        """Measure one pair; a process that dies or hangs becomes a row with a failure."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "row.csv"
            arguments = {
                "--case": case.name,
                "--backends": peer.name,
                "--device": str(self.device),
                "--seconds": str(self.seconds),
                "--csv": str(path),
            }
            command = [sys.executable, "-m", "benchmarks"]
            command += [word for pair in arguments.items() for word in pair]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=self.limit, cwd=ROOT
                )
                problem = f"exit code {done.returncode}: {_last_line(done.stderr)}"
            except subprocess.TimeoutExpired:
                problem = f"no answer in {self.limit:g} s"
            rows = results_file.read(path) if path.exists() else []
        return rows[0] if rows else self._failed(case, peer, problem)

    def _failed(self, case: Case, peer: Peer, problem: str) -> Result:
        setting = Setting(Machine.here(self.device), SEED, self.device.type == "cuda")
        work = Work.of(case)
        row = result_of(case, peer, setting, work.num_bytes, work.flops)
        return replace(row, failure=problem[:400])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"

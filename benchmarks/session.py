"""One measurement after another in this process: build, check once, then time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs, Memory
from benchmarks.oracle import Expected, expect, judge
from benchmarks.peer import Call, Peer
from benchmarks.results_file import Machine, Result, Setting, result_of
from benchmarks.timing import Clock, Times
from benchmarks.work import Work, ceilings_of
from pagedattn.checking.bound import FLASHINFER, FLOAT32_SUMS

SEED = 0


class DeviceLost(RuntimeError):
    """The GPU does not answer any more: nothing can be measured in this process."""

    def __init__(self, row: Result) -> None:
        super().__init__(row.failure)
        self.row = row


@dataclass(frozen=True, eq=False)
class FirstCall:
    """What the first plan and run of a pair cost, and what came out."""

    call: Call
    rows: Tensor  # dtype[tokens, num_qo_heads, head_dim]
    seconds: float
    held_bytes: int | None
    peak_bytes: int | None


class Session:
    """Memory, inputs and answers that last from one measurement to the next.

    Args:
        cases: What it must have memory for.
        device: Where to measure.
        seconds: For the repetitions of one measurement.
    """

    def __init__(self, cases: Iterable[Case], device: torch.device, seconds: float) -> None:
        self.device = device
        self.setting = Setting(Machine.here(device), SEED, device.type == "cuda")
        self.ceilings = ceilings_of(self.setting.machine.gpu)
        self._memory = Memory(cases, device, SEED)
        self._clock = Clock(device, seconds)
        self._current: tuple[Case, Inputs, Expected] | None = None

    def measure(self, case: Case, peer: Peer) -> Result:
        """Measure one pair; what it raises becomes part of the row.

        Raises:
            DeviceLost: It broke the GPU; the exception has the row.
        """
        work = Work.of(case)
        row = result_of(case, peer, self.setting, work.num_bytes, work.flops)
        try:
            row = self._measure(row, case, peer, work)
        except Exception as error:  # whatever a library raises, the other pairs go on
            row = replace(row, failure=f"{type(error).__name__}: {error}"[:400])
        gc.collect()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                lost = f"{row.failure}; the GPU is lost: {error}"[:400]
                raise DeviceLost(replace(row, failure=lost)) from error
        return row

    def _measure(self, row: Result, case: Case, peer: Peer, work: Work) -> Result:
        if not self._memory.fits(case):
            raise MemoryError(f"{case.cache_bytes / 1e9:.1f} GB of keys and values do not fit")
        inputs, expected = self._prepared(case)
        first = self._first_call(peer, inputs)
        verdict = judge(first.rows, expected, peer.arithmetic)
        row = replace(
            row,
            refcheck=True,
            error=verdict.error,
            allowed_error=verdict.allowed,
            verdict=verdict.word,
            first_call_s=first.seconds,
            workspace_bytes=first.held_bytes,
            peak_bytes=first.peak_bytes,
        )
        return self._timed(row, first.call, work)

    def _first_call(self, peer: Peer, inputs: Inputs) -> FirstCall:
        inputs.out.fill_(torch.nan)  # an element that is never written shows
        before = self._allocated(reset=True)
        begin = time.perf_counter()
        call = peer.build(inputs)
        call.plan()
        result = call.run()
        self._clock.wait()
        seconds = time.perf_counter() - begin
        if self.device.type != "cuda":
            return FirstCall(call, call.rows(result), seconds, None, None)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        rows = call.rows(result).clone()  # a graph's first run may reuse what `run` returned
        copied = rows.untyped_storage().nbytes()
        del result
        held = self._allocated() - before - copied - call.outgrown_bytes()
        return FirstCall(call, rows, seconds, held, peak)

    def _timed(self, row: Result, call: Call, work: Work) -> Result:
        """Add the times, or why there are none, to a row that has been judged."""
        row = replace(row, no_cuda_graph=row.no_cuda_graph or not call.capturable)
        try:
            times = self._clock.times(call.plan, call.run, capturable=call.capturable)
        except Exception as error:  # the verdict stands all the same
            return replace(row, failure=f"{type(error).__name__}: {error}"[:400])
        return self._with_rates(row, times, work)

    def _with_rates(self, row: Result, times: Times, work: Work) -> Result:
        percent = None
        if self.ceilings is not None:
            percent = 100 * work.bound_ms(self.ceilings) / times.median_ms
        return replace(
            row,
            median_time=times.median_ms,
            std_time=times.std_ms,
            tflops=work.flops / times.median_ms / 1e9,
            tb_per_sec=work.num_bytes / times.median_ms / 1e9,
            percent_of_ceiling=percent,
            plan_time_us=times.plan_us,
            launch_time_us=times.launch_us,
        )

    def _prepared(self, case: Case) -> tuple[Inputs, Expected]:
        """Inputs and answer of a case; those of the last one are kept for its other peers."""
        if self._current is None or self._current[0] != case:
            self._current = None
            inputs = self._memory.inputs(case)
            self._current = (case, inputs, expect(inputs, (FLOAT32_SUMS, FLASHINFER)))
        return self._current[1:]

    def _allocated(self, *, reset: bool = False) -> int:
        """Bytes of GPU memory in use; with `reset` the peak begins again from them."""
        if self.device.type != "cuda":
            return 0
        if reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

"""How long a call takes: on the GPU, from a captured graph with a cold L2 cache; and on the host.

Nothing here looks at results. On a CPU a call's wall clock stands in for the GPU's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

HOST_SECONDS = 0.05
"""For each of the two host costs."""

REST_SECONDS = 0.2
"""Before each GPU measurement, or it would depend on the one before: products draw all the power
that a GPU may, and it lowers its clock. On an H200, the same 8 prompts of 2k took FlashInfer's fa3
581 to 630 µs and this package 551 to 592, by their order, and after a rest 581 to 588 and 527 to
534."""


@dataclass(frozen=True)
class Times:
    """Medians over several calls."""

    median_ms: float
    std_ms: float
    plan_us: float  # host time of `plan`
    launch_us: float  # host time of `run`, not captured


@dataclass(frozen=True)
class Clock:
    """Measures within a time budget.

    Args:
        device: What is waited for.
        seconds: For the repetitions of one GPU measurement.
    """

    device: torch.device
    seconds: float

    def times(
        self, plan: Callable[[], object], run: Callable[[], object], *, capturable: bool
    ) -> Times:
        """Time a call that has been planned and run before, so that everything is compiled."""
        if self.device.type == "cpu":
            all_ms = [1e3 * s for s in self._host_seconds(run, self.seconds)]
            launch_us = 1e3 * statistics.median(all_ms)
        else:
            all_ms = self._gpu_ms(self._capture(run) if capturable else run)
            launch_us = 1e6 * statistics.median(self._host_seconds(run, HOST_SECONDS))
        return Times(
            median_ms=statistics.median(all_ms),
            std_ms=statistics.pstdev(all_ms),
            plan_us=1e6 * statistics.median(self._host_seconds(plan, HOST_SECONDS)),
            launch_us=launch_us,
        )

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _host_seconds(self, call: Callable[[], object], budget: float) -> list[float]:
        """Host time of single calls, each on an idle device."""
        least = 1 if self.device.type == "cpu" else 3
        found: list[float] = []
        deadline = time.perf_counter() + budget
        while len(found) < least or (time.perf_counter() < deadline and len(found) < 200):
            self.wait()
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        self.wait()
        return found

    def _gpu_ms(self, call: Callable[[], object]) -> list[float]:
        from triton.testing import do_bench  # Triton decides at its import whether it interprets

        self.wait()
        time.sleep(REST_SECONDS)
        # clearing the L2 cache is not in the times that come back, but in these budgets
        warmup_ms, repeat_ms = 100 * self.seconds, 900 * self.seconds
        return [float(t) for t in do_bench(call, warmup_ms, repeat_ms, return_mode="all")]

    def _capture(self, run: Callable[[], object]) -> Callable[[], object]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

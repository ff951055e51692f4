"""`Shadow`: compares a sample of the steps that are being served with another backend.

Every `every`-th step is looked at, in one layer, the next one each time. Of that layer a few query
rows are drawn, on the host; the other backend computes them from the same cache, on the same device
and stream; and the two answers are compared there. Where they agree that is all: one small step and
one wait for the GPU. Where they do not, the doubtful rows go to the host, where float64 and the
derived bound say which of the two is wrong, if any is.

A step that is not looked at costs two counters. What a CUDA graph replays cannot be seen and is
left out; what runs inside `torch.compile` is an operator, and is seen.
"""

from __future__ import annotations

import logging
import os
import shlex
import warnings
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from pagedattn.attention import PagedAttention
from pagedattn.backends import backend_names
from pagedattn.capacity import Capacity
from pagedattn.checking.arbitration import Answer, compare_with_float64, disagreement, host_step
from pagedattn.checking.capsule import SUFFIX, write_capsule
from pagedattn.checking.mismatch import LayerRun, Mismatch, ShadowMismatch, capsule_of
from pagedattn.checking.row_sample import RowStep, SampledRow, draw_rows, step_of_rows
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec
from pagedattn.validation import KVCache, halves_of
from pagedattn.watch import WatchCounts

REACTIONS = ("log", "raise", "capsule")
QUERIES_BEFORE = 63
"""Of the same request, that a capsule keeps beside the wrong row: kernels go by their number."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shadow:
    """How `PagedAttention(..., shadow=Shadow(...))` is compared with another backend.

    One may be given to many objects. What each has done so far is in its `shadow.counts`.

    Args:
        backend: The other backend; it must be able to compute the same layer kind here.
        every: Of so many steps that have queries, the first is looked at.
        rows: Query rows that are compared, at most.
        on_mismatch: "log": an error is logged, or a warning where only the shadow is wrong.
            "raise": `run` raises `ShadowMismatch`. "capsule": as "log", and the row is written to a
            capsule that `pagedattn replay` computes again.
        capsule_dir: Where capsules go; made where it does not exist.
        max_capsules: After so many of one `PagedAttention`, mismatches are only logged.

    Raises:
        ValueError: An argument is out of its range.
    """

    backend: str
    every: int = 1000
    rows: int = 16
    on_mismatch: str = "log"
    capsule_dir: Path | str = "."
    max_capsules: int = 10

    def __post_init__(self) -> None:
        if self.backend not in backend_names():
            known = ", ".join(backend_names())
            raise ValueError(f"unknown shadow backend {self.backend!r}, expected one of {known}")
        if self.on_mismatch not in REACTIONS:
            raise ValueError(f"on_mismatch must be one of {REACTIONS}, got {self.on_mismatch!r}")
        for name in ("every", "rows", "max_capsules"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")

    def watch(
        self,
        spec: AttentionSpec,
        page_size: int,
        backend: str,
        device: torch.device,
        capacity: Capacity | None,
    ) -> ShadowWatch:
        """Look at the steps of a `PagedAttention` with these properties, which calls this.

        Raises:
            ValueError: It is the same backend.
            UnsupportedSpec: The other backend cannot compute this here.
        """
        if backend == self.backend:
            raise ValueError(f"shadow and served backend are both {backend!r}, expected two")
        other = PagedAttention(spec, page_size, backend=self.backend, device=device)
        if capacity is not None:
            warnings.warn(
                "a shadow looks at run() calls alone: steps that a CUDA graph replays go unchecked",
                stacklevel=3,  # whoever makes the PagedAttention
            )
        return ShadowWatch(self, backend, other)


class ShadowWatch:
    """Looks at the steps of one `PagedAttention`; made by `Shadow.watch`."""

    def __init__(self, shadow: Shadow, served: str, other: PagedAttention) -> None:
        self.shadow = shadow
        self.served = served
        self._other = other
        self._random = Random(0)  # any fixed seed: runs can be repeated
        self._rows: list[SampledRow] = []  # of the planned step, until they are looked at
        self._layer = 0  # that is looked at in the planned step
        self._next_layer = 0  # that the next run is
        self._num_layers = 1  # of the step before
        self._num_capsules = 0
        self._steps = self._checked = self._doubtful = self._mismatches = self._failed = 0

    @property
    def counts(self) -> WatchCounts:
        """What has been done so far."""
        return WatchCounts(
            self._steps, self._checked, self._doubtful, self._mismatches, self._failed
        )

    def begin_step(self, page_table: PageTable, qo_indptr: Tensor) -> None:
        """Draw the rows of a step that is to be looked at."""
        self._num_layers = self._next_layer or self._num_layers
        self._next_layer = 0
        self._rows = []
        if not qo_indptr.numpy()[-1]:  # numpy: a fifth of the time that torch takes
            return
        if self._steps % self.shadow.every == 0:
            self._rows = draw_rows(
                self._other.spec, page_table, qo_indptr, self.shadow.rows, self._random
            )
            self._layer = (self._checked + self._failed) % self._num_layers
        self._steps += 1

    def after_run(self, q: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None) -> None:
        """Look at the run if it is the one; nothing of it is kept.

        Raises:
            ShadowMismatch: An answer is wrong, and `on_mismatch` is "raise".
        """
        layer = self._next_layer
        self._next_layer += 1
        if not self._rows or layer != self._layer:
            return
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        rows, self._rows = self._rows, []
        try:
            self._look(rows, LayerRun(q, *halves_of(kv_cache), out, lse))
        except ShadowMismatch:
            raise
        except Exception as error:  # whatever a backend may raise: serving goes on
            self._failed += 1
            if self.shadow.on_mismatch == "raise":
                raise
            # its traceback would hold the step's tensors
            text = f"{type(error).__name__}: {error}"
            logger.error("shadow %s could not check: %s", self.shadow.backend, text)

    def _look(self, rows: list[SampledRow], run: LayerRun) -> None:
        """Compare the rows, and settle what is doubtful, the most doubtful first."""
        picked = step_of_rows(rows, self._other.page_size)
        served = run.answer(self.served, picked.rows)
        other = self._recompute(picked, run)
        excess = disagreement(self._other.spec, served, other).tolist()  # waits for the GPU
        bounds = list(pairwise(picked.qo_indptr.tolist()))
        worst = [max(excess[begin:end]) for begin, end in bounds]
        doubtful = [i for i in range(len(rows)) if worst[i] > 1]
        self._checked += 1
        self._doubtful += bool(doubtful)
        logger.debug("shadow %s: step %d checked", self.shadow.backend, self._steps - 1)
        for i in sorted(doubtful, key=lambda i: -worst[i]):
            mine, others = served.of_rows(*bounds[i]), other.of_rows(*bounds[i])
            mismatch = self._settle(rows[i], run, mine, others)
            if mismatch.wrong:
                self._mismatches += 1
                self._react(mismatch, rows[i], run, others)
                return

    def _recompute(self, picked: RowStep, run: LayerRun) -> Answer:
        """The other backend's answer to these rows; what it does not write is NaN."""
        q = run.q[picked.rows.to(run.q.device)]
        kv_cache = run.k_pages, run.v_pages
        out = torch.full_like(q, torch.nan)
        self._other.plan(picked.page_table, picked.qo_indptr)
        if run.lse is None:
            return Answer(self.shadow.backend, self._other.run(q, kv_cache, out=out), None)
        lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)
        self._other.run_return_lse(q, kv_cache, out=out, lse=lse)
        return Answer(self.shadow.backend, out, lse)

    def _settle(self, row: SampledRow, run: LayerRun, served: Answer, other: Answer) -> Mismatch:
        """Compare both answers to a sampled row with float64, each with its own bound."""
        spec, page_size = self._other.spec, self._other.page_size
        rows = step_of_rows([row], page_size)
        step, _ = host_step(spec, rows, run.q, run.k_pages, run.v_pages)
        return Mismatch(
            self._steps - 1,
            self._layer,
            row.row,
            row.request,
            row.query,
            row.kv_len,
            (served.backend, compare_with_float64(served, step)),
            (other.backend, compare_with_float64(other, step)),
        )

    def _react(self, mismatch: Mismatch, row: SampledRow, run: LayerRun, other: Answer) -> None:
        if self.shadow.on_mismatch == "raise":
            raise ShadowMismatch(mismatch)
        level = logging.ERROR if self.served in mismatch.wrong else logging.WARNING
        logger.log(level, "shadow: %s", mismatch)
        if self.shadow.on_mismatch == "capsule" and self._num_capsules < self.shadow.max_capsules:
            self._num_capsules += 1
            logger.log(level, "shadow: %s", self._keep(mismatch, row, run, other))

    def _keep(self, mismatch: Mismatch, row: SampledRow, run: LayerRun, other: Answer) -> str:
        """Write a capsule of the wrong answer, and say how to replay it."""
        rows, answer = step_of_rows([row], self._other.page_size), other
        if self.served in mismatch.wrong:
            rows = step_of_rows([row], self._other.page_size, QUERIES_BEFORE)
            answer = run.answer(self.served, rows.rows)
        folder = Path(self.shadow.capsule_dir)
        name = f"shadow-{answer.backend}-step{mismatch.step}-layer{mismatch.layer}-{os.getpid()}"
        paths = (folder / f"{name}-{number}{SUFFIX}" for number in count())
        path = next(path for path in paths if not path.exists())  # other objects write there too
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_capsule(path, capsule_of(self._other.spec, rows, run, answer, str(mismatch)))
        except (OSError, ValueError) as error:
            return f"no capsule written: {error}"
        return f"pagedattn replay {shlex.quote(str(path))} --backend {answer.backend}"

"""Trying a check's tasks in worker processes, each with a time limit for every step.

A wrong kernel can hang or kill its process. Then the worker is replaced, what it was computing is a
mismatch, and the rest goes on.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, cast

import click

from pagedattn.checking.evidence import as_found
from pagedattn.checking.here import Examiner
from pagedattn.checking.profiles import batch_of_task, kind_of_task
from pagedattn.checking.schedule import Schedule
from pagedattn.checking.task import PROCESS_ENDED, Outcome, Task

CHUNK = 16
"""Tasks that a worker gets at once, of one layer kind."""
BUFFER = 400
"""Tasks for each worker that wait at most."""
LAST_WORDS = 8
"""Lines of a dead worker's standard error that are kept."""
FRAME = re.compile(r"\s*frame #\d+:")
"""Lines of a C++ stack, which say little and would be all that is kept."""


@dataclass(frozen=True)
class WorkerLimits:
    """Seconds that a worker has before it is killed.

    Args:
        case: For one step.
        compiling: So many times longer for a step whose kernels may have to be compiled.
        looking: For looking into a mismatch.
        start: To start.
    """

    case: float = 30.0
    compiling: float = 10.0
    looking: float = 180.0
    start: float = 180.0


class _Worker:
    """One process, and what it is at."""

    def __init__(self, examiner: Examiner, limits: WorkerLimits) -> None:
        self.limits = limits
        self.doing: Task | None = None
        self.waiting: list[Task] = []  # that it was given and has not begun
        self.wrong: Outcome | None = None  # what it is looking into
        self.greeted = False
        self.deadline = time.monotonic() + limits.start
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, as long as the process
        self.events, theirs = os.pipe()
        settings = {
            "device": str(examiner.device),
            "profile": examiner.profile.name,
            "subjects": list(examiner.subjects),
            "folder": str(examiner.folder),
            "events": theirs,
        }
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedattn.checking.worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[theirs],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        os.close(theirs)
        self._tasks = cast(IO[bytes], self.process.stdin)

    @property
    def is_idle(self) -> bool:
        return self.greeted and self.doing is None and not self.waiting

    def give(self, tasks: list[Task]) -> None:
        """Let it try these."""
        self.waiting = tasks
        self.deadline = time.monotonic() + self.limits.case
        line = json.dumps([asdict(task) for task in tasks]) + "\n"
        with suppress(BrokenPipeError):  # it died: its events end, which is seen next
            self._tasks.write(line.encode())
            self._tasks.flush()

    def read(self) -> tuple[list[Outcome], bool]:
        """The outcomes that it sent, and whether it is still alive."""
        data = os.read(self.events, 1 << 20)
        *lines, self._unread = (self._unread + data).split(b"\n")
        outcomes = [o for line in lines if (o := self._heard(json.loads(line))) is not None]
        return outcomes, bool(data)

    def _heard(self, event: dict[str, Any]) -> Outcome | None:
        seconds, outcome = self.limits.case, None
        if "begin" in event:
            self.doing, self.wrong = Task(**event["begin"]), None
            self.waiting.remove(self.doing)
            seconds *= self.limits.compiling if event["compiles"] else 1
        elif "looking" in event:
            self.wrong, seconds = Outcome.from_json(event["looking"]), self.limits.looking
        elif "outcome" in event:
            outcome, self.doing = Outcome.from_json(event["outcome"]), None
        elif "hello" in event:
            self.greeted = True
        self.deadline = time.monotonic() + seconds
        return outcome

    def end(self) -> str:
        """Kill it if it lives; say how it ended, with its last words. Once."""
        hung = self.process.poll() is None
        time_up = time.monotonic() >= self.deadline
        if hung and not time_up:  # its events ended, and it is about to
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.process.kill()
        code = self.process.wait()
        os.close(self.events)
        with suppress(BrokenPipeError):
            self._tasks.close()
        said = self._last_words()
        ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        how = "gave no answer in time, and was killed" if time_up else ended
        return f"{how}: {' / '.join(said)}" if said else how

    def _last_words(self) -> list[str]:
        self._errors.seek(0)
        lines = self._errors.read()[-100_000:].decode(errors="replace").splitlines()
        self._errors.close()
        said = [line.strip() for line in lines if line.strip() and not FRAME.match(line)]
        return said[-LAST_WORDS:]


class _Queue:
    """Tasks by layer kind: a worker stays with one, so that few compile the same kernels."""

    def __init__(self, examiner: Examiner, schedule: Schedule, jobs: int) -> None:
        self.examiner = examiner
        self.jobs = jobs
        self.schedule = schedule
        self.by_kind: dict[object, deque[Task]] = {}
        self.kind_of_worker: dict[int, object] = {}

    def chunk(self, worker: int, *, more: bool) -> list[Task]:
        """Some tasks of one kind; none where no more are left or wanted."""
        if more and not any(self.by_kind.values()):
            self._fill()
        kinds = [kind for kind, tasks in self.by_kind.items() if tasks]
        if not kinds:
            return []
        own = self.kind_of_worker.get(worker)
        if own not in kinds:
            taken = set(map(repr, self.kind_of_worker.values()))
            free = [kind for kind in kinds if repr(kind) not in taken]
            own = max(free or kinds, key=lambda kind: len(self.by_kind[kind]))
        self.kind_of_worker[worker] = own
        tasks = self.by_kind[own]
        return [tasks.popleft() for _ in range(min(CHUNK, len(tasks)))]

    def put_back(self, tasks: list[Task]) -> None:
        """Tasks that a worker was given and did not begin."""
        for task in tasks:
            self.by_kind.setdefault(self._kind(task), deque()).append(task)

    def _fill(self) -> None:
        for _ in range(BUFFER * self.jobs):
            task = self.schedule.take()
            if task is None:
                return
            self.put_back([task])

    def _kind(self, task: Task) -> object:
        examiner = self.examiner
        kind = kind_of_task(examiner.profile, task.subject, task.prop, task.seed, examiner.device)
        return (task.subject, kind)


def outcomes_of_workers(
    examiner: Examiner,
    schedule: Schedule,
    jobs: int,
    limits: WorkerLimits,
    end: float = float("inf"),
) -> Iterator[Outcome]:
    """Every task's outcome, as they come, until `time.monotonic()` reaches `end`.

    Args:
        examiner: What workers are to try, and where.
        schedule: The tasks.
        jobs: Workers.
        limits: How long a worker may take.
        end: When no more tasks are handed out.
    """
    queue = _Queue(examiner, schedule, jobs)
    workers = {number: _Worker(examiner, limits) for number in range(jobs)}
    kept: set[tuple[str, str, str]] = set()
    try:
        while workers:
            for number, worker in workers.items():
                if worker.is_idle:
                    tasks = queue.chunk(number, more=time.monotonic() < end)
                    if tasks and time.monotonic() < end:
                        worker.give(tasks)
            if all(worker.is_idle for worker in workers.values()):
                return
            for number in _ready(workers):
                outcomes, alive = _read(workers[number])
                yield from _counted(outcomes, schedule)
                if not alive:
                    dead = workers.pop(number)
                    yield from _counted(_bury(dead, queue, examiner, kept), schedule)
                    workers[number] = _Worker(examiner, limits)
    finally:
        for worker in workers.values():
            worker.end()


def _ready(workers: dict[int, _Worker]) -> list[int]:
    """Workers that said something, or whose time is up."""
    with selectors.DefaultSelector() as selector:
        for number, worker in workers.items():
            selector.register(worker.events, selectors.EVENT_READ, number)
        busy = [worker.deadline for worker in workers.values() if not worker.is_idle]
        wait = max(0.0, min(busy) - time.monotonic())
        said = {key.data for key, _ in selector.select(wait)}
    late = {n for n, w in workers.items() if not w.is_idle and time.monotonic() >= w.deadline}
    return sorted(said | late)


def _read(worker: _Worker) -> tuple[list[Outcome], bool]:
    """What a worker said, and whether it goes on; one whose time is up does not."""
    with selectors.DefaultSelector() as selector:
        selector.register(worker.events, selectors.EVENT_READ)
        if not selector.select(0):
            return [], False
    return worker.read()


def _bury(
    worker: _Worker, queue: _Queue, examiner: Examiner, kept: set[tuple[str, str, str]]
) -> list[Outcome]:
    """The outcome of what a worker was at when it ended; the rest goes back to the queue.

    Raises:
        click.ClickException: It never came to work.
    """
    how = worker.end()
    if not worker.greeted:
        raise click.ClickException(f"a worker process {how}")
    queue.put_back(worker.waiting)
    task = worker.doing
    if task is None:
        return []
    if worker.wrong is not None:  # it ended while it looked into it
        outcome = worker.wrong
    else:
        outcome = Outcome(task, problem=f"its process {how}", raised=PROCESS_ENDED)
    if task.group in kept:
        return [outcome]
    kept.add(task.group)
    batch = batch_of_task(
        examiner.profile, task.subject, task.prop, task.mode, task.seed, examiner.device
    )
    return [as_found(outcome, batch, examiner.subjects[task.subject], examiner.folder)]


def _counted(outcomes: list[Outcome], schedule: Schedule) -> Iterator[Outcome]:
    for outcome in outcomes:
        if outcome.declined is not None:
            schedule.declined(outcome.task)
        yield outcome

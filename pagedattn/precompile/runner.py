"""Start a compiling process, follow it, and never leave its compilers behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pagedattn.precompile.events import Event, read_event
from pagedattn.precompile.failures import Failure, failure_in

_STEP = re.compile(r"^\[(\d+)/(\d+)\]")


@dataclass(frozen=True)
class Steps:
    """How far a build is.

    Attributes:
        done: Compilations that are done.
        total: All of them.
    """

    done: int
    total: int


@dataclass
class Outcome:
    """What a compiling process has done.

    Attributes:
        built: What is done, by name with its path.
        failure: Why it ended early; `None`: it did not.
        lines: All that compilers printed.
    """

    built: list[Event] = field(default_factory=list)
    failure: Failure | None = None
    lines: list[str] = field(default_factory=list)


def run_child(
    module: str,
    arguments: str,
    environment: dict[str, str],
    follow: Callable[[Event | Steps], None],
) -> Outcome:
    """Run a module with an argument, and collect what it prints.

    Args:
        module: Such as `pagedattn.precompile.child`.
        arguments: Its one argument.
        environment: Its environment variables.
        follow: Called with every event and every step of a compiler.
    """
    outcome = Outcome()
    process = subprocess.Popen(
        [sys.executable, "-m", module, arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its compilers can be ended with it
    )
    assert process.stdout is not None
    try:
        with _sigterm_raises():
            for line in process.stdout:
                _take(line.rstrip("\n"), outcome, follow)
            returncode = process.wait()
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if returncode != 0:
        outcome.failure = failure_in(outcome.lines, returncode)
    return outcome


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM, by which `timeout` and containers end a process, unwind it as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # which alone has signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _take(line: str, outcome: Outcome, follow: Callable[[Event | Steps], None]) -> None:
    event = read_event(line)
    if event is not None:
        if event.kind == "done":
            outcome.built.append(event)
        follow(event)
        return
    outcome.lines.append(line)
    step = _STEP.match(line)
    if step:
        follow(Steps(int(step[1]), int(step[2])))

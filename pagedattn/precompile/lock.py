"""One precompilation at a time in a cache folder; the others wait, or learn who is at work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK_NAME = "pagedattn-precompile.lock"


class Held(Exception):
    """Another process precompiles into the same folder."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(f"another process is precompiling: {holder}")


@contextlib.contextmanager
def only_one(folder: Path, what: str, waiting: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the folder's lock. The system frees it when this process ends, however it ends.

    Args:
        folder: The cache; made where it does not exist.
        what: What is built, for those who find the lock held.
        waiting: Told who holds the lock, once, before waiting; `None`: do not wait.

    Raises:
        Held: It is held, and `waiting` is `None`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_NAME, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(file.fileno())
            if waiting is None:
                raise Held(holder) from None
            waiting(holder)
            fcntl.flock(file, fcntl.LOCK_EX)
        _write(file.fileno(), what)
        try:
            yield
        finally:
            os.ftruncate(file.fileno(), 0)


def _write(descriptor: int, what: str) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {since}: {what}"
    os.ftruncate(descriptor, 0)
    os.write(descriptor, text.encode())


def _read(descriptor: int) -> str:
    text = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
    return text or "a process that has not said who it is"

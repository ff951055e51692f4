"""What a compiling process tells the one that waits for it: marked lines among a compiler's own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

_MARK = "@pagedattn "


@dataclass(frozen=True)
class Event:
    """Something that happened to one thing that is compiled.

    Attributes:
        kind: "begin", "done" or "failed".
        name: What it happened to.
        path: Where the result is or will be; empty where that is not known.
    """

    kind: str
    name: str
    path: str = ""


def emit(event: Event) -> None:
    """Print an event, at once and in order with what compilers print."""
    print(_MARK + json.dumps(dataclasses.asdict(event)), flush=True)


def read_event(line: str) -> Event | None:
    """The event in a line; `None` where it is a compiler's."""
    if not line.startswith(_MARK):
        return None
    return Event(**json.loads(line.removeprefix(_MARK)))

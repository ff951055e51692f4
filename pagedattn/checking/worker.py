"""The process that tries tasks for `workers.py`: it may hang or die, and nothing else does.

Reads lines of JSON from its standard input, each a list of tasks, and writes one event a line to
the file descriptor that it is given: the libraries below may print what they like.

| event | meaning |
|---|---|
| `{"hello": true}` | it is ready |
| `{"begin": task, "compiles": bool}` | it begins a task, for which kernels may be compiled |
| `{"looking": outcome}` | the task is wrong, and is looked into |
| `{"outcome": outcome}` | the task is done |
| `{"idle": true}` | so are all tasks of the line |
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from pagedattn.checking.choice import interpret_on_cpu
from pagedattn.checking.here import Examiner
from pagedattn.checking.profiles import PROFILES, kind_of_task
from pagedattn.checking.task import Task, subject_named


def main(arguments: list[str]) -> None:
    """Work until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    settings: dict[str, Any] = json.loads(arguments[0])
    device = torch.device(settings["device"])
    interpret_on_cpu(device)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    profile = PROFILES[settings["profile"]]
    live = profile.live
    subjects = {name: subject_named(name, live=live) for name in settings["subjects"]}
    examiner = Examiner(subjects, profile, device, Path(settings["folder"]))
    with os.fdopen(int(settings["events"]), "w") as events:
        _say(events, {"hello": True})
        met: set[object] = set()
        for line in sys.stdin:
            for values in json.loads(line):
                task = Task(**values)
                _examine(examiner, task, events, met)
                if device.type == "cuda" and not _answers(device):
                    return  # what comes next in this process would fail for no reason of its own
            _say(events, {"idle": True})


def _examine(examiner: Examiner, task: Task, events: TextIO, met: set[object]) -> None:
    kind = kind_of_task(examiner.profile, task.subject, task.prop, task.seed, examiner.device)
    known = (task.subject, task.prop, kind)
    # which of FlashInfer's kernels a step needs depends on its lengths too
    may_compile = kind is not None and (known not in met or task.subject == "flashinfer")
    _say(events, {"begin": asdict(task), "compiles": may_compile})
    met.add(known)
    outcome = None
    for outcome in examiner.examine(task):
        if outcome.problem is not None and outcome.evidence is None:
            _say(events, {"looking": outcome.to_json()})
    if outcome is not None:
        _say(events, {"outcome": outcome.to_json()})


def _answers(device: torch.device) -> bool:
    """Whether the GPU still computes: after some errors a process gets nothing but errors."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _say(events: TextIO, event: dict[str, Any]) -> None:
    print(json.dumps(event), file=events, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

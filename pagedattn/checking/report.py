"""What `pagedattn check` says: a table and reports for people, one JSON document for machines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pagedattn.checking.capsule import versions_here
from pagedattn.checking.evidence import describe_batch
from pagedattn.checking.profiles import Profile, batch_of_task
from pagedattn.checking.properties import AGREEMENT, PROPERTIES
from pagedattn.checking.subject import Subject
from pagedattn.checking.tally import Tally
from pagedattn.checking.task import PROCESS_ENDED, Outcome
from pagedattn.toolchain import FLASHINFER_PACKAGE, package_version

PACKAGES = ("pagedattn", "torch", "triton", FLASHINFER_PACKAGE)


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that a check found.

    Attributes:
        device: Where it computed.
        profile: How it drew.
        first_seed: Of the steps.
        subjects: What was checked, by name.
        tallies: Counts by subject, property and mode.
        left_out: What was not tried, and why, in lines.
        seconds: How long it took.
    """

    device: torch.device
    profile: Profile
    first_seed: int
    subjects: Mapping[str, Subject]
    tallies: Sequence[Tally]
    left_out: Sequence[str]
    seconds: float

    @property
    def wrong(self) -> list[Tally]:
        """Those with a mismatch."""
        return [tally for tally in self.tallies if tally.failures]

    @property
    def num_checked(self) -> int:
        """Steps that were computed and compared."""
        return sum(tally.num_checked for tally in self.tallies)

    def table(self) -> Table:
        """A row for each mode of the agreement, and for each other property."""
        # narrow enough for 80 columns, which is what a pipe gets
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        table.title = f"Attention on {self.device}, steps drawn from seed {self.first_seed}"
        table.add_column("compared", overflow="fold")
        for column in ("mode", "steps", "worst error", "allowed", "verdict"):
            table.add_column(column, no_wrap=True)
        for (title, mode), tallies in self._rows().items():
            found = [tally.worst for tally in tallies if tally.worst is not None]
            worst = max(found, key=lambda place: place.excess, default=None)
            table.add_row(
                title,
                mode,
                str(sum(tally.num_checked for tally in tallies)),
                "-" if worst is None else f"{worst.error:.1e} {worst.tensor}",
                "-" if worst is None else f"{worst.allowed:.1e}",
                _verdict(tallies),
            )
        return table

    def _rows(self) -> dict[tuple[str, str], list[Tally]]:
        rows: dict[tuple[str, str], list[Tally]] = {}
        for tally in self.tallies:
            row = (f"{tally.subject}: {tally.prop}", "any")
            if tally.prop == AGREEMENT.name:
                compared_with = self.subjects[tally.subject].compared_with
                row = (f"{tally.subject} vs {compared_with}", tally.mode)
            rows.setdefault(row, []).append(tally)
        return rows

    def notes(self) -> list[str]:
        """What was not tried, and what a subject declined."""
        declined: dict[str, list[Tally]] = {}
        for tally in self.tallies:
            if tally.num_declined:
                declined.setdefault(tally.subject, []).append(tally)
        return [
            *self.left_out,
            *(
                f"{subject} declined {sum(t.num_declined for t in tallies)} steps, which were not "
                f"checked; the first: {tallies[0].declined}"
                for subject, tallies in declined.items()
            ),
        ]

    def summary(self) -> str:
        """Who is right and who is wrong, in one line."""
        wrong = list(dict.fromkeys(tally.subject for tally in self.wrong))
        steps = f"{self.num_checked} steps in {self.seconds:.0f} s"
        if wrong:
            num_wrong = sum(len(tally.failures) for tally in self.wrong)
            return f"WRONG: {', '.join(wrong)}; {num_wrong} of {steps}"
        if not self.num_checked:
            return "nothing was checked"
        return f"ok: {', '.join(self.subjects)}; {steps}"

    def mismatches(self) -> list[str]:
        """For each tally that is wrong: the first failure, and how to see it again."""
        return [self._mismatch(tally) for tally in self.wrong]

    def _mismatch(self, tally: Tally) -> str:
        # the first that was looked into, or the first
        failure = next((f for f in tally.failures if f.evidence), tally.failures[0])
        task, subject = failure.task, self.subjects[tally.subject]
        batch = batch_of_task(
            self.profile, task.subject, task.prop, task.mode, task.seed, self.device
        )
        what = f"{tally.prop}, {tally.mode}"
        lines = [
            f"MISMATCH: {tally.subject} vs {subject.compared_with}, {what}: "
            f"{len(tally.failures)} of {tally.num_checked} steps",
            f"  first: {failure.problem}",
            *([] if PROPERTIES[task.prop].own_step else describe_batch(batch)),
            f"  again: {self._command(failure)}",
            *([failure.evidence] if failure.evidence else []),
        ]
        return "\n".join(lines)

    def _command(self, failure: Outcome) -> str:
        task = failure.task
        jobs = " --jobs 1" if failure.raised == PROCESS_ENDED else ""
        profile = "" if self.profile.name == "quick" else f"--profile {self.profile.name} "
        option, prop = self.subjects[task.subject].option, shlex.quote(task.prop)
        return (
            f"pagedattn check {profile}{option} --property {prop} --mode {task.mode} "
            f"--seed {task.seed} --examples 1 --device {self.device.type}{jobs}"
        )

    def document(self) -> dict[str, Any]:
        """One machine-readable document: versions, counts, worst ratios, every mismatch."""
        return {
            "format": "pagedattn check 1",
            "verdict": "wrong" if self.wrong else "ok" if self.num_checked else "nothing checked",
            "versions": {name: package_version(name) for name in PACKAGES} | versions_here(),
            "device": device_name(self.device),
            "profile": self.profile.name,
            "first_seed": self.first_seed,
            "seconds": round(self.seconds, 1),
            "cases": self.num_checked,
            "counts": [_counts(tally) for tally in self.tallies],
            "not_tried": list(self.left_out),
            "mismatches": [
                _mismatch_document(failure, self._command(failure))
                for tally in self.wrong
                for failure in tally.failures
            ],
        }


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _verdict(tallies: Sequence[Tally]) -> str:
    num_wrong = sum(len(tally.failures) for tally in tallies)
    if not any(tally.num_checked for tally in tallies):
        return "[yellow]not checked[/yellow]"
    return f"[red]{num_wrong} wrong[/red]" if num_wrong else "[green]ok[/green]"


def _counts(tally: Tally) -> dict[str, Any]:
    ratio: float | str | None = None  # nothing was compared
    if tally.worst is not None:
        excess = tally.worst.excess
        ratio = round(excess, 4) if math.isfinite(excess) else str(excess)
    return {
        "subject": tally.subject,
        "property": tally.prop,
        "mode": tally.mode,
        "checked": tally.num_checked,
        "declined": tally.num_declined,
        "wrong": len(tally.failures),
        "worst_error_over_allowed": ratio,
    }


def _mismatch_document(failure: Outcome, again: str) -> dict[str, Any]:
    values = failure.to_json()
    del values["declined"], values["evidence"]  # the second is for eyes
    return {**values.pop("task"), **values, "again": again}

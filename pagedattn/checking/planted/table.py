"""How often each planted fault is caught and named, on steps as `pagedattn check` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pagedattn.attention import AttentionOutput
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.planted import faults
from pagedattn.checking.profiles import batch_of_seed
from pagedattn.checking.step import Step, decoy_of

Fault = Callable[[Step], AttentionOutput]

NAMES: dict[Fault, str | None] = {
    faults.window_one_short: "window one key short",
    faults.window_one_long: "window one key long",
    faults.window_ignored: "window ignored",
    faults.mask_dropped: "causal mask ignored",
    faults.diagonal_one_early: "diagonal one key early",
    faults.diagonal_one_late: "diagonal one key late",
    faults.last_page_read_to_its_end: "last page read to its end",
    faults.one_page_too_many: "one page too many",
    faults.last_page_dropped: "last page dropped",
    faults.first_tile_dropped: "a piece of the keys is missing",
    faults.pages_in_reverse_order: "pages in reverse order",
    faults.pages_of_the_next_request: "pages of another request",
    faults.nan_of_the_tail_times_zero: "NaN leak",
    faults.lse_in_base_2: "LSE in base 2",
    faults.lse_without_the_maximum: None,
    faults.scale_of_another_head_dim: "sm_scale wrong",
    faults.soft_cap_ignored: "soft cap ignored",
    faults.keys_and_values_swapped: "keys and values swapped",
    faults.kv_heads_interleaved: "query heads of another KV head",
    faults.rows_in_reverse_order: "rows in another order",
    faults.last_row_never_written: "rows never written",
    faults.nan_where_no_key_is_visible: "wrong where no key is visible",
    faults.mean_where_no_key_is_visible: "wrong where no key is visible",
    faults.finite_lse_where_no_key_is_visible: "wrong where no key is visible",
    faults.finite_minus_infinity: "finite minus infinity",
    faults.probabilities_in_8_bits: None,
    faults.stale_plan: "stale plan",
}
"""What each planted fault is to be called; `None`: the diagnosis has no name for it."""

DRAWS = {"decode": (0, 6), "prefill": (0, 3), "mixed": (1, 2)}
"""Seeds of each mode's steps: few, of every kind."""

BEGIN, END = "<!-- planted faults -->", "<!-- end of planted faults -->"
"""What the table stands between in the README."""


@dataclass(frozen=True)
class Count:
    """What became of one fault.

    Attributes:
        fault: Its name.
        steps: On how many it was planted.
        changed: In how many it changes a bit of the answer.
        caught: In how many the answer was beyond its bound.
        named: In how many of those the fault is among the explanations.
        named_first: In how many it is the first.
        name: What it is to be called.
    """

    fault: str
    steps: int
    changed: int
    caught: int
    named: int
    named_first: int
    name: str | None


def drawn_steps() -> list[Step]:
    """The steps that faults are planted on."""
    return [batch_of_seed(mode, s).materialise() for mode in DRAWS for s in DRAWS[mode]]


def count_fault(fault: Fault, steps: Sequence[Step]) -> Count:
    """Plant a fault on every step."""
    name = NAMES[fault]
    names, num_changed = [], 0
    for step in steps:
        wrong = fault(step)
        pairs = zip(wrong, faults.right(step), strict=True)
        num_changed += not all(torch.equal(*pair) for pair in pairs)
        before = replace(step, page_table=decoy_of(step.page_table))
        earlier = [before] if fault is faults.stale_plan else []
        diagnosis = diagnose(step, wrong, earlier=earlier)
        if diagnosis is not None:
            names.append(diagnosis.names)
    return Count(
        fault.__name__.replace("_", " "),
        len(steps),
        changed=num_changed,
        caught=len(names),
        named=sum(name in each for each in names),
        named_first=sum(each[:1] == (name,) for each in names),
        name=name,
    )


def count_faults(steps: Sequence[Step]) -> Iterator[Count]:
    """Plant every fault on every step."""
    return (count_fault(fault, steps) for fault in NAMES)


def markdown(counts: Sequence[Count]) -> str:
    """The table as Markdown, with a line that sums it up."""
    lines = [
        "| planted fault | changes the answer of | caught in | named in | the diagnosis says |",
        "|---|---|---|---|---|",
        *(
            f"| {c.fault} | {c.changed} of {c.steps} steps | {c.caught} of {c.changed} "
            f"| {c.named} of {c.caught} | {c.name or 'no name for it'} |"
            for c in counts
        ),
    ]
    return "\n".join([*lines, "", summary(counts)])


def summary(counts: Sequence[Count]) -> str:
    """How many faults are caught, and how many named, in one line."""
    caught = sum(c.caught > 0 for c in counts)
    named = sum(c.named > 0 for c in counts)
    return f"{caught} of {len(counts)} planted faults are caught, and {named} are named."


def between_markers(text: str) -> str:
    """The table that stands in a README.

    Raises:
        ValueError: The markers are missing.
    """
    return text[slice(*_place(text))].strip()


def with_table(text: str, table: str) -> str:
    """A README with its table replaced.

    Raises:
        ValueError: The markers are missing.
    """
    begin, end = _place(text)
    return f"{text[:begin]}\n\n{table}\n\n{text[end:]}"


def _place(text: str) -> tuple[int, int]:
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"the file must have the lines {BEGIN} and {END}")
    return begin + len(BEGIN), end

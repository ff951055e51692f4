"""The command `pagedattn explain`: the questions, and the answers as tables or JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from pagedattn.backends.flashinfer.library import Version, flashinfer_version
from pagedattn.backends.flashinfer.need import DeviceFacts
from pagedattn.capacity import Capacity
from pagedattn.device import resolve_device
from pagedattn.explain.answers import (
    H200,
    Answer,
    answers_elsewhere,
    answers_here,
    dotted,
)
from pagedattn.explain.kernels import (
    Choice,
    KnownDefect,
    Need,
    capacity_needs,
    eager_choices,
    eager_need,
    known_defects,
)
from pagedattn.spec import AttentionSpec
from pagedattn.toolchain import FLASHINFER_PACKAGE, package_version

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NEWEST_KNOWN: Version = (0, 7, 4)
"""The FlashInfer whose tables are taken where none is installed."""


@dataclass(frozen=True)
class Explanation:
    """Everything that is said.

    Attributes:
        spec: The layer kind, in words.
        answers: Of every backend, for every device.
        gpu: The GPU that kernels and bytes are for.
        flashinfer: The version they are for, and whether it is installed.
        choices: Which kernel runs what; empty where FlashInfer cannot compute the spec.
        needs: Workspace bytes; empty likewise.
        defects: Known wrong answers that the spec could meet.
    """

    spec: str
    answers: tuple[Answer, ...]
    gpu: str
    flashinfer: str
    choices: tuple[Choice, ...]
    needs: tuple[Need, ...]
    defects: tuple[KnownDefect, ...]


@click.command(short_help="Say which backends compute a layer kind, and why not.")
@click.option("--qo-heads", type=int, required=True, help="Query heads.")
@click.option("--kv-heads", type=int, required=True, help="Key and value heads.")
@click.option("--head-dim", type=int, required=True, help="Elements of one head.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--window-left", type=int, default=-1, show_default=True, help="-1: no window.")
@click.option("--soft-cap", type=float, default=0.0, show_default=True, help="0: off.")
@click.option("--causal/--non-causal", default=True, show_default=True)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=int,
    multiple=True,
    help="A bucket's requests, for the bytes of its workspaces; may be repeated.",
)
@click.option(
    "--max-tokens",
    "max_tokens",
    type=int,
    multiple=True,
    help="A bucket's query tokens, one for each --batch-size. [default: the batch size]",
)
@click.option(
    "--flashinfer-version", help="Whose tables. [default: the installed one, else the newest known]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def explain(
    qo_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    page_size: int,
    window_left: int,
    soft_cap: float,
    causal: bool,
    batch_sizes: tuple[int, ...],
    max_tokens: tuple[int, ...],
    flashinfer_version: str | None,
    as_json: bool,
) -> None:
    """Say which backends compute a layer kind, and if not why, and what to do about it.

    Needs no GPU: where there is none, it also says what is known of an H200.
    """
    try:
        spec = AttentionSpec(
            qo_heads,
            kv_heads,
            head_dim,
            dtype=DTYPES[dtype],
            causal=causal,
            window_left=window_left,
            logits_soft_cap=soft_cap,
        )
        capacities = _capacities(batch_sizes, max_tokens)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    explanation = explanation_of(spec, page_size, capacities, flashinfer_version)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(explanation), indent=2))
    else:
        _print(explanation, Console())


def explanation_of(
    spec: AttentionSpec, page_size: int, capacities: list[Capacity], wanted: str | None
) -> Explanation:
    """Collect the answers.

    Args:
        spec: The layer kind.
        page_size: Tokens of a page.
        capacities: Buckets whose workspaces are asked for.
        wanted: FlashInfer's version; `None`: the installed one, else the newest known.
    """
    device = resolve_device(None)
    version, words = _version(wanted)
    answers = answers_here(spec, page_size, device, version)
    if device.type == "cuda":
        facts, gpu = DeviceFacts.of(device), torch.cuda.get_device_name(device)
        computes = not _of_flashinfer(answers).reasons
    else:
        facts, gpu = H200, "H200"
        elsewhere = answers_elsewhere(spec, page_size, gpu, version)
        computes = not _of_flashinfer(elsewhere).reasons
        answers += elsewhere
    needs = [need for c in capacities for need in capacity_needs(spec, c, facts, version)]
    return Explanation(
        _words_of(spec, page_size),
        tuple(answers),
        gpu,
        words,
        tuple(eager_choices(spec, facts)) if computes else (),
        (eager_need(spec, facts), *needs) if computes else (),
        tuple(known_defects(spec, facts, version)),
    )


def _capacities(batch_sizes: tuple[int, ...], max_tokens: tuple[int, ...]) -> list[Capacity]:
    if max_tokens and len(max_tokens) != len(batch_sizes):
        raise ValueError(
            f"give one --max-tokens for each --batch-size, got {len(max_tokens)} for "
            f"{len(batch_sizes)}"
        )
    # pages have no part in what is reserved
    return [Capacity(b, t, b) for b, t in zip(batch_sizes, max_tokens or batch_sizes, strict=True)]


def _version(wanted: str | None) -> tuple[Version, str]:
    installed = package_version(FLASHINFER_PACKAGE)
    text = wanted or installed or dotted(NEWEST_KNOWN)
    version = flashinfer_version(SimpleNamespace(__version__=text))
    if text == installed:
        return version, f"{text} (installed)"
    return (
        version,
        f"{text} ({'not installed' if installed is None else f'{installed} is installed'})",
    )


def _of_flashinfer(answers: list[Answer]) -> Answer:
    return next(answer for answer in answers if answer.backend == "flashinfer")


def _words_of(spec: AttentionSpec, page_size: int) -> str:
    dtype = next(name for name, value in DTYPES.items() if value == spec.dtype)
    words = [
        f"{spec.num_qo_heads}/{spec.num_kv_heads} heads of {spec.head_dim}, {dtype}",
        f"pages of {page_size}",
        "causal" if spec.causal else "not causal",
    ]
    if spec.window_left >= 0:
        words.append(f"window_left {spec.window_left}")
    if spec.logits_soft_cap > 0:
        words.append(f"soft cap {spec.logits_soft_cap:g}")
    return ", ".join(words)


def _print(explanation: Explanation, console: Console) -> None:
    console.print(f"[bold]{escape(explanation.spec)}[/bold]\n", highlight=False)
    for device in dict.fromkeys(answer.device for answer in explanation.answers):
        console.print(_answer_table(explanation.answers, device))
    about = f"FlashInfer {explanation.flashinfer} on {explanation.gpu}"
    if explanation.choices:
        console.print(_choice_table(explanation.choices, f"Kernels of {about}"))
        console.print(_need_table(explanation.needs, f"Workspaces of {about}"))
    if not explanation.defects:
        console.print(f"No known defect of {about} concerns this.", highlight=False)
    else:
        console.print(f"[bold]Known defects of {about}[/bold]\n", highlight=False)
    for defect in explanation.defects:
        _print_defect(defect, console)


def _answer_table(answers: tuple[Answer, ...], device: str) -> Table:
    shown = [answer for answer in answers if answer.device == device]
    how = "here" if shown[0].asked else "not here: from tables"
    table = _table(f"Computed on {escape(device)}? ({how})")
    table.add_column("backend", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why not, and what to do")
    for answer in shown:
        reasons = Table.grid(padding=(0, 1))
        reasons.add_column()
        reasons.add_column(overflow="fold")
        for reason in answer.reasons:
            advice = f"\n[cyan]{escape(reason.advice)}[/cyan]" if reason.advice else ""
            reasons.add_row("-", escape(reason.why) + advice)
        said = "[red]no[/red]" if answer.reasons else "[green]yes[/green]"
        table.add_row(answer.backend, said, reasons if answer.reasons else "")
    return table


def _choice_table(choices: tuple[Choice, ...], title: str) -> Table:
    table = _table(title)
    for column in ("steps with", "wrapper", "kernel", "why"):
        table.add_column(column, no_wrap=column in ("wrapper", "kernel"))
    for choice in choices:
        table.add_row(choice.steps, choice.wrapper, choice.kernel, choice.why)
    return table


def _need_table(needs: tuple[Need, ...], title: str) -> Table:
    table = _table(title)
    for column in ("bucket", "wrapper", "kernel"):
        table.add_column(column, no_wrap=column != "bucket")
    for column in ("float bytes", "integer bytes"):
        table.add_column(column, no_wrap=True, justify="right")
    for need in needs:
        integers = "8 MiB, grows" if need.int_bytes is None else f"{need.int_bytes:,}"
        float_bytes = f"{need.float_bytes:,}"
        table.add_row(need.bucket, need.wrapper, need.kernel, float_bytes, integers)
    return table


def _print_defect(defect: KnownDefect, console: Console) -> None:
    since = f"until {defect.first_right}" if defect.first_right else "in every version"
    console.print(f"  [yellow]{escape(defect.name)}[/yellow], {since}", highlight=False)
    for line in (f"instead: {defect.instead}", f"report: {defect.report}"):
        console.print(Padding(escape(line), (0, 0, 0, 4)), highlight=False)
    console.print()


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )

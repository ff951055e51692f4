"""The command `pagedattn precompile`: kernels that a service's first request need not wait for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagedattn.precompile.environment import build_environment
from pagedattn.precompile.events import Event
from pagedattn.precompile.failures import Failure
from pagedattn.precompile.families import Family, families_of
from pagedattn.precompile.lock import Held, only_one
from pagedattn.precompile.runner import Outcome, Steps, run_child
from pagedattn.toolchain import FLASHINFER_PACKAGE, find_nvcc, flashinfer_cache, package_version

BACKENDS = ("flashinfer", "triton")
LOG_NAME = "pagedattn-precompile.log"


@dataclass(frozen=True)
class Heads:
    """What Triton's kernels are compiled for besides.

    Attributes:
        qo_heads: Query heads.
        kv_heads: Key and value heads.
        page_size: Tokens of a page.
        causal: Whether the mask is.
    """

    qo_heads: int
    kv_heads: int
    page_size: int
    causal: bool


@dataclass(frozen=True)
class Work:
    """What is asked for.

    Attributes:
        families: Of FlashInfer's kernels; Triton's are compiled for the same layers.
        heads: For Triton's kernels; `None`: those are left out.
        arch: GPU architecture.
        jobs: Compilers at once; `None`: as ninja sees fit.
        backends: Some of `BACKENDS`.
    """

    families: tuple[Family, ...]
    heads: Heads | None
    arch: str
    jobs: int | None
    backends: tuple[str, ...]


@click.command(short_help="Compile kernels ahead of time, without a GPU too.")
@click.option(
    "--head-dim", "head_dims", type=int, multiple=True, required=True,
    help="Elements of one head; may be repeated.",
)  # fmt: skip
@click.option(
    "--dtype", "dtypes", type=click.Choice(["bf16", "fp16"]), multiple=True, default=["bf16"],
    show_default=True, help="May be repeated.",
)  # fmt: skip
@click.option("--window", is_flag=True, help="For layers with a window.")
@click.option("--soft-cap", is_flag=True, help="For layers with a soft cap.")
@click.option(
    "--kernel", "kernels", type=click.Choice(["fa2", "fa3"]), multiple=True,
    help="Of FlashInfer; may be repeated. [default: fa2, and fa3 where the GPU has it]",
)  # fmt: skip
@click.option("--arch", help="GPU architecture, such as 9.0a. [default: the GPU here]")
@click.option(
    "--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS,
    show_default=True, help="May be repeated.",
)  # fmt: skip
@click.option(
    "--qo-heads", type=click.IntRange(min=1), help="Query heads; only Triton's kernels need them."
)
@click.option("--kv-heads", type=click.IntRange(min=1), help="Key and value heads; likewise.")
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--causal/--non-causal", default=True, show_default=True, help="Of Triton's kernels.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers at once. [default: ninja's choice]"
)
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="For another process that compiles."
)
def precompile(
    head_dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    window: bool,
    soft_cap: bool,
    kernels: tuple[str, ...],
    arch: str | None,
    backends: tuple[str, ...],
    qo_heads: int | None,
    kv_heads: int | None,
    page_size: int,
    causal: bool,
    jobs: int | None,
    wait: bool,
) -> None:
    """Compile kernels ahead of time, so that a service compiles nothing.

    Works without a GPU. FlashInfer's take minutes each on two cores; what is compiled already is
    left as it is.
    """
    arch = _arch(arch)
    heads = None
    if qo_heads is not None and kv_heads is not None:
        if qo_heads % kv_heads:
            raise click.UsageError(
                f"--qo-heads {qo_heads} must be divisible by --kv-heads {kv_heads}"
            )
        heads = Heads(qo_heads, kv_heads, page_size, causal)
    elif backends == ("triton",):
        raise click.UsageError("Triton's kernels need --qo-heads and --kv-heads")
    families = families_of(head_dims, dtypes, kernels, arch, window, soft_cap)
    console = Console()
    outcomes = _compile_alone(Work(tuple(families), heads, arch, jobs, backends), wait, console)
    if "triton" in backends and heads is None:
        console.print("Triton's cache is not warmed: give --qo-heads and --kv-heads")
    _report(outcomes, console)
    if any(outcome.failure for outcome in outcomes):
        sys.exit(1)


def _compile_alone(work: Work, wait: bool, console: Console) -> list[Outcome]:
    """Compile while no other process does so in this cache."""

    def waiting(holder: str) -> None:
        console.print(f"waiting for {holder}", markup=False, highlight=False)

    what = ", ".join(map(str, work.families))
    outcomes = []
    try:
        with only_one(flashinfer_cache(), what, waiting if wait else None):
            if "triton" in work.backends and work.heads is not None:
                outcomes.append(_warm_triton(work.families, work.heads, work.arch))
            if "flashinfer" in work.backends:
                outcomes.append(_build_flashinfer(work))
    except Held as held:
        raise click.ClickException(f"{held}\nleave out --no-wait to wait for it") from None
    except PermissionError as error:
        raise click.ClickException(f"{error}: FLASHINFER_WORKSPACE_BASE moves the cache") from None
    return outcomes


def _arch(arch: str | None) -> str:
    """The architecture, as FlashInfer's variable has it."""
    arch = arch or os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    if arch is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        arch = f"{major}.{minor}"
    if arch is None:
        raise click.UsageError("there is no GPU here: give --arch, 9.0a for an H100 or H200")
    if not re.fullmatch(r"\d+\.\d[af]?", arch):
        raise click.UsageError(f"--arch is one architecture such as 9.0a, got {arch!r}")
    return arch


def _build_flashinfer(work: Work) -> Outcome:
    nvcc = find_nvcc()
    lacking = None
    if package_version(FLASHINFER_PACKAGE) is None:
        lacking = Failure("FlashInfer is not installed", 'pip install "pagedattn[flashinfer]"')
    elif nvcc is None:
        lacking = Failure("there is no nvcc", "install the CUDA toolkit, or set CUDA_HOME to it")
    elif shutil.which("ninja") is None:
        lacking = Failure("there is no ninja", "pip install ninja")
    if lacking is not None or nvcc is None:
        return Outcome(failure=lacking)
    links = flashinfer_cache() / "pagedattn-links"
    environment = build_environment(nvcc, work.arch, work.jobs, links)
    arguments = json.dumps([dataclasses.asdict(family) for family in work.families])
    return _followed("pagedattn.precompile.child", arguments, environment)


def _warm_triton(families: tuple[Family, ...], heads: Heads, arch: str) -> Outcome:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    kinds = {
        (family.dtype, family.head_dim): {
            "num_qo_heads": heads.qo_heads,
            "num_kv_heads": heads.kv_heads,
            "head_dim": family.head_dim,
            "dtype": family.dtype,
            "causal": heads.causal,
            "window": family.window,
            "soft_cap": family.soft_cap,
            "page_size": heads.page_size,
            "capability": int(re.sub(r"\D", "", arch)),
        }
        for family in families
    }
    arguments = json.dumps(list(kinds.values()))
    return _followed("pagedattn.precompile.triton_child", arguments, environment)


def _followed(module: str, arguments: str, environment: dict[str, str]) -> Outcome:
    """Run a child with a progress bar for each thing that it compiles."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def follow(news: Event | Steps) -> None:
            if isinstance(news, Steps):
                progress.update(progress.task_ids[-1], completed=news.done, total=news.total)
            elif news.kind == "begin":
                progress.add_task(news.name, total=None)
            elif news.kind == "done":
                total = progress.tasks[-1].total or 1
                progress.update(progress.task_ids[-1], completed=total, total=total)

        outcome = run_child(module, arguments, environment, follow)
    if outcome.failure is not None:
        _log_path().write_text("\n".join(outcome.lines) + "\n")
    return outcome


def _report(outcomes: list[Outcome], console: Console) -> None:
    """What is done and where it is, and what failed."""
    for event in (event for outcome in outcomes for event in outcome.built):
        console.print(f"[green]ready[/green] {escape(event.name)}", highlight=False)
        console.print(f"  {escape(event.path)}", highlight=False, soft_wrap=True)
    for outcome in outcomes:
        if outcome.failure is None:
            continue
        console.print(f"[red]failed:[/red] {escape(outcome.failure.error)}", highlight=False)
        if outcome.failure.hint:
            console.print(f"  [cyan]{escape(outcome.failure.hint)}[/cyan]", highlight=False)
        if outcome.lines:
            console.print(f"  all output: {_log_path()}", markup=False, soft_wrap=True)


def _log_path() -> Path:
    return flashinfer_cache() / LOG_NAME

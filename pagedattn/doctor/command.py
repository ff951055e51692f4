"""The command `pagedattn doctor`: the examination as tables or JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedattn.doctor.abilities import Ability, abilities_of
from pagedattn.doctor.machine import Machine, examine
from pagedattn.toolchain import family_words


@click.command(short_help="Say what is installed, what works, and what cures the rest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def doctor(as_json: bool) -> None:
    """Say what is installed, what works here, and what cures what does not.

    Exit code 1 if no backend works.
    """
    machine = examine()
    abilities = abilities_of(machine)
    if as_json:
        said = {
            "machine": dataclasses.asdict(machine),
            "abilities": [
                {**dataclasses.asdict(ability), "works": not ability.problems}
                for ability in abilities
            ],
        }
        click.echo(json.dumps(said, indent=2))
    else:
        console = Console()
        console.print(_machine_table(machine))
        console.print(_cache_table(machine))
        console.print(_ability_table(abilities))
    if all(ability.problems for ability in abilities if ability.is_backend):
        sys.exit(1)


def _machine_table(machine: Machine) -> Table:
    table = _table("What is here")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_row("python", machine.python)
    for package in machine.packages:
        table.add_row(package.name, _found(package.version))
    table.add_row("CUDA of torch", _found(machine.torch_cuda))
    gpus = [f"{gpu.name}, compute capability {gpu.compute_capability}" for gpu in machine.gpus]
    table.add_row("GPU", "\n".join(map(escape, gpus)) or _found(None))
    table.add_row("NVIDIA driver", _found(machine.driver))
    nvcc = machine.nvcc
    table.add_row("nvcc", _found(None if nvcc is None else f"{nvcc.release}, {nvcc.path}"))
    table.add_row("c++", _found(machine.cxx))
    table.add_row("ninja", _found(machine.ninja))
    interprets = {None: _found(None), True: "interprets", False: "compiles, for a GPU"}
    table.add_row("Triton's kernels", interprets[machine.triton_interprets])
    return table


def _cache_table(machine: Machine) -> Table:
    table = _table(f"FlashInfer's compiled kernels, in {escape(machine.cache)}")
    table.add_column("version and GPU", no_wrap=True)
    table.add_column("kernels", overflow="fold")
    for folder in machine.compiled:
        lines = [escape(family_words(name)) for name in folder.kernels]
        lines += [f"[dim]{escape(family_words(n))}: unfinished[/dim]" for n in folder.unfinished]
        where = folder.path.removeprefix(machine.cache).strip("/").removesuffix("/cached_ops")
        table.add_row(escape(where), "\n".join(lines) or "none")
    if not machine.compiled:
        table.add_row("none", "`pagedattn precompile` makes them ahead of time")
    return table


def _ability_table(abilities: list[Ability]) -> Table:
    table = _table("What works")
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why not, and [cyan]the cure[/cyan]")
    for ability in abilities:
        problems = Table.grid(padding=(0, 1))
        problems.add_column()
        problems.add_column(overflow="fold")
        for problem in ability.problems:
            problems.add_row("-", f"{escape(problem.what)}\n[cyan]{escape(problem.cure)}[/cyan]")
        said = "[red]no[/red]" if ability.problems else "[green]yes[/green]"
        table.add_row(ability.name, said, problems if ability.problems else "")
    return table


def _found(text: str | None) -> str:
    return "[dim]none[/dim]" if text is None else escape(text)


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )

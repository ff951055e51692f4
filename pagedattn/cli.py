"""The command line: a group whose commands are imported when they are called.

Triton decides at its import whether it interprets, so nothing here may import it, directly or not.
"""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "check": "pagedattn.checking.run.check",
    "planted": "pagedattn.checking.planted.command.planted",
    "replay": "pagedattn.checking.replay.replay",
    "demo": "pagedattn.integrations.demo.demo",
    "show": "pagedattn.draw.show.show",
    "doctor": "pagedattn.doctor.command.doctor",
    "explain": "pagedattn.explain.command.explain",
    "precompile": "pagedattn.precompile.command.precompile",
    "bench": "pagedattn.bench.bench",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].rpartition(".")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.command(cls=_LazyGroup)
@click.version_option(package_name="pagedattn")
def main() -> None:
    """Attention over paged KV caches, and the checks that prove it right."""

"""The command `quiver`: noun, then verb.

`main` is the entry point. It maps every outcome to an exit code and prints every error as its code, its message and
what to do, on standard error, never as a traceback. Commands parse, call one function of a lower layer and print; they
hold no logic of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from quiver import __version__
from quiver.cli.options import examples
from quiver.cli.output import INTERRUPTED, PIPE_CLOSED, TERMINATED, Terminated, report_error
from quiver.errors import InvariantBroken

__all__ = ["main"]


SECTIONS = {
    "Records": ("produce", "consume", "tail", "work", "bench"),
    "Cluster": (
        "up",
        "node",
        "context",
        "status",
        "explain",
        "doctor",
        "top",
        "topic",
        "group",
        "consumer",
        "producer",
        "queue",
        "hold",
        "broker",
        "manager",
        "cluster",
        "security",
    ),
    "Access": ("user", "token", "role", "acl", "quota"),
    "Spark": ("pipeline",),
    "Files": ("log", "metadata", "backup", "recover"),
    "Install": ("deploy", "size"),
    "Reference": ("config", "gateway", "cli", "completion"),
    "Tests": ("sim", "history"),
}
"""All commands, in the order in which the help lists them."""
_MODULES = {
    "tail": "consume",
    "consumer": "clients",
    "producer": "clients",
    "user": "access",
    "token": "access",
    "role": "access",
    "status": "cluster",
    "hold": "cluster",
    "broker": "cluster",
    "cluster": "upgrade",
    "cli": "reference",
    "completion": "reference",
    "gateway": "reference",
    "history": "sim",
}
"""The module of a command, if it is not named like the command."""


class _Root(click.Group):
    """The root command.

    It imports only the module of the command that runs, so that a command does not wait for the libraries of others.
    It ends quietly when the reader of its output has gone (`quiver consume logs | head`).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [name for names in SECTIONS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return super().get_command(ctx, cmd_name)
        found: click.Command = getattr(import_module(f"quiver.cli.{_MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click suggests only commands that are imported
            raise click.NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for heading, names in SECTIONS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            lines = [(name.ljust(width), one.get_short_help_str(limit=80)) for name, one in found if one is not None]
            with formatter.section(heading):
                formatter.write_dl(lines)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _discard_output()
            ctx.exit(PIPE_CLOSED)


@click.group(
    cls=_Root,
    epilog=examples("quiver up", "quiver produce logs access.log", "quiver tail logs"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="quiver")
def quiver() -> None:
    """Work with Quiver, a replicated queue for log messages.

    Exit codes: 0 done, 1 damage or a violation found, 2 wrong usage or settings, 3 not available, 4 storage failed,
    5 outcome unknown, 70 a defect of Quiver.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default the process's own) and return the exit code."""
    try:
        code = quiver.main(args=arguments, prog_name="quiver", standalone_mode=False)
        sys.stdout.flush()  # inside `try`, where a closed pipe or a full disk can still be reported
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        return TERMINATED if isinstance(error.__cause__, Terminated) else INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except (Exception, InvariantBroken) as error:  # noqa: BLE001 - the edge: users never see a traceback
        return report_error(error)
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Redirect buffered output to /dev/null: the interpreter flushes once more when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""The command `quiver`: noun, then verb.

`main` is the only way in. It turns every outcome into an exit code and every error into its code, its
sentence and what to do about it on standard error; nobody sees a traceback. One file per noun; commands
parse, call one function of a lower layer and print, and hold no logic of their own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from quiver import __version__
from quiver.cli.exits import INTERRUPTED, PIPE_CLOSED, report
from quiver.errors import InvariantBroken

__all__ = ["main"]


_COMMANDS = ("broker", "config", "gateway", "history", "log", "metadata", "node", "sim", "status", "topic", "up")
"""Each is the command of that name in the module of that name."""


class _Root(click.Group):
    """Load a command's module when the command is asked for: a node must not wait for what it does not use.

    A command ends quietly when whoever read its output has gone (`quiver log dump … | head`).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            self.add_command(getattr(importlib.import_module(f"quiver.cli.{cmd_name}"), cmd_name))
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _discard_output()
            ctx.exit(PIPE_CLOSED)


@click.group(
    cls=_Root,
    epilog="Example: quiver log verify quiver-data/partition-0",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="quiver")
def quiver() -> None:
    """Work with Quiver, a replicated queue for log messages.

    Exit codes: 0 done, 1 damage or a defect found, 2 wrong usage or settings, 3 not available, 4 storage failed,
    5 outcome unknown, 70 a defect of Quiver.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default the process's own) and return the exit code."""
    try:
        code = quiver.main(args=arguments, prog_name="quiver", standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe or a full disk can still be told
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except (Exception, InvariantBroken) as error:  # noqa: BLE001 - the edge: nothing may leave here as a traceback
        return report(error)
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Let what is still buffered go nowhere: the interpreter flushes once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

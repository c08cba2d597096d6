"""`quiver history`: check a recorded history of client operations against the guarantees.

Exit code 1 means that an anomaly was found.
"""

from __future__ import annotations

import click

from quiver.cli.exits import FOUND
from quiver.cli.options import json_option
from quiver.cli.output import print_json
from quiver.errors import DecodeError
from quiver.testing.history import HistoryError, check_history, parse_history


@click.group(epilog="Example: quiver history check history.jsonl")
def history() -> None:
    """Check recorded histories of client operations."""


@history.command(epilog="Example: quiver history check chaos/history.jsonl")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@json_option
@click.pass_context
def check(context: click.Context, *, file: str, as_json: bool) -> None:
    """Find violations of the guarantees: lost, duplicated, reordered and changed records, stale reads.

    FILE holds one event per line; the module `quiver.testing.history.events` describes the format.
    """
    try:
        with open(file, encoding="utf-8") as lines:
            verdict = check_history(parse_history(lines))
    except HistoryError as error:
        raise DecodeError(str(error)) from error
    if as_json:
        print_json(verdict.to_json())
    else:
        click.echo(str(verdict))
    if not verdict.is_clean:
        context.exit(FOUND)

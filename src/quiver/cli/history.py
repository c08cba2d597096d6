"""`quiver history`: judge what clients of a cluster recorded.

Exit code 1 means that something was found.
"""

from __future__ import annotations

import click

from quiver.cli.exits import FOUND
from quiver.cli.output import print_json
from quiver.errors import DecodeError
from quiver.testing.judge import HistoryError, judge, parse_history


@click.group(epilog="Example: quiver history check history.jsonl")
def history() -> None:
    """Judge what clients of a cluster recorded."""


@history.command(epilog="Example: quiver history check chaos/history.jsonl")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(context: click.Context, *, file: str, as_json: bool) -> None:
    """Find what contradicts the promises: lost, doubled, reordered and changed records, stale answers.

    FILE holds one event a line; the module `quiver.testing.judge.events` tells the format.
    """
    try:
        with open(file, encoding="utf-8") as lines:
            verdict = judge(parse_history(lines))
    except HistoryError as error:
        raise DecodeError(str(error)) from error
    if as_json:
        print_json(verdict.to_json())
    else:
        click.echo(str(verdict))
    if not verdict.is_clean:
        context.exit(FOUND)

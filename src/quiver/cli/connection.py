"""How commands reach a cluster: `--url`, the SDK behind it, and what commands that use it have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

import quiver
from quiver.errors import QuiverError

DEFAULT_URL = "http://127.0.0.1:8002"
COMPLETION_S = 2.0
"""How long whoever presses the tabulator key waits for a cluster."""

Command = TypeVar("Command", bound=Callable[..., Any])


def url_option(command: Command) -> Command:
    """Give a command `--url`."""
    return click.option(
        "--url",
        default=DEFAULT_URL,
        show_default=True,
        help="Any node of the cluster, several with commas between: HTTP or wire addresses.",
    )(command)


def json_option(command: Command) -> Command:
    """Give a command `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def partitions_option(command: Command) -> Command:
    """Give a command `--partition`, as often as is wished."""
    return click.option(
        "--partition",
        "partitions",
        type=click.IntRange(min=0),
        metavar="N",
        multiple=True,
        help="Only this partition; may be repeated.",
    )(command)


def topic_argument(command: Command) -> Command:
    """Give a command TOPIC, which shells complete with the names that there are."""
    return click.argument("topic", shell_complete=_complete_topic)(command)


def connect(url: str, **options: Any) -> quiver.Cluster:
    """Return a connection to the cluster; use as ``with``."""
    return quiver.connect(*(part.strip() for part in url.split(",") if part.strip()), **options)


def _complete_topic(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    with suppress(QuiverError), connect(context.params.get("url") or DEFAULT_URL, timeout=COMPLETION_S) as cluster:
        return [topic for topic in cluster.list_topics() if topic.startswith(incomplete)]
    return []

"""How commands reach a cluster: `--url`, and the SDK behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

import quiver

DEFAULT_URL = "http://127.0.0.1:8002"
Command = TypeVar("Command", bound=Callable[..., Any])


def url_option(command: Command) -> Command:
    """Give a command `--url`."""
    return click.option(
        "--url",
        default=DEFAULT_URL,
        show_default=True,
        help="Any node of the cluster, several with commas between: HTTP or wire addresses.",
    )(command)


def connect(url: str) -> quiver.Cluster:
    """Return a connection to the cluster; use as ``with``."""
    return quiver.connect(*(part.strip() for part in url.split(",") if part.strip()))

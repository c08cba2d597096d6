"""Where to begin, as it is said on the command line: `earliest`, `latest`, an offset, a time, or how long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import msgspec

from quiver.client.consumer import Where

START_HELP = "earliest, latest, an offset, a time (2026-01-31T12:00, UTC unless it says else), or how long ago (15m)"

_AGO = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class Start(msgspec.Struct, frozen=True):
    """A place in every partition: an offset or word, or else a time."""

    offset: Where | None = None
    timestamp: datetime | None = None


class StartType(click.ParamType[Start]):
    """Parse a `Start`."""

    name = "where"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """Return what the help shows in its place."""
        return "WHERE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Start:
        """Return what is meant by a word."""
        if isinstance(value, Start):
            return value
        if value in ("earliest", "latest"):
            return Start(offset=value)
        if value.isascii() and value.isdigit():
            return Start(offset=int(value))
        try:
            return Start(timestamp=_parse_time(value))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is none of: {START_HELP}", param, ctx)


def _parse_time(value: str) -> datetime:
    if ago := _AGO.fullmatch(value):
        return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    moment = datetime.fromisoformat(value)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

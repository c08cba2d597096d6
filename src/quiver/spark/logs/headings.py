"""Where the parts of a line are: its time, level, source, host and thread, and the message that follows.

Lines that name their fields (JSON, logfmt) are told from others, which are taken apart by the first layout that fits.
This is done once for each masked form of a line: lines of one form have their parts at the same places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from quiver.spark.logs import fields, levels
from quiver.spark.logs.headers import Layout
from quiver.spark.logs.tokens import first_line

PARTS: Final = ("source", "host", "thread")
Span = tuple[int, int]
_STARTING: Final = re.compile(levels.STARTING.encode())
_JSON: Final = re.compile(fields.IS_JSON.encode(), re.DOTALL)
_LOGFMT: Final = re.compile(fields.IS_LOGFMT.encode(), re.DOTALL)


PLAIN: Final = (Layout("^(?P<message>.*)$", ""),)
"""The layouts of a text that is all message, such as a field of a line that names its fields."""


class Heading(msgspec.Struct, frozen=True):
    """Where the parts of a line are, in bytes from its start."""

    message: int
    names_fields: str = ""
    """`json` or `logfmt` for a line that names its fields."""
    notation: str = ""
    time: Span | None = None
    level: str | None = None
    source: Span | None = None
    host: Span | None = None
    thread: Span | None = None


class Reader:
    """Takes lines apart by layouts."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._names_fields = layouts is not PLAIN
        self._layouts = [(layout, re.compile(layout.pattern.encode(), re.DOTALL)) for layout in layouts]

    def read(self, line: bytes) -> Heading:
        """Return where the parts of a line are. A line that no layout fits is its own message.

        Layouts see what was masked: beyond it, lines of one form have nothing in common.
        """
        if self._names_fields and line[:1] in (b"{", b" ") and _JSON.match(line):
            return Heading(0, "json")
        if self._names_fields and b"=" in line[:80] and _LOGFMT.match(line):
            return Heading(0, "logfmt")
        head = first_line(line)
        for layout, search in self._layouts:
            match = search.match(head)
            if match is not None:
                return _heading(layout, match)
        return Heading(0, level=_starting_level(head))


def _heading(layout: Layout, match: re.Match[bytes]) -> Heading:
    spans: dict[str, Span] = {name: match.span(name) for name, text in match.groupdict().items() if text}
    message = match.start("message")
    level = match["level"] if "level" in spans else None
    return Heading(
        message,
        notation=layout.notation,
        time=_time(match) if layout.notation else None,
        level=levels.level_of(level.decode()) if level else _starting_level(match["message"]),
        source=spans.get("source") or spans.get("tag"),
        host=spans.get("host"),
        thread=spans.get("thread"),
    )


_STAMP_GROUPS: Final = frozenset("YymdbHMSfzpe")


def _time(match: re.Match[bytes]) -> Span:
    """Return where the stamp is: all its groups, with the name of the month before and the zone after them."""
    spans = [match.span(name) for name, text in match.groupdict().items() if name in _STAMP_GROUPS and text]
    return min(start for start, _ in spans), max(end for _, end in spans)


def _starting_level(message: bytes) -> str | None:
    match = _STARTING.match(message)
    return levels.level_of(match["level"].decode()) if match else None

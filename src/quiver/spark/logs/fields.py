"""Lines that name their fields: JSON objects and logfmt."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from quiver.spark.logs.columns import Column, pa, pc

TIME_NAMES: Final = (
    "time",
    "timestamp",
    "@timestamp",
    "ts",
    "datetime",
    "date",
    "t",
    "asctime",
    "eventTime",
    "instant",
)
LEVEL_NAMES: Final = ("level", "severity", "lvl", "loglevel", "log_level", "levelname", "priority", "log.level")
SOURCE_NAMES: Final = ("source", "service", "logger", "component", "app", "name", "module", "log.logger", "logger_name")
HOST_NAMES: Final = ("host", "hostname", "host.name", "node", "pod", "instance")
THREAD_NAMES: Final = ("thread", "pid", "thread_name", "threadName", "process", "tid", "goroutine")
MESSAGE_NAMES: Final = ("message", "msg", "event", "text", "log", "body", "short_message")
NAMES: Final = {
    "time": TIME_NAMES,
    "level": LEVEL_NAMES,
    "source": SOURCE_NAMES,
    "host": HOST_NAMES,
    "thread": THREAD_NAMES,
    "message": MESSAGE_NAMES,
}
"""The names that each column goes by, the more common first."""
IS_JSON: Final = r"^\s*\{.*\}\s*$"
IS_LOGFMT: Final = r"^\s*(?:[A-Za-z_][\w.@-]*=(?:\"(?:[^\"\\]|\\.)*\"|[^\s\"=]*)\s+){2,}[A-Za-z_][\w.@-]*="
_DECODER: Final = msgspec.json.Decoder(dict[str, Any])


def read_json(lines: Column) -> dict[str, Column]:
    """Return the columns of JSON objects; a column is null where the object does not have it.

    A line that is not valid JSON has all columns null.
    """
    rows = [_decode(line) for line in lines.cast(pa.binary()).to_pylist()]
    return {column: pa.array([_first(row, names) for row in rows], pa.string()) for column, names in NAMES.items()}


def _decode(line: bytes) -> dict[str, Any]:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _first(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            return value
        if isinstance(value, dict | list):
            return msgspec.json.encode(value).decode()
        return str(value)
    return None


def read_logfmt(lines: Column) -> dict[str, Column]:
    """Return the columns of lines of `name=value` pairs; a column is null where a line does not have it."""
    return {column: _logfmt(lines, names) for column, names in NAMES.items()}


def _logfmt(lines: Column, names: tuple[str, ...]) -> Column:
    found = pa.nulls(len(lines), pa.string())
    for name in names:
        pattern = rf"(?:^|\s){re.escape(name)}=(?:\"(?P<quoted>(?:[^\"\\]|\\.)*)\"|(?P<plain>[^\s\"]*))"
        groups = pc.extract_regex(lines, pattern)
        quoted, plain = groups.field(0), groups.field(1)
        value = pc.if_else(pc.equal(quoted, ""), plain, pc.replace_substring(quoted, '\\"', '"'))
        found = pc.coalesce(found, pc.if_else(pc.is_null(groups), None, value))
    return found


READERS: Final = {"json": read_json, "logfmt": read_logfmt}
"""How the fields of lines that name them are read."""

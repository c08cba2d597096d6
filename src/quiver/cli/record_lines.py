"""One record as facts for JSON, or as a line for people.

Bytes that are not text are shown in base64. Where a terminal reads, control characters are shown as escapes: a record
must not be able to move its cursor, or worse.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

from quiver.record.records import Record

Facts = dict[str, Any]


def describe_record(record: Record) -> Facts:
    """Return what is known of a record, by the names that JSON output has; without what it has not."""
    facts: Facts = {} if record.partition is None else {"partition": record.partition}
    facts |= {"offset": record.offset, "timestamp": record.timestamp, "value": as_text(record.value)}
    if record.key is not None:
        facts["key"] = as_text(record.key)
    if record.headers:
        facts["headers"] = {name: as_text(value) for name, value in record.headers}
    return facts


def as_text(value: bytes | None) -> str | dict[str, str] | None:
    """Return bytes as text, or as `{"base64": …}` where they are not UTF-8."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def printable(value: bytes | None) -> str:
    """Return bytes as text that a terminal shows and does not obey."""
    text = "" if value is None else value.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else _escape(one) for one in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def format_time(timestamp: int) -> str:
    """Return milliseconds since 1970 as a UTC time, or as they are where the calendar does not reach."""
    try:
        moment = datetime.fromtimestamp(timestamp // 1000, UTC).replace(microsecond=timestamp % 1000 * 1000)
    except (OverflowError, ValueError, OSError):
        return str(timestamp)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

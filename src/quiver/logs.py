"""Format log events, one line each, as text or as JSON.

An event is a constant phrase and key=value facts, passed through `facts`, so that phrases can be searched for and
facts parsed:

    logger = logging.getLogger(__name__)
    logger.info("segment sealed", extra=facts(segment=name, size_bytes=size_bytes))

    2026-01-31T12:00:00.123Z INFO quiver.storage.log segment sealed segment=00000000000000000001.log size_bytes=67108864

Rules: INFO is a state change; a steady state logs nothing. Payloads and secrets are never logged: a fact of type bytes
is shown as its length only. An event never spans several lines, whatever its facts contain.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from quiver.clock import Clock
from quiver.config import LoggingSettings

FACT_CHARACTERS_MAX = 500
"""Longest fact that is logged completely; a longer one is truncated, since it is probably data."""

WARNING_INTERVAL_MS = 10_000
"""A `RateLimitedLogger` writes at most one warning per key in this interval."""
WARNING_KEYS_MAX = 1024
"""Keys that a `RateLimitedLogger` remembers; the oldest is evicted."""

_Fact = str | int | float | bool | None

_PLAIN = re.compile(r"[^\s\"'=\\]+")
_HANDLER_NAME = "quiver"


def facts(**values: object) -> dict[str, dict[str, object]]:
    """Return the `extra` argument of a logging call that attaches these facts to the event."""
    return {"facts": values}


def configure_logging(settings: LoggingSettings, stream: TextIO) -> None:
    """Log every event of at least the configured level to `stream`; replaces the handler of an earlier call.

    Applies to the events of libraries as well.
    """
    handler = logging.StreamHandler(stream)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.level.upper())


class TextFormatter(logging.Formatter):
    """Format an event as a line of text: time, level, logger, phrase, then `key=value` for each fact."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        head = (_time(record), record.levelname, record.name, _one_line(record.getMessage()))
        tail = (f"{key}={_quote(value)}" for key, value in _all_facts(record))
        return " ".join((*head, *tail))


class JsonFormatter(logging.Formatter):
    """Format an event as a JSON object with the keys `time`, `level`, `logger`, `event` and `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        event = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _encodable(record.getMessage()),
            "facts": dict(_all_facts(record)),
        }
        return msgspec.json.encode(event).decode()


def _all_facts(record: logging.LogRecord) -> Iterator[tuple[str, _Fact]]:
    given: Mapping[str, Any] = getattr(record, "facts", {})
    for key, value in given.items():
        yield key, _simplify(value)
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        yield "error", _simplify(f"{type(error).__name__}: {error}")
        yield "traceback", _encodable(logging.Formatter().formatException(record.exc_info))


def _simplify(value: object) -> _Fact:
    """Return a fact as a value that text and JSON can show, without payload bytes."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    text = _encodable(str(value))
    cut = len(text) - FACT_CHARACTERS_MAX
    return text if cut <= 0 else f"{text[:FACT_CHARACTERS_MAX]}… ({cut} more)"


def _quote(value: _Fact) -> str:
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.isprintable()):
        return _escape(value)
    return str(value)


def _one_line(text: str) -> str:
    return text if text.isprintable() else _escape(text)


def _escape(text: str) -> str:
    """Return text in quotes, with control characters and line breaks escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _encodable(text: str) -> str:
    """Return text that can be encoded as UTF-8: file names may contain surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class RateLimitedLogger:
    """Write warnings that remote programs can cause, at most one per key in `WARNING_INTERVAL_MS`.

    The next warning of a key says in `suppressed` how many were not written since the last one.
    """

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        # By key, oldest first: when it was last written, and how many warnings were suppressed since.
        self._written: dict[str, tuple[int, int]] = {}

    def warn(self, key: str, event: str, **about: object) -> None:
        """Write a warning, unless one of the same key was written within the interval."""
        now_ms = self._clock.monotonic_ms()
        written_ms, suppressed = self._written.get(key, (now_ms - WARNING_INTERVAL_MS, 0))
        if now_ms - written_ms < WARNING_INTERVAL_MS:
            self._written[key] = (written_ms, suppressed + 1)
            return
        self._written.pop(key, None)
        if len(self._written) >= WARNING_KEYS_MAX:
            del self._written[next(iter(self._written))]
        self._written[key] = (now_ms, 0)
        if suppressed:
            about["suppressed"] = suppressed
        self._logger.warning(event, extra=facts(**about))

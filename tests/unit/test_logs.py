"""Events come out as one line each, with their facts, and never with a payload."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from quiver.config import LoggingSettings
from quiver.logs import FACT_CHARACTERS_MAX, JsonFormatter, TextFormatter, configure_logging, facts

logger = logging.getLogger("quiver.somewhere")


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def event(phrase: str = "segment sealed", *arguments: object, error: Exception | None = None, **given: object) -> str:
    record = make_record(phrase, *arguments, error=error, **given)
    return TextFormatter().format(record)


def make_record(phrase: str, *arguments: object, error: Exception | None = None, **given: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    record = logger.makeRecord(
        logger.name, logging.INFO, "file.py", 1, phrase, arguments, exc_info, extra=facts(**given)
    )
    record.created = 1_769_860_800.1234
    return record


def test_text_line_has_time_level_logger_phrase_and_facts() -> None:
    head, _, tail = event(segment="1.log", size_bytes=64, sealed=True, vote=None).partition(" segment=")
    assert head == "2026-01-31T12:00:00.123Z INFO quiver.somewhere segment sealed"
    assert tail == "1.log size_bytes=64 sealed=True vote=None"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        ('a"b', r'"a\"b"'),
        ("a=b", '"a=b"'),
        ("a\nb", r'"a\nb"'),
        ("größe", "größe"),
        ("größe 1", '"größe 1"'),
        ("a\u2028b", r'"a\u2028b"'),
        ("\x1b[31m", r'"\u001b[31m"'),
        ("\udcff", r'"\\udcff"'),
        (b"secret", '"<6 bytes>"'),
        (memoryview(b"secret"), '"<6 bytes>"'),
        (bytearray(3), '"<3 bytes>"'),
        (1.5, "1.5"),
        ((1, "x"), '''"(1, 'x')"'''),
    ],
)
def test_fact_is_shown_so_that_it_can_be_parsed_back(value: object, shown: str) -> None:
    assert event(fact=value).endswith(f" fact={shown}")


def test_long_fact_is_cut() -> None:
    line = event(fact="x" * (FACT_CHARACTERS_MAX + 7))
    assert line.endswith(' fact="' + "x" * FACT_CHARACTERS_MAX + '… (7 more)"')


def test_event_without_facts_is_its_phrase() -> None:
    record = logging.LogRecord("asyncio", logging.DEBUG, "f", 1, "took %s seconds", (3,), None)
    assert TextFormatter().format(record).endswith(" DEBUG asyncio took 3 seconds")


def test_phrase_cannot_break_the_line() -> None:
    assert "\n" not in event("one\ntwo")


def test_error_is_told_on_the_same_line() -> None:
    line = event(error=ValueError("so\nbad"))
    assert r'error="ValueError: so\nbad" traceback="' in line
    assert "\n" not in line


def test_exception_info_without_an_exception_is_ignored() -> None:
    record = make_record("x")
    record.exc_info = (None, None, None)
    assert TextFormatter().format(record).endswith(" x")


def test_json_line_is_an_object_with_the_same_facts() -> None:
    record = make_record("segment sealed", segment="1.log", size_bytes=64, raw=b"xx", ratio=float("nan"))
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2026-01-31T12:00:00.123Z",
        "level": "info",
        "logger": "quiver.somewhere",
        "event": "segment sealed",
        "facts": {"segment": "1.log", "size_bytes": 64, "raw": "<2 bytes>", "ratio": None},
    }


def test_json_line_survives_names_that_are_not_utf8() -> None:
    error = OSError("\udcfe")
    line = JsonFormatter().format(make_record("x\udcff", error=error, name="\udcfd"))
    assert json.loads(line)["event"] == r"x\udcff"


def test_configured_level_and_format_are_used() -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(level="warning", format="json"), stream)
    logger.info("not this")
    logger.warning("this", extra=facts(number=1))
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["facts"] == {"number": 1}


def test_configuring_again_replaces_the_first_time() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(LoggingSettings(), first)
    configure_logging(LoggingSettings(level="debug"), second)
    logger.debug("once")
    assert first.getvalue() == ""
    assert second.getvalue().endswith("DEBUG quiver.somewhere once\n")

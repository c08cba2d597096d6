"""Time stamps: every notation is found and read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from quiver.spark.logs import learn
from quiver.spark.logs.columns import pa
from quiver.spark.logs.stamps import read_any
from quiver.spark.logs.timestamps import find_stamp

RECORDED = datetime(2024, 3, 10, 12, 0, tzinfo=UTC)

STAMPS = [
    ("2024-03-05T10:11:12Z", "iso", "2024-03-05T10:11:12"),
    ("2024-03-05T10:11:12.345678+02:00", "iso", "2024-03-05T08:11:12.345678"),
    ("2024-03-05 10:11:12,345", "iso", "2024-03-05T10:11:12.345"),
    ("2024-03-05 10:11:12.345 -0530", "iso", "2024-03-05T15:41:12.345"),
    ("2024/03/05 10:11:12", "iso", "2024-03-05T10:11:12"),
    ("2024-03-05-10.11.12.345678", "iso", "2024-03-05T10:11:12.345678"),
    ("2024-03-05T10:11:12.123456789Z", "iso", "2024-03-05T10:11:12.123456"),
    ("20240305-10:11:12:345", "compact-date", "2024-03-05T10:11:12.345"),
    ("20240305-1:7:2:9", "compact-date", "2024-03-05T01:07:02.900"),
    ("20240305T101112Z", "compact", "2024-03-05T10:11:12"),
    ("05/Mar/2024:10:11:12 +0100", "day-month-name-year", "2024-03-05T09:11:12"),
    ("Tue, 05 Mar 2024 10:11:12 GMT", "day-month-name-year", "2024-03-05T10:11:12"),
    ("Mar 5, 2024 10:11:12 PM", "month-name-year", "2024-03-05T22:11:12"),
    ("Tue Mar  5 10:11:12 2024", "ctime", "2024-03-05T10:11:12"),
    ("Tue Mar 05 10:11:12.345678 2024", "ctime", "2024-03-05T10:11:12.345678"),
    ("Mar  5 10:11:12", "syslog", "2024-03-05T10:11:12"),
    ("05.03.2024 10:11:12", "day-month-year", "2024-03-05T10:11:12"),
    ("03/25/2024 10:11:12 AM", "month-day-year", "2024-03-25T10:11:12"),
    ("24/03/05 10:11:12", "short-year", "2024-03-05T10:11:12"),
    ("240305 101112", "short-compact", "2024-03-05T10:11:12"),
    ("03-05 10:11:12.345", "month-day", "2024-03-05T10:11:12.345"),
    ("3.5 10:11:12", "month-day", "2024-03-05T10:11:12"),
    ("1709633472", "epoch", "2024-03-05T10:11:12"),
    ("1709633472.25", "epoch", "2024-03-05T10:11:12.250"),
    ("1709633472345", "epoch", "2024-03-05T10:11:12.345"),
    ("1709633472345678", "epoch", "2024-03-05T10:11:12.345678"),
    ("10:11:12.345", "clock", "2024-03-10T10:11:12.345"),
]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(("stamp", "notation", "time"), STAMPS)
def test_every_notation_is_found_and_read(stamp: str, notation: str, time: str) -> None:
    """A stamp is found at the start of a line with its end, by a regular expression and by the places of its digits."""
    found = find_stamp(f"{stamp} INFO started")
    assert found is not None
    assert (found.notation, found.start, found.end) == (notation, 0, len(stamp))
    near = np.array([int(RECORDED.timestamp() * 1_000_000)])
    assert read_any(pa.array([stamp]), near).to_pylist() == [_time(time)]


@pytest.mark.parametrize(("stamp", "notation", "time"), STAMPS)
def test_every_notation_is_read_from_lines(stamp: str, notation: str, time: str) -> None:
    """Lines that begin with a stamp have its time, and a message without it."""
    assert notation
    lines = pa.array([f"{stamp} INFO {text}" for text in ("started the engine", "stopped", "lost 3 of 7 parts")])
    rows = learn(lines).parse(lines, timestamps=pa.array([RECORDED] * 3))
    assert rows.column("time").to_pylist() == [_time(time)] * 3
    assert rows.column("message").to_pylist() == ["started the engine", "stopped", "lost 3 of 7 parts"]
    assert rows.column("level").to_pylist() == ["INFO"] * 3


def test_missing_year_is_the_nearest_one() -> None:
    """A stamp of December in a record of January is of the year before."""
    lines = pa.array([f"Dec 31 23:59:5{second} node app: tick {second}" for second in range(4)])
    recorded = pa.array([datetime(2024, 1, 1, 0, 5, tzinfo=UTC)] * 4)
    times: list[Any] = learn(lines).parse(lines, timestamps=recorded).column("time").to_pylist()
    assert {time.year for time in times} == {2023}


def test_one_stamp_decides_between_day_and_month() -> None:
    """05/06 is the sixth of May if another line of the source has a 25 in the second place."""
    lines = pa.array([f"05/{day:02d}/2024 10:11:12 worker said {day}" for day in (6, 7, 25, 26)])
    times: list[Any] = learn(lines).parse(lines).column("time").to_pylist()
    assert [(time.month, time.day) for time in times] == [(5, 6), (5, 7), (5, 25), (5, 26)]


@pytest.mark.parametrize(
    "text", ["port 1709633472345 of 12", "v1.2.3 build 20241399", "id=1234567890123 done", "a:b:c"]
)
def test_numbers_are_no_stamps(text: str) -> None:
    """Digits that no calendar has, or that belong to a longer word, are not taken for a time."""
    found = find_stamp(text)
    assert found is None or found.notation == "epoch"


def test_invalid_stamp_gives_null_time() -> None:
    """A line whose stamp is not valid keeps its row."""
    lines = pa.array(
        [f"2024-03-0{day} 10:11:12 INFO tick {day}" for day in range(1, 6)] + ["2024-03-05 25:11:12 INFO tick 9"]
    )
    rows = learn(lines).parse(lines)
    assert rows.column("time").null_count == 1
    assert rows.num_rows == 6


@pytest.mark.parametrize("text", ["Zone moved away", "ampersand seen", "pmd started up", "Zebra", "PMs left", "UTCx"])
def test_word_that_begins_like_a_zone_or_a_half_of_the_day_stays_in_the_message(text: str) -> None:
    """Only a whole word is a zone, AM or PM."""
    lines = pa.array([f"2024-03-05 10:11:1{second} {text}" for second in range(3)])
    rows = learn(lines).parse(lines)
    assert rows.column("message").to_pylist() == [text] * 3
    assert rows.column("time")[0].as_py() == datetime(2024, 3, 5, 10, 11, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("stamp", "recorded", "time"),
    [
        ("2024-03-05 10:11:12.345+02", "2024-03-10", "2024-03-05T08:11:12.345"),
        ("2024-03-05 10:11:12-07", "2024-03-10", "2024-03-05T17:11:12"),
        ("99/12/31 23:59:59", "2024-03-10", "1999-12-31T23:59:59"),
        ("2024-02-29 10:11:12", "2024-03-10", "2024-02-29T10:11:12"),
        ("Feb 29 10:11:12", "2025-01-05", "2024-02-29T10:11:12"),
        ("Feb 29 10:11:12", "2027-01-05", "2028-02-29T10:11:12"),
        ("23:59:58", "2024-03-10", "2024-03-09T23:59:58"),
        ("00:00:02", "2024-03-10", "2024-03-10T00:00:02"),
    ],
)
def test_zones_of_hours_short_years_leap_days_and_midnight(stamp: str, recorded: str, time: str) -> None:
    """Hours alone are a zone, a leap day is in a leap year, and a clock without a date is of the nearest day."""
    lines = pa.array([f"{stamp} INFO {text}" for text in ("started", "stopped", "lost 3")])
    near = datetime.fromisoformat(recorded).replace(second=5, tzinfo=UTC)
    rows = learn(lines).parse(lines, timestamps=pa.array([near] * 3))
    assert rows.column("time").to_pylist() == [datetime.fromisoformat(time).replace(tzinfo=UTC)] * 3
    assert rows.column("message").to_pylist() == ["started", "stopped", "lost 3"]


@pytest.mark.parametrize("stamp", ["2024-02-30 10:11:12", "2023-02-29 10:11:12", "2024-04-31 10:11:12"])
def test_date_that_no_calendar_has_gives_null_time(stamp: str) -> None:
    """A day that does not exist is not taken for one of the next month."""
    lines = pa.array([f"{stamp} INFO started"])
    assert learn(lines).parse(lines).column("time").to_pylist() == [None]

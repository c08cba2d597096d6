"""Time stamps of log lines: the notations that occur, and their conversion to microseconds, a column at a time.

A notation is a regular expression with named groups, valid for Python's `re` and for RE2 alike. Its groups are `Y`
(year), `y` (two digits of it), `m`, `d`, `b` (name of the month), `H`, `M`, `S`, `f` (fraction), `z` (zone), `p` (AM or
PM) and `e` (seconds, milliseconds, microseconds or nanoseconds since 1970).

A time without a zone is taken as UTC. A time without a year gets the year that puts it nearest to the record's own
timestamp, and a time without a date the day.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.spark.logs.columns import Bytes, Column, Flags, fill, pa, pc, strings_of

MICROSECONDS: Final = 1_000_000
_DAY: Final = 86_400 * MICROSECONDS
_CLOCK: Final = r"(?P<H>[012]?\d):(?P<M>[0-5]\d):(?P<S>[0-6]\d)"
_FRACTION: Final = r"(?:[.,:](?P<f>\d{1,9}))?"
_HALF: Final = r"(?: ?(?P<p>[AaPp][Mm])\b)?"
_ZONE: Final = r"(?P<z> ?(?:(?:Z|UTC|GMT)\b|[+-]\d{2}:?\d{2})|[+-]\d{2}\b)?"
_MONTH: Final = r"(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_WEEKDAY: Final = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},? )?"
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

_MONTH_DAYS: Final = np.array((31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), np.int64)
_FEBRUARY: Final = 2
_CENTURY_TURN: Final = 69
"""Years of two digits from this on are of the last century."""
_ZERO: Final = ord("0")
_DIGITS: Final = re.compile(r"[0-9]")

Micros = npt.NDArray[np.int64]


class Notation(msgspec.Struct, frozen=True):
    """One notation of time stamps."""

    name: str
    pattern: str

    @property
    def is_epoch(self) -> bool:
        """Whether the stamp counts from 1970, which leaves no question about its zone."""
        return self.name == "epoch"


_YEAR: Final = r"(?P<Y>(?:19|20)\d{2})"
_MONTH_NUMBER: Final = r"(?P<m>0?[1-9]|1[0-2])"
_DAY_NUMBER: Final = r"(?P<d>3[01]|[12]\d|0?[1-9])"
_TWO_DIGITS: Final = r"(?P<m>0[1-9]|1[0-2])(?P<d>0[1-9]|[12]\d|3[01])"
_LOOSE_CLOCK: Final = r"(?P<H>[012]?\d)[:.](?P<M>[0-5]?\d)[:.](?P<S>[0-6]?\d)"
_GLUED_CLOCK: Final = r"(?P<H>[012]\d):?(?P<M>[0-5]\d):?(?P<S>[0-6]\d)"
_AFTER: Final = _FRACTION + _HALF + _ZONE

NOTATIONS: Final = tuple(
    Notation(name, pattern)
    for name, pattern in (
        ("iso", rf"{_YEAR}[-/.]{_MONTH_NUMBER}[-/.]{_DAY_NUMBER}[T _:-]{_LOOSE_CLOCK}{_AFTER}"),
        ("compact-date", rf"{_YEAR}{_TWO_DIGITS}[T _:-]{_LOOSE_CLOCK}{_AFTER}"),
        ("compact", rf"{_YEAR}{_TWO_DIGITS}[T _:-]?{_GLUED_CLOCK}{_FRACTION}{_ZONE}"),
        ("day-month-name-year", rf"{_WEEKDAY}{_DAY_NUMBER}[ /-]{_MONTH}[ /-]{_YEAR}[ :,T]+{_CLOCK}{_AFTER}"),
        ("month-name-year", rf"{_WEEKDAY}{_MONTH} +{_DAY_NUMBER},? +{_YEAR},? +{_CLOCK}{_AFTER}"),
        ("ctime", rf"{_WEEKDAY}{_MONTH} +{_DAY_NUMBER} +{_CLOCK}{_FRACTION} +(?:[A-Z]{{3,4}} )?{_YEAR}"),
        ("syslog", rf"{_WEEKDAY}{_MONTH} +{_DAY_NUMBER},? +{_CLOCK}{_FRACTION}"),
        ("day-month-year", rf"{_DAY_NUMBER}[/.-]{_MONTH_NUMBER}[/.-]{_YEAR},? +{_CLOCK}{_AFTER}"),
        ("month-day-year", rf"{_MONTH_NUMBER}[/.-]{_DAY_NUMBER}[/.-]{_YEAR},? +{_CLOCK}{_AFTER}"),
        ("short-year", rf"(?P<y>\d{{2}})[/-]{_MONTH_NUMBER}[/-]{_DAY_NUMBER},? +{_CLOCK}{_AFTER}"),
        ("month-day-short-year", rf"{_MONTH_NUMBER}/{_DAY_NUMBER}/(?P<y>\d{{2}}),? +{_CLOCK}{_AFTER}"),
        ("short-compact", rf"(?P<y>\d{{2}}){_TWO_DIGITS} {_GLUED_CLOCK}{_FRACTION}"),
        ("glog", rf"{_TWO_DIGITS} {_CLOCK}{_FRACTION}"),
        ("month-day", rf"{_MONTH_NUMBER}[./-]{_DAY_NUMBER} +{_CLOCK}{_FRACTION}{_HALF}"),
        ("epoch", r"(?P<e>1\d{9}(?:\d{9}|\d{6}|\d{3})?)(?:\.(?P<f>\d{1,9}))?"),
        ("clock", rf"{_CLOCK}{_FRACTION}{_HALF}"),
    )
)
"""All notations, the more specific first: of two that start at the same character the earlier is taken."""
AMBIGUOUS: Final = {"day-month-year": "month-day-year", "short-year": "month-day-short-year"}
"""Notations that a stamp such as 05/06/2024 leaves open, with the other reading. If a source has stamps that only the
other reading fits, all its stamps have it."""
NOTATION: Final = {one.name: one for one in NOTATIONS}

_EDGE: Final = re.compile(r"[0-9A-Za-z]")
_SEARCHES: Final = tuple((one, re.compile(one.pattern)) for one in NOTATIONS)


class Stamp(msgspec.Struct, frozen=True):
    """Where a line's time stamp was found."""

    notation: str
    start: int
    end: int


def find_stamp(text: str, start: int = 0, *, end: int = 160) -> Stamp | None:
    """Return the first time stamp in `text[start:end]`, None without one."""
    found: Stamp | None = None
    for notation, search in _SEARCHES:
        for match in search.finditer(text, start, end):
            if found is not None and match.start() >= found.start:
                break
            if _stands_alone(text, match, notation):
                found = Stamp(notation.name, match.start(), match.end())
                break
    return found


def _stands_alone(text: str, match: re.Match[str], notation: Notation) -> bool:
    """Tell whether a match is a stamp by itself: not digits out of a longer number or word."""
    before = text[match.start() - 1 : match.start()] if match.start() else ""
    after = text[match.end() : match.end() + 1]
    if after.isdigit() or before.isdigit() or (notation.is_epoch and (_EDGE.match(before) or _EDGE.match(after))):
        return False
    if notation.name == "glog":
        return before in ("I", "W", "E", "F", "D")
    if notation.is_epoch:
        return before not in (".", "-", "_", ":", "/", "=") and after not in (".", "-", "_", ":", "/")
    return not (notation.name in ("clock", "month-day", "short-compact") and before.isalpha())


class Parts(msgspec.Struct):
    """The parts of stamps of one notation, as numbers: a column each, None where the notation does not have it."""

    year: Micros | None = None
    month: Micros | None = None
    day: Micros | None = None
    hour: Micros | None = None
    minute: Micros | None = None
    second: Micros | None = None
    micros: Micros | int = 0
    zone: Micros | int = 0
    epoch: Micros | None = None
    """Microseconds since 1970."""


def assemble(parts: Parts, near: Micros) -> tuple[Micros, Flags]:
    """Return microseconds since 1970, and which of them are valid.

    `near` are the records' own timestamps in microseconds, for stamps without a year or a date.
    """
    if parts.epoch is not None:
        return parts.epoch, parts.epoch >= 0
    hour, minute, second = parts.hour, parts.minute, parts.second
    assert hour is not None
    assert minute is not None
    assert second is not None
    valid: Flags = (hour >= 0) & (hour < 24) & (minute >= 0) & (minute < 60) & (second >= 0) & (second < 61)
    clock: Micros = ((hour * 60 + minute) * 60 + second) * MICROSECONDS + parts.micros - parts.zone
    if parts.day is None or parts.month is None:
        return _nearest_day(clock, near), valid
    month, day = parts.month, parts.day
    valid &= (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    month, day = np.where(valid, month, 1), np.where(valid, day, 1)
    if parts.year is not None:
        year = np.where(valid, parts.year, 1970)
        return _days(year, month, day) * _DAY + clock, valid & _exists(year, month, day)
    time, exists = _nearest_year(month, day, clock, near)
    return time, valid & exists


def read_groups(groups: Column, notation: str, near: Micros) -> tuple[Micros, Flags]:
    """Return microseconds since 1970 of stamps that a regular expression took apart, and which of them are valid.

    `groups` has a string child for each named group of the notation, null or empty where nothing matched.
    """
    fields = {groups.type.field(index).name: groups.field(index) for index in range(groups.type.num_fields)}
    fraction = _fractions(fields["f"]) if "f" in fields else np.zeros(len(groups), np.int64)
    if NOTATION[notation].is_epoch:
        return assemble(Parts(epoch=_epochs(fields["e"], fraction)), near)
    hour, minute, second = (_integers(fields[name]) for name in "HMS")
    if "p" in fields:
        half = np.asarray(strings_of(pc.utf8_lower(fill(fields["p"], ""))))
        hour = np.where(half == "pm", hour % 12 + 12, np.where(half == "am", hour % 12, hour))
    year = _integers(fields["Y"]) if "Y" in fields else _full_year(_integers(fields["y"])) if "y" in fields else None
    return assemble(
        Parts(
            year=year,
            month=_months(fields["b"]) if "b" in fields else _integers(fields["m"]) if "m" in fields else None,
            day=_integers(fields["d"]) if "d" in fields else None,
            hour=hour,
            minute=minute,
            second=second,
            micros=fraction,
            zone=_zones(fields["z"]) if "z" in fields else 0,
        ),
        near,
    )


class Shape:
    """Stamps of one length whose parts are all at the same places: they are read without a regular expression."""

    def __init__(self, notation: str, example: str) -> None:
        match = re.fullmatch(NOTATION[notation].pattern, example)
        assert match is not None, "an example is a stamp"
        self._groups = {name: (match.start(name), match.end(name)) for name, text in match.groupdict().items() if text}
        self._words = {name: text for name, text in match.groupdict().items() if text and name in "bpz"}
        bytes_ = np.frombuffer(example.encode(), np.uint8)
        self._is_digit = (bytes_ >= _ZERO) & (bytes_ <= _ZERO + 9)
        self._marks = bytes_[~self._is_digit]
        self.length = len(bytes_)

    def read(self, text: Bytes, starts: Micros, near: Micros) -> tuple[Micros, Flags]:
        """Return microseconds since 1970 of the stamps that start at places of a text, and which are of this shape."""
        found = text[starts[:, None] + np.arange(self.length)]
        digits = found[:, self._is_digit] - _ZERO
        fits = (digits < 10).all(axis=1) & (found[:, ~self._is_digit] == self._marks).all(axis=1)
        time, valid = assemble(self._parts(found), near)
        return time, fits & valid

    def _parts(self, found: Bytes) -> Parts:
        if "e" in self._groups:
            return Parts(epoch=self._epoch(found))
        hour = self._number(found, "H")
        if "p" in self._words and hour is not None:
            hour = hour % 12 + (12 if self._words["p"].lower() == "pm" else 0)
        short = self._number(found, "y")
        month = self._number(found, "m")
        if "b" in self._words:
            month = np.full(len(found), _MONTHS.index(self._words["b"].lower()) + 1, np.int64)
        return Parts(
            year=_full_year(short) if short is not None else self._number(found, "Y"),
            month=month,
            day=self._number(found, "d"),
            hour=hour,
            minute=self._number(found, "M"),
            second=self._number(found, "S"),
            micros=self._micros(found),
            zone=self._zone(found),
        )

    def _number(self, found: Bytes, name: str) -> Micros | None:
        return self._digits(found, *self._groups[name]) if name in self._groups else None

    def _digits(self, found: Bytes, start: int, end: int) -> Micros:
        value = np.zeros(len(found), np.int64)
        for place in range(start, end):
            value = value * 10 + (found[:, place] - _ZERO)
        return value

    def _micros(self, found: Bytes) -> Micros | int:
        if "f" not in self._groups:
            return 0
        start, end = self._groups["f"]
        end = min(end, start + 6)
        fraction: Micros = self._digits(found, start, end) * 10 ** (6 - (end - start))
        return fraction

    def _zone(self, found: Bytes) -> Micros | int:
        text = self._words.get("z", "")
        sign = text.strip()[:1]
        if sign not in ("+", "-"):
            return 0
        start, end = self._groups["z"]
        start += text.index(sign) + 1
        minutes = self._digits(found, start, start + 2) * 60
        if end > start + 2:
            minutes = minutes + self._digits(found, end - 2, end)
        zone: Micros = minutes * 60 * MICROSECONDS * (1 if sign == "+" else -1)
        return zone

    def _epoch(self, found: Bytes) -> Micros:
        start, end = self._groups["e"]
        count = self._digits(found, start, end)
        if end - start == 19:
            return count // 1000
        epoch: Micros = count * {10: MICROSECONDS, 13: 1000, 16: 1}[end - start]
        return epoch + (self._micros(found) if end - start == 10 else 0)


def shape_of(example: str) -> str:
    """Return what two stamps of one shape have in common: all that is not a digit, and how many digits there are."""
    return _DIGITS.sub("0", example)


def _epochs(texts: Column, fraction: Micros) -> Micros:
    lengths = np.asarray(fill(pc.binary_length(texts), 0))
    count = _integers(texts)
    scale = {10: MICROSECONDS, 13: 1000, 16: 1}
    time = np.where(lengths == 19, count // 1000, count)
    for digits, factor in scale.items():
        time = np.where(lengths == digits, count * factor, time)
    found: Micros = np.where(count >= 0, time + np.where(lengths == 10, fraction, 0), -1)
    return found


def _integers(texts: Column) -> Micros:
    """Return numbers; -1 where there is none."""
    known = pc.if_else(pc.equal(texts, ""), None, texts)
    return np.asarray(fill(pc.cast(known, pa.int64()), -1))


def _fractions(texts: Column) -> Micros:
    padded = pc.utf8_slice_codeunits(pc.utf8_rpad(fill(texts, ""), 6, "0"), 0, 6)
    return np.asarray(pc.cast(padded, pa.int64()))


def _months(names: Column) -> Micros:
    short = pc.utf8_lower(pc.utf8_slice_codeunits(fill(names, ""), 0, 3))
    return np.asarray(fill(pc.index_in(short, value_set=pa.array(_MONTHS)), -1)).astype(np.int64) + 1


def _zones(texts: Column) -> Micros:
    """Return the offsets of zones from UTC."""
    encoded = pc.dictionary_encode(fill(texts, ""))
    offsets = [_zone(text) for text in encoded.dictionary.to_pylist()]
    found: Micros = np.array(offsets or [0], np.int64)[np.asarray(encoded.indices)]
    return found


def _zone(text: str) -> int:
    text = text.strip()
    if text[:1] not in ("+", "-"):
        return 0
    digits = text[1:].replace(":", "")
    return (1 if text[0] == "+" else -1) * (int(digits[:2]) * 60 + int(digits[2:] or 0)) * 60 * MICROSECONDS


def _days(year: Micros, month: Micros, day: Micros) -> Micros:
    """Return days since 1970 of dates of the Gregorian calendar."""
    year = year - (month <= 2)
    era = np.floor_divide(year, 400)
    of_era = year - era * 400
    of_year = (153 * (month + np.where(month > 2, -3, 9)) + 2) // 5 + day - 1
    days: Micros = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days


def _exists(year: Micros, month: Micros, day: Micros) -> Flags:
    """Tell which dates the calendar has."""
    is_leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    found: Flags = day <= _MONTH_DAYS[month - 1] + ((month == _FEBRUARY) & is_leap)
    return found


def _full_year(short: Micros) -> Micros:
    """Return the year of two digits as POSIX reads them: from 1969 to 2068."""
    found: Micros = np.where(short >= _CENTURY_TURN, 1900, 2000) + short
    return found


def _nearest_day(clock: Micros, near: Micros) -> Micros:
    """Return the times of the day that are nearest to `near`: shortly after midnight that is one of the day before."""
    time = np.floor_divide(near, _DAY) * _DAY + clock
    found: Micros = time - np.floor_divide(time - near + _DAY // 2, _DAY) * _DAY
    return found


def _nearest_year(month: Micros, day: Micros, clock: Micros, near: Micros) -> tuple[Micros, Flags]:
    """Return the times in the year that puts them nearest to `near`, of those that have the date; and which exist."""
    middle = near.astype("datetime64[us]").astype("datetime64[Y]").astype(np.int64) + 1970
    steps = range(-4, 5) if ((month == _FEBRUARY) & (day > _MONTH_DAYS[1])).any() else range(-1, 2)
    choices = np.stack([_days(middle + step, month, day) * _DAY + clock for step in steps])
    exist = np.stack([_exists(middle + step, month, day) for step in steps])
    nearest = np.argmin(np.where(exist, np.abs(choices - near), np.iinfo(np.int64).max), axis=0)
    rows = np.arange(len(near))
    return choices[nearest, rows], exist[nearest, rows]

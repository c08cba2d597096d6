"""Columns of a message: its masked words, with dates, quantities and lists drawn together.

`Mon Jul 25 23:24:09 2005` is one value although it has five words, so is `281.6 KB`, and so is a list of numbers,
however long it is. A column that was drawn together shows one `MASK`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quiver.spark.logs.tokens import MASK

COLUMNS_MAX: Final = 256
"""A message has at most so many columns; the last one stands for the rest of it."""
STARS_MIN: Final = 3
"""So many stars stand for a value that is not known, as in a table."""
Columns = tuple[str, ...]

_DAYS: Final = (
    "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun",
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
_MONTHS: Final = (
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    "January", "February", "March", "April", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_ZONES: Final = (
    "UTC", "GMT", "EST", "EDT", "CST", "CDT", "MST", "MDT", "PST", "PDT", "CET", "CEST", "BST", "AM", "PM",
)  # fmt: skip
_UNITS: Final = frozenset(
    (
        "B", "KB", "kB", "MB", "GB", "TB", "PB", "KiB", "MiB", "GiB", "TiB",
        "ns", "us", "ms", "msec", "msecs", "s", "sec", "secs", "second", "seconds", "min", "mins", "minute", "minutes",
        "hr", "hrs", "hour", "hours", "day", "days",
    )
)  # fmt: skip
_TAIL: Final = ",;.:)]}>'\""


class Message(msgspec.Struct, frozen=True):
    """A masked message: its columns, and where each starts and ends in the masked text, in bytes."""

    columns: Columns
    spans: tuple[tuple[int, int], ...]


def read_message(masked: str) -> Message:
    """Return the columns of a masked message."""
    words = masked.split()
    bounds = _bounds(masked, words)
    columns: list[str] = []
    spans: list[tuple[int, int]] = []
    place = 0
    while place < len(words):
        end, column = _draw_together(words, place)
        if columns and _continues_list(columns[-1], column):
            columns[-1] = columns[-1].rstrip(",;") + column.lstrip(MASK + "*")
            spans[-1] = (spans[-1][0], end)
        else:
            columns.append(column)
            spans.append((place, end))
        place = end + 1
    if len(columns) > COLUMNS_MAX:
        spans[COLUMNS_MAX - 1 :] = [(spans[COLUMNS_MAX - 1][0], spans[-1][1])]
        columns[COLUMNS_MAX - 1 :] = [MASK]
    return Message(tuple(columns), tuple((bounds[first][0], bounds[last][1]) for first, last in spans))


def _bounds(masked: str, words: list[str]) -> list[tuple[int, int]]:
    """Return where words are in the masked text, in bytes."""
    found, at, end = [], 0, 0
    for word in words:
        start = masked.index(word, at)
        first = end + len(masked[at:start].encode())
        at, end = start + len(word), first + len(word.encode())
        found.append((first, end))
    return found


def _draw_together(words: list[str], place: int) -> tuple[int, str]:
    """Return the last word of the column that starts at `place`, and the column."""
    word = words[place]
    following = words[place + 1] if place + 1 < len(words) else ""
    if word[:1] in "MTWFSJAOND" and _is_date(word, following):
        return _end_of_date(words, place)
    if word.endswith(MASK) and following.rstrip(_TAIL) in _UNITS and following[:1] not in _TAIL:
        head = word[:-1].removesuffix("<") if word in ("<" + MASK, "~" + MASK) else word[:-1]
        return place + 1, head + MASK + following[len(following.rstrip(_TAIL)) :]
    if len(word) >= STARS_MIN and not word.strip("*"):
        return place, MASK
    return place, word


def _is_date(word: str, following: str) -> bool:
    bare = following.rstrip(",")
    if word.rstrip(",") in _DAYS:
        return bare in _MONTHS or bare == MASK
    return word in _MONTHS and bare == MASK


def _end_of_date(words: list[str], place: int) -> tuple[int, str]:
    end = place
    while end + 1 < len(words):
        bare = words[end + 1].rstrip(",")
        if bare != MASK and bare not in _MONTHS and bare not in _ZONES:
            break
        end += 1
    tail = words[end + 1].removeprefix(MASK) if end + 1 < len(words) and words[end + 1].startswith(MASK) else None
    if tail is not None and not tail.strip(_TAIL):
        return end + 1, MASK + tail
    return end, MASK


def _continues_list(column: str, following: str) -> bool:
    return column.rstrip(",;").endswith(MASK) and (following.startswith(MASK) or following.strip("*") == "")

"""Read the time stamps of many lines: those of one shape at once, by the places of their digits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from quiver.spark.logs.columns import Bytes, Column, Flags, Indices, fill, pa, pc, slices
from quiver.spark.logs.timestamps import NOTATIONS, Shape, read_groups, shape_of

TIME: Final = pa.timestamp("us", "UTC")


class Stamps:
    """The shapes of stamps that occurred, by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._shapes: list[tuple[str, Shape]] = []

    def number_of(self, notation: str, example: bytes) -> int:
        """Return the number of the shape of an example."""
        text = example.decode()
        key = (notation, shape_of(text))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._shapes)
            self._shapes.append((notation, Shape(notation, text)))
        return number

    def read(self, text: Bytes, starts: Indices, ends: Indices, shapes: Indices, near: Indices) -> Column:
        """Return the times of the stamps at places of a text; `shapes` is -1 for a line without one."""
        time = np.zeros(len(starts), np.int64)
        valid = np.zeros(len(starts), np.bool_)
        for number in np.unique(shapes):
            if number < 0:
                continue
            notation, shape = self._shapes[number]
            rows = np.flatnonzero(shapes == number)
            fits = rows[ends[rows] - starts[rows] == shape.length]
            time[fits], valid[fits] = shape.read(text, starts[fits], near[fits])
            odd = rows[~valid[rows]]
            if len(odd):
                time[odd], valid[odd] = _read_odd(text, starts[odd], ends[odd], notation, near[odd])
        return column_of_times(time, valid)


def _read_odd(text: Bytes, starts: Indices, ends: Indices, notation: str, near: Indices) -> tuple[Indices, Flags]:
    """Read stamps whose parts are elsewhere than in the example: other notations too, for one that is not valid."""
    texts = slices(text, starts, ends, pa.string())
    return _read_texts(texts, (notation, *(one.name for one in NOTATIONS if one.name != notation)), near)


def read_any(texts: Column, near: Indices) -> Column:
    """Return the times of stamps in any notation; null where there is none."""
    return column_of_times(*_read_texts(texts, tuple(one.name for one in NOTATIONS), near))


def _read_texts(texts: Column, notations: tuple[str, ...], near: Indices) -> tuple[Indices, Flags]:
    patterns = {one.name: one.pattern for one in NOTATIONS}
    time = np.zeros(len(texts), np.int64)
    missing = np.array(pc.is_valid(texts))
    known = np.zeros(len(texts), np.bool_)
    for name in notations:
        if not missing.any():
            break
        groups = pc.extract_regex(fill(texts, ""), rf"^\W?{patterns[name]}\W?$")
        matched = np.asarray(pc.is_valid(groups)) & missing
        if matched.any():
            own, valid = read_groups(groups, name, near)
            matched &= valid
            time, known, missing = np.where(matched, own, time), known | matched, missing & ~matched
    return time, known


def column_of_times(time: Any, valid: Any) -> Column:
    """Return microseconds as a column of times, null where they are not valid."""
    return pa.array(time, pa.int64(), mask=None if valid.all() else ~valid).cast(pa.timestamp("us")).cast(TIME)

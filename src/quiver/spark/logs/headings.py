"""Read the header of each line: its time, level, source, host and thread, and the message that follows.

Lines that name their fields (JSON, logfmt) are read by their names, all others by the first layout that fits. Each
layout is tried once, on all lines that no earlier layout fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from quiver.spark.logs import fields, levels
from quiver.spark.logs.columns import Column, Indices, fill, pa, pc
from quiver.spark.logs.headers import Layout
from quiver.spark.logs.timestamps import NOTATIONS, read_times

COLUMNS: Final = ("time", "level", "source", "host", "thread", "message")
_TIME: Final = pa.timestamp("us", "UTC")
_LEVELS_MAX: Final = 64
"""More different words than this in the place of a level are not levels."""


def read(text: Column, layouts: Sequence[Layout], near: Any) -> dict[str, Column]:
    """Return the columns of lines; `near` are the records' timestamps in microseconds, or None."""
    parts: list[dict[str, Column]] = []
    orders: list[Indices] = []
    left = np.arange(len(text))
    kinds: list[_Fields | _Formed] = [_Json(), _Logfmt(), *map(_Formed, layouts)]
    for kind in kinds:
        if not len(left):
            break
        own = text if len(left) == len(text) else text.take(pa.array(left))
        found = kind.read(own, None if near is None else near[left])
        if found is None:
            continue
        columns, matched = found
        rows = np.flatnonzero(matched)
        if len(rows) < len(left):
            columns = {name: column.take(pa.array(rows)) for name, column in columns.items()}
        parts.append(columns)
        orders.append(left[rows])
        left = left[~matched]
    if len(left) or not parts:
        parts.append(_bare(text.take(pa.array(left))))
        orders.append(left)
    return _with_levels(scatter(parts, orders))


def scatter(parts: Sequence[dict[str, Column]], orders: Sequence[Indices]) -> dict[str, Column]:
    """Put rows that were read in parts back into their order."""
    if len(parts) == 1 and len(orders[0]) == 0:
        return parts[0]
    places = np.argsort(np.concatenate(orders), kind="stable")
    if len(parts) == 1 and (np.diff(orders[0]) > 0).all():
        return parts[0]
    order = pa.array(places)
    return {name: pa.concat_arrays([part[name] for part in parts]).take(order) for name in COLUMNS}


def _bare(text: Column) -> dict[str, Column]:
    """Return the columns of lines without a header."""
    empty = pa.nulls(len(text), pa.string())
    return {
        "time": pa.nulls(len(text), _TIME),
        "level": empty,
        "source": empty,
        "host": empty,
        "thread": empty,
        "message": text,
    }


def _with_levels(columns: dict[str, Column]) -> dict[str, Column]:
    """Spell levels out; where the header has none, take the one that the message begins with."""
    level = columns["level"]
    if level.null_count:
        groups = pc.extract_regex(columns["message"], levels.STARTING)
        if groups.null_count < len(groups):
            level = pc.coalesce(level, pc.if_else(pc.is_valid(groups), groups.field(0), None))
    encoded = pc.dictionary_encode(level)
    words = [levels.level_of(word) for word in encoded.dictionary.to_pylist()]
    return {**columns, "level": pa.array(words, pa.string()).take(encoded.indices)}


class _Formed:
    """Lines that one layout fits."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def read(self, text: Column, near: Any) -> tuple[dict[str, Column], Any] | None:
        groups = pc.extract_regex(text, "(?s)" + self._layout.pattern)
        matched = np.asarray(pc.is_valid(groups))
        if not matched.any():
            return None
        names = [groups.type.field(index).name for index in range(groups.type.num_fields)]
        found = {name: groups.field(index) for index, name in enumerate(names)}
        columns = {name: _named(found, name, len(text)) for name in ("level", "source", "host", "thread")}
        if "tag" in found:
            columns["source"] = pc.coalesce(columns["source"], _named(found, "tag", len(text)))
        columns["time"], valid = self._time(groups, near)
        columns["message"] = found["message"]
        return columns, matched & valid

    def _time(self, groups: Column, near: Any) -> tuple[Column, Any]:
        if not self._layout.notation:
            return pa.nulls(len(groups), _TIME), np.ones(len(groups), np.bool_)
        time, valid = read_times(groups, self._layout.notation, near)
        return pa.array(time, pa.int64(), mask=~valid).cast(pa.timestamp("us")).cast(_TIME), valid


def _named(found: dict[str, Column], name: str, count: int) -> Column:
    """Return a group as a column, null where it is missing or empty."""
    if name not in found:
        return pa.nulls(count, pa.string())
    column = found[name]
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)


class _Fields:
    """Lines that name their fields."""

    pattern = ""

    def read(self, text: Column, near: Any) -> tuple[dict[str, Column], Any] | None:
        matched = np.asarray(pc.match_substring_regex(text, "(?s)" + self.pattern))
        if not matched.any():
            return None
        own = text if matched.all() else pc.if_else(pa.array(matched), text, "")
        columns = self.columns(own)
        found = np.zeros(len(text), np.bool_)
        for name in ("message", "time", "level"):
            found |= np.asarray(pc.is_valid(columns[name]))
        columns["message"] = pc.coalesce(columns["message"], text)
        columns["time"] = read_any(columns["time"], near)
        return columns, matched & found

    def columns(self, text: Column) -> dict[str, Column]:
        raise NotImplementedError


class _Json(_Fields):
    pattern = fields.IS_JSON

    def columns(self, text: Column) -> dict[str, Column]:
        return fields.read_json(text)


class _Logfmt(_Fields):
    pattern = fields.IS_LOGFMT

    def columns(self, text: Column) -> dict[str, Column]:
        return fields.read_logfmt(text)


def read_any(texts: Column, near: Any = None) -> Column:
    """Return the times of stamps in any notation; null where there is none."""
    time = np.zeros(len(texts), np.int64)
    missing = np.asarray(pc.is_valid(texts)).copy()
    known = np.zeros(len(texts), np.bool_)
    for notation in NOTATIONS:
        if not missing.any():
            break
        groups = pc.extract_regex(fill(texts, ""), rf"^\W?{notation.pattern}\W?$")
        matched = np.asarray(pc.is_valid(groups)) & missing
        if matched.any():
            own, valid = read_times(groups, notation.name, near)
            matched &= valid
            time, known, missing = np.where(matched, own, time), known | matched, missing & ~matched
    return pa.array(time, pa.int64(), mask=~known).cast(pa.timestamp("us")).cast(_TIME)

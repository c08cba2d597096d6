"""Records as Python objects, made when they are looked at.

`Records` is what a batch reads as: a sequence over columns that stay columns. It must never build
a record before somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import overload

import msgspec

from quiver.errors import DecodeError
from quiver.model import Offset
from quiver.record.columns import Columns
from quiver.record.header import BatchHeader

Headers = tuple[tuple[str, bytes | None], ...]


class Record(msgspec.Struct, frozen=True):
    """One record as a reader sees it; timestamps are milliseconds since 1970-01-01 UTC."""

    offset: Offset
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def text(self) -> str | None:
        """The value as text, None for a null; raises `DecodeError` if it is not UTF-8."""
        if self.value is None:
            return None
        try:
            return str(self.value, "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError(f"the value at offset {self.offset} is not UTF-8: {error}") from error


class Records(Sequence[Record]):
    """A lazy, immutable sequence of some of a batch's records; a slice of it is another one."""

    __slots__ = ("_columns", "_header", "_positions")

    def __init__(self, columns: Columns, header: BatchHeader, positions: range) -> None:
        """Take decoded columns and which of their positions the sequence consists of."""
        self._columns = columns
        self._header = header
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> Records: ...
    def __getitem__(self, at: int | slice) -> Record | Records:
        if isinstance(at, slice):
            return Records(self._columns, self._header, self._positions[at])
        position = self._positions[at]
        return next(self._read(range(position, position + 1)))

    def __iter__(self) -> Iterator[Record]:
        return self._read(self._positions)

    def _read(self, positions: range) -> Iterator[Record]:
        header, columns = self._header, self._columns
        offsets = range(header.base_offset + positions.start, header.base_offset + positions.stop, positions.step)
        timestamps: Iterable[int] = repeat(header.first_timestamp)
        if columns.timestamps is not None:
            timestamps = map(columns.timestamps.__getitem__, positions)
        keys: Iterable[bytes | None] = (
            repeat(None) if columns.keys is None else map(columns.keys.__getitem__, positions)
        )
        headers: Iterable[Headers] = repeat(())
        if columns.headers is not None:
            headers = map(columns.headers.__getitem__, positions)
        values = map(columns.values.__getitem__, positions)
        return map(Record, map(Offset, offsets), timestamps, keys, values, headers)

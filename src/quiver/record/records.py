"""Records as Python objects, made when they are looked at.

`Records` is what a batch reads as: a sequence over columns that stay columns. Iterating must
never build more than `CHUNK_RECORDS` values ahead of what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Final, cast, overload

import msgspec

from quiver.errors import DecodeError
from quiver.model import Offset, PartitionId
from quiver.record.columns import Columns
from quiver.record.header import BatchHeader

Headers = tuple[tuple[str, bytes | None], ...]


CHUNK_RECORDS: Final = 1024
"""Records extracted from the columns per step of an iteration: cheap per record, little waste if it stops early."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as a reader sees it; timestamps are milliseconds since 1970-01-01 UTC."""

    offset: Offset
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: PartitionId | None = None
    """The partition it was read from, if the reader set it."""

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

    __slots__ = ("_columns", "_header", "_partition", "_positions")

    def __init__(
        self, columns: Columns, header: BatchHeader, positions: range, partition: PartitionId | None = None
    ) -> None:
        """Take decoded columns, which of their positions the sequence consists of, and what records say of it."""
        self._partition = partition
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
            return Records(self._columns, self._header, self._positions[at], self._partition)
        position = self._positions[at]
        return next(self._read(first=position, end=position + 1))

    def __iter__(self) -> Iterator[Record]:
        positions = self._positions
        if positions.step != 1:
            return map(self.__getitem__, range(len(positions)))
        firsts = range(positions.start, positions.stop, CHUNK_RECORDS)
        ends = (min(first + CHUNK_RECORDS, positions.stop) for first in firsts)
        return chain.from_iterable(self._read(first=first, end=end) for first, end in zip(firsts, ends, strict=True))

    def _read(self, *, first: int, end: int) -> Iterator[Record]:
        header, columns = self._header, self._columns
        offsets = range(header.base_offset + first, header.base_offset + end)
        timestamps = columns.timestamps[first:end] if columns.timestamps else repeat(header.first_timestamp)
        keys = columns.keys.to_list(first=first, end=end) if columns.keys else repeat(None)
        values = columns.values.to_list(first=first, end=end)
        headers = map(columns.headers.__getitem__, range(first, end)) if columns.headers else repeat(())
        return map(
            Record, cast("Iterable[Offset]", offsets), timestamps, keys, values, headers, repeat(self._partition)
        )

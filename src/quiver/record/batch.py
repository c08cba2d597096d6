"""A batch: one buffer, read in place; and its records as a lazy sequence.

`Batch` wraps the bytes of one whole batch, header and stored payload, wherever they are: it never copies or changes
them. The payload is decompressed on first access, and kept until its columns are decoded, which are kept instead.
Whoever decodes a batch that others keep, such as a log's tail, decodes a copy of it (`undecoded`). Reading a batch
raises `DecodeError` and nothing else.

`Records` is a sequence over columns that stay columns. Iterating must never build more than `CHUNK_RECORDS` values
ahead of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final, overload

import msgspec

from quiver.errors import DecodeError
from quiver.model import Buffer, Index, Offset, PartitionId, Term
from quiver.record.columns import Columns, decode_columns
from quiver.record.compression import Compression, decompress
from quiver.record.header import (
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    BatchHeader,
    decode_header,
    read_header,
    stamp,
    verify_payload,
)

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
    topic: str | None = None
    """The topic it was read from, if the reader set it."""

    @property
    def text(self) -> str | None:
        """The value as text, None for a null; raises `DecodeError` if it is not UTF-8."""
        if self.value is None:
            return None
        try:
            return str(self.value, "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError(f"the value at offset {self.offset} is not UTF-8: {error}") from error

    def json(self) -> Any:
        """Return the value, parsed as JSON, None for a null; raises `DecodeError` if it is not JSON."""
        if self.value is None:
            return None
        try:
            return msgspec.json.decode(self.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"the value at offset {self.offset} is not JSON: {error}") from error


class Records(Sequence[Record]):
    """A lazy, immutable sequence of some of a batch's records; a slice of it is another one."""

    __slots__ = ("_columns", "_header", "_partition", "_positions", "_topic")

    def __init__(
        self,
        columns: Columns,
        header: BatchHeader,
        positions: range,
        partition: PartitionId | None = None,
        topic: str | None = None,
    ) -> None:
        """Take decoded columns, which of their positions the sequence consists of, and what records say of it."""
        self._partition, self._topic = partition, topic
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
            return Records(self._columns, self._header, self._positions[at], self._partition, self._topic)
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
        offsets: Any = range(header.base_offset + first, header.base_offset + end)  # integers that are offsets
        timestamps = columns.timestamps[first:end] if columns.timestamps else repeat(header.first_timestamp)
        keys = columns.keys.to_list(first=first, end=end) if columns.keys else repeat(None)
        values = columns.values.to_list(first=first, end=end)
        headers = map(columns.headers.__getitem__, range(first, end)) if columns.headers else repeat(())
        return map(
            Record,
            offsets,
            timestamps,
            keys,
            values,
            headers,
            repeat(self._partition),
            repeat(self._topic),
        )


class Batch:
    """One batch in memory; `len()` is its number of records. Get one from `Batch.decode`."""

    __slots__ = ("_columns", "_payload", "data", "header")

    def __init__(self, data: Buffer, header: BatchHeader) -> None:
        """Take exactly one batch's bytes and their decoded header."""
        self.data = data
        self.header = header
        self._payload: Buffer | None = None
        self._columns: Columns | None = None

    @classmethod
    def decode(
        cls, buffer: Buffer, position: int = 0, *, verify: bool = True, payload_bytes_max: int = PAYLOAD_BYTES_MAX
    ) -> Batch:
        """Return the batch that starts at `position`; what follows it in `buffer` is ignored.

        The buffer must not change while the batch is in use. Raises `DecodeError` if there is no whole batch,
        or if `verify` is set and its payload fails the checksum.
        """
        header = decode_header(buffer, position, payload_bytes_max=payload_bytes_max)
        batch_bytes = header.batch_bytes
        data = buffer
        if position or len(buffer) != batch_bytes:
            data = memoryview(buffer)[position : position + batch_bytes]
        if len(data) < batch_bytes:
            raise DecodeError(f"truncated batch: {len(data)} of {batch_bytes} bytes")
        if verify:
            verify_payload(data, header)
        return cls(data, header)

    @classmethod
    def stamped(cls, buffer: Buffer, *, term: Term, index: Index, base_offset: Offset, append_timestamp: int) -> Batch:
        """Return the batch in `buffer`, whose header was decoded before, with its stamp; see `stamp`."""
        data = stamp(buffer, term=term, index=index, base_offset=base_offset, append_timestamp=append_timestamp)
        return cls(data, read_header(data))

    def undecoded(self) -> Batch:
        """Return this batch without what was decoded of it; the bytes are shared."""
        return Batch(self.data, self.header)

    def __len__(self) -> int:
        return self.header.record_count

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} records from offset {self.header.base_offset}, {len(self.data)} bytes>"

    def verify(self) -> None:
        """Raise `DecodeError` unless the payload is what the producer made its checksum of."""
        verify_payload(self.data, self.header)

    def payload(self) -> Buffer:
        """Return the decompressed payload: columns for a data batch, whatever was put in for a control batch."""
        if self._payload is None:
            stored, header = memoryview(self.data)[HEADER_BYTES:], self.header
            if not header.compression and len(stored) == header.raw_bytes:
                self._payload = stored
            else:
                self._payload = decompress(stored, Compression(header.compression), raw_bytes=header.raw_bytes)
        return self._payload

    def records(
        self,
        first_offset: Offset | None = None,
        end_offset: Offset | None = None,
        *,
        partition: PartitionId | None = None,
        topic: str | None = None,
    ) -> Records:
        """Return the records from `first_offset` up to `end_offset`, as far as they are in this batch.

        `partition` and `topic` are what they say of where they come from: a batch does not know.
        """
        positions = self.positions(first_offset, end_offset)
        return Records(self._decode_columns(), self.header, positions, partition, topic)

    def values(self, first_offset: Offset | None = None, end_offset: Offset | None = None) -> list[bytes | None]:
        """Return the values from `first_offset` up to `end_offset`, as far as they are in this batch."""
        positions = self.positions(first_offset, end_offset)
        return self._decode_columns().values.to_list(first=positions.start, end=positions.stop)

    def headers(self, first_offset: Offset | None = None, end_offset: Offset | None = None) -> Iterator[Headers]:
        """Yield the headers of each record in a range of offsets; nothing if no record of the batch has any."""
        column = self._decode_columns().headers
        return iter(()) if column is None else map(column.__getitem__, self.positions(first_offset, end_offset))

    def rows(self, first_offset: Offset, end_offset: Offset) -> list[tuple[Any, ...]]:
        """Return (timestamp, value), and key and headers where the batch has any, of the records in a range of offsets.

        For answers with a few of a batch's records: no object is made per record but the tuple.
        """
        header, columns, positions = self.header, self._decode_columns(), self.positions(first_offset, end_offset)
        first, end = positions.start, positions.stop
        timestamps = columns.timestamps[first:end] if columns.timestamps else repeat(header.first_timestamp)
        values = columns.values.to_list(first=first, end=end)
        if columns.keys is None and columns.headers is None:
            return list(zip(timestamps, values, strict=False))
        keys = columns.keys.to_list(first=first, end=end) if columns.keys else repeat(None)
        if columns.headers is None:
            return list(zip(timestamps, values, keys, strict=False))
        headers = map(columns.headers.__getitem__, range(first, end))
        return list(zip(timestamps, values, keys, headers, strict=False))

    def record_lengths(self, first_offset: Offset, end_offset: Offset) -> Sequence[int]:
        """Return about how many bytes each record in a range of offsets has: its value, and an equal part of all else.

        Without keys, headers and timestamps of their own it is the value alone.
        """
        columns, positions = self._decode_columns(), self.positions(first_offset, end_offset)
        lengths = columns.values.lengths(first=positions.start, end=positions.stop)
        if columns.keys is None and columns.headers is None:
            return lengths
        count = self.header.record_count
        rest = self.header.raw_bytes - columns.values.data_bytes
        return [length + rest // count for length in lengths]

    def find_timestamp(self, timestamp: int) -> Offset | None:
        """Return the offset of the first record that is not older than `timestamp`; None if all are."""
        timestamps = self._decode_columns().timestamps or (self.header.first_timestamp,)
        at = next((at for at, own in enumerate(timestamps) if own >= timestamp), None)
        return None if at is None else Offset(self.header.base_offset + at)

    @property
    def has_headers(self) -> bool:
        """Whether records of the batch may have headers."""
        return self._decode_columns().headers is not None

    def positions(self, first_offset: Offset | None = None, end_offset: Offset | None = None) -> range:
        """Return which of the batch's records, counted from 0, are in a range of offsets; perhaps none."""
        base_offset, record_count = self.header.base_offset, self.header.record_count
        first = 0 if first_offset is None else max(0, first_offset - base_offset)
        end = record_count if end_offset is None else min(record_count, end_offset - base_offset)
        return range(first, end) if first < end else range(0)

    def _decode_columns(self) -> Columns:
        if self._columns is None:
            self._columns = decode_columns(self.payload(), self.header)
            self._payload = None  # the columns are copies: kept with them, it would double the memory
        return self._columns


def decode_batches(
    buffer: Buffer, *, verify: bool = True, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> Iterator[Batch]:
    """Yield the consecutive batches in `buffer`; they must fill it exactly."""
    position, view = 0, memoryview(buffer)
    while position < len(view):
        batch = Batch.decode(view, position, verify=verify, payload_bytes_max=payload_bytes_max)
        yield batch
        position += len(batch.data)

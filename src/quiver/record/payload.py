"""The layout of a columnar payload: where each column is, and how columns are joined.

This module owns the order of the sections and the flags (`docs/protocol/batch.md`). It deals in
spans and sizes only and never reads a record, so that the pure reader (`columns`) and the Arrow
reader (`arrow`) share every rule about where things are.

Invariants: a section whose flag is not set takes no bytes; the sections fill the payload exactly;
a returned span is inside the payload.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Final

import msgspec

from quiver.errors import DecodeError, RequestError
from quiver.model import Buffer
from quiver.record.header import PAYLOAD_BYTES_MAX, PREAMBLE_BYTES

HAS_TIMESTAMPS: Final = 1
HAS_KEYS: Final = 2
HAS_HEADERS: Final = 4
HAS_NULL_VALUES: Final = 8
HAS_NULL_KEYS: Final = 16
HAS_NULL_HEADER_VALUES: Final = 32

_FLAGS_KNOWN = 63
_PREAMBLE = struct.Struct("<B3sI")
_SINGLE = struct.Struct("<B3sII")
"""The preamble and the one length that stand before a single value."""
_RESERVED = bytes(3)
_LENGTH_BYTES = 4
_TIMESTAMP_BYTES = 8


class EncodedColumn(msgspec.Struct, frozen=True):
    """One column of byte strings, ready to be joined into a payload; no validity means that nothing is null."""

    lengths: Buffer
    data: Sequence[Buffer]
    data_bytes: int
    validity: Buffer = b""


class EncodedHeaders(msgspec.Struct, frozen=True):
    """The columns that hold the headers of all records, of which there is at least one."""

    count: int
    counts: Buffer
    keys: EncodedColumn
    values: EncodedColumn


class EncodedTimestamps(msgspec.Struct, frozen=True):
    """The records' timestamps; no data means that all are the first."""

    first: int
    greatest: int
    data: Buffer = b""


class EncodedRecords(msgspec.Struct, frozen=True):
    """All columns of a payload; one that is None takes no bytes."""

    count: int
    timestamps: EncodedTimestamps
    values: EncodedColumn
    keys: EncodedColumn | None = None
    headers: EncodedHeaders | None = None


class Layout(msgspec.Struct, frozen=True):
    """Spans of the fixed-width sections of one payload; the span of an absent one is empty."""

    flags: int
    header_count: int
    timestamps: slice
    value_lengths: slice
    key_lengths: slice
    header_counts: slice
    header_key_lengths: slice
    header_value_lengths: slice
    value_validity: slice
    key_validity: slice
    header_value_validity: slice

    @property
    def data_first(self) -> int:
        """The position of the first byte after the fixed-width sections."""
        return int(self.header_value_validity.stop)


def encode_payload(records: EncodedRecords) -> bytes:
    """Join encoded columns into a payload; raise `RequestError` if it would exceed `PAYLOAD_BYTES_MAX`."""
    timestamps, values, keys, headers = records.timestamps, records.values, records.keys, records.headers
    flags = (HAS_TIMESTAMPS if timestamps.data else 0) | (HAS_NULL_VALUES if values.validity else 0)
    lengths: list[Buffer] = [timestamps.data, values.lengths]
    columns = [values]
    if keys is not None:
        flags |= HAS_KEYS | (HAS_NULL_KEYS if keys.validity else 0)
        lengths.append(keys.lengths)
        columns.append(keys)
    if headers is not None:
        flags |= HAS_HEADERS | (HAS_NULL_HEADER_VALUES if headers.values.validity else 0)
        lengths += headers.counts, headers.keys.lengths, headers.values.lengths
        columns += headers.keys, headers.values
    fixed = [_PREAMBLE.pack(flags, _RESERVED, headers.count if headers else 0), *lengths]
    fixed += [column.validity for column in columns]
    check_payload_bytes(sum(map(len, fixed)) + sum(column.data_bytes for column in columns))
    return b"".join(chain(fixed, *(column.data for column in columns)))


def encode_single(value: bytes) -> bytes:
    """Return the payload of one value alone: no key, no timestamp of its own, no headers. The same as the long way."""
    check_payload_bytes(_SINGLE.size + len(value))
    return _SINGLE.pack(0, _RESERVED, 0, len(value)) + value


def check_payload_bytes(size: int) -> None:
    """Raise `RequestError` if a payload of `size` bytes is too large to be built."""
    if size > PAYLOAD_BYTES_MAX:
        raise RequestError(f"a payload of {size} bytes exceeds {PAYLOAD_BYTES_MAX}: put fewer records in one batch")


def decode_layout(raw: Buffer, *, record_count: int) -> Layout:
    """Return the spans of the fixed-width sections of the payload `raw`, after checking its preamble and that they fit.

    `raw` is as long as a checked header says, and so has room for the preamble.
    """
    flags, reserved, header_count = _PREAMBLE.unpack_from(raw)
    _check_preamble(flags, reserved, header_count)
    position = PREAMBLE_BYTES
    spans = []
    for size in _section_sizes(flags, record_count=record_count, header_count=header_count):
        spans.append(slice(position, position + size))
        position += size
    if position > len(raw):
        raise DecodeError(f"{record_count} records with {header_count} headers cannot be in {len(raw)} bytes")
    return Layout(flags, header_count, *spans)


def locate_data(raw: Buffer, layout: Layout, data_bytes: Sequence[int]) -> list[slice]:
    """Return the spans of the byte sections whose sizes are `data_bytes`: values, keys, header keys, header values.

    Raises `DecodeError` unless they end exactly where the payload does.
    """
    position = layout.data_first
    spans = []
    for size in data_bytes:
        spans.append(slice(position, position + size))
        position += size
    if position != len(raw):
        raise DecodeError(f"the columns take {position} bytes of a payload of {len(raw)}")
    return spans


def to_little_endian(column: array[int], byteorder: str = sys.byteorder) -> array[int]:
    """Turn `column` between this machine's byte order and the format's, in place, and return it."""
    if byteorder == "big":
        column.byteswap()
    return column


def _check_preamble(flags: int, reserved: bytes, header_count: int) -> None:
    if flags & ~_FLAGS_KNOWN or reserved != _RESERVED:
        raise DecodeError(f"unknown payload flags {flags:#x} {reserved.hex()}")
    if flags & HAS_NULL_KEYS and not flags & HAS_KEYS:
        raise DecodeError("the payload has nulls among keys that it does not have")
    if flags & HAS_NULL_HEADER_VALUES and not flags & HAS_HEADERS:
        raise DecodeError("the payload has nulls among headers that it does not have")
    if bool(flags & HAS_HEADERS) != bool(header_count):
        raise DecodeError(f"the payload's flags {flags:#x} contradict its {header_count} headers")


def _section_sizes(flags: int, *, record_count: int, header_count: int) -> tuple[int, ...]:
    """The sizes of the fixed-width sections, in the order of `Layout`'s spans."""
    length_bytes = _LENGTH_BYTES * record_count
    header_length_bytes = _LENGTH_BYTES * header_count
    bitmap_bytes = (record_count + 7) // 8
    return (
        _TIMESTAMP_BYTES * record_count if flags & HAS_TIMESTAMPS else 0,
        length_bytes,
        length_bytes if flags & HAS_KEYS else 0,
        length_bytes if flags & HAS_HEADERS else 0,
        header_length_bytes,
        header_length_bytes,
        bitmap_bytes if flags & HAS_NULL_VALUES else 0,
        bitmap_bytes if flags & HAS_NULL_KEYS else 0,
        (header_count + 7) // 8 if flags & HAS_NULL_HEADER_VALUES else 0,
    )

"""Batches from Python objects.

This module owns the way from records to a new, unstamped batch with both its checksums. Where the
values already are `bytes` it takes no Python-level step per record. Whatever it builds, every
reader accepts; what cannot be a batch is refused with `RequestError` before it is put together.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import cast

import msgspec

from quiver.errors import RequestError
from quiver.model import NO_PRODUCER, Buffer, Index, Offset, ProducerId, Term
from quiver.record.compression import Compression, compress
from quiver.record.header import HEADER_BYTES, KIND_CONTROL, BatchHeader, decode_header, encode_header
from quiver.record.payload import (
    EncodedColumn,
    EncodedHeaders,
    EncodedRecords,
    EncodedTimestamps,
    check_payload_bytes,
    encode_payload,
    encode_single,
    to_little_endian,
)

Value = Buffer | str | None
"""Types accepted for a key or a value: bytes, text (stored as UTF-8), or null."""


def build_batch(
    values: Iterable[Value],
    *,
    timestamp: int,
    keys: Iterable[Value] | None = None,
    timestamps: Iterable[int | None] | None = None,
    headers: Iterable[Iterable[tuple[str, Value]] | None] | None = None,
    compression: Compression = Compression.NONE,
    producer_id: ProducerId = NO_PRODUCER,
    producer_epoch: int = 0,
    base_sequence: int = 0,
) -> bytes:
    """Build an unstamped batch of at least one record.

    `timestamp` is that of every record without its own. The other columns, where given, are as long as `values`.
    A payload that compression does not shrink is stored uncompressed.
    """
    value_list = _to_list(values)
    is_plain = keys is None and timestamps is None and headers is None and compression is Compression.NONE
    if is_plain and len(value_list) == 1 and type(value_list[0]) is bytes:
        # One value alone is what an impatient producer sends; it skips all that is made for many: a third of the time.
        _check_producer(producer_id, base_sequence)
        payload = encode_single(value_list[0])
        header = BatchHeader(
            record_count=1,
            payload_bytes=len(payload),
            raw_bytes=len(payload),
            first_timestamp=timestamp,
            max_timestamp=timestamp,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
        return _join(header, payload)
    records = EncodedRecords(
        count=len(value_list),
        timestamps=_encode_timestamps(timestamps, timestamp, count=len(value_list)),
        values=_encode_column(value_list),
        keys=_encode_keys(keys, count=len(value_list)),
        headers=_encode_headers(headers, count=len(value_list)),
    )
    return seal_batch(
        records,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def build_control_batch(payload: Buffer, *, timestamp: int) -> bytes:
    """Build an unstamped control batch: no records, and a payload whose meaning is the caller's."""
    return b"".join((_control_header(payload, timestamp), payload))


def seal_control_batch(buffer: bytearray, *, timestamp: int) -> None:
    """Make an unstamped control batch of a payload that follows `HEADER_BYTES` free bytes, without a copy."""
    with memoryview(buffer) as view:
        view[:HEADER_BYTES] = _control_header(view[HEADER_BYTES:], timestamp)


def _control_header(payload: Buffer, timestamp: int) -> bytes:
    check_payload_bytes(len(payload))
    header = BatchHeader(
        kind=KIND_CONTROL,
        payload_bytes=len(payload),
        raw_bytes=len(payload),
        first_timestamp=timestamp,
        max_timestamp=timestamp,
    )
    return _encode_header(header, payload)


def seal_batch(
    records: EncodedRecords,
    *,
    compression: Compression,
    producer_id: ProducerId,
    producer_epoch: int,
    base_sequence: int,
) -> bytes:
    """Turn encoded columns into an unstamped batch: join, compress, checksum."""
    if not records.count:
        raise RequestError("a batch holds at least one record")
    _check_producer(producer_id, base_sequence)
    raw = encode_payload(records)
    payload = compress(raw, compression)
    if len(payload) >= len(raw):
        compression, payload = Compression.NONE, raw
    header = BatchHeader(
        compression=compression,
        record_count=records.count,
        payload_bytes=len(payload),
        raw_bytes=len(raw),
        first_timestamp=records.timestamps.first,
        max_timestamp=records.timestamps.greatest,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    return _join(header, payload)


def reseal_batch(
    batch: Buffer, *, producer_epoch: int, base_sequence: int, producer_id: ProducerId | None = None
) -> bytes:
    """Return an unstamped batch with the same records under another epoch and sequence: for its producer alone.

    With a `producer_id` it becomes that producer's, who has verified it: what is damaged would be whole for all after.
    The payload is taken as it is. Raises `DecodeError` if `batch` does not begin with a batch's header.
    """
    header = decode_header(batch)
    if producer_id is None:
        producer_id = header.producer_id
    _check_producer(producer_id, base_sequence)
    renewed = msgspec.structs.replace(
        header,
        term=Term(0),
        index=Index(0),
        base_offset=Offset(0),
        append_timestamp=0,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    return _join(renewed, memoryview(batch)[HEADER_BYTES : header.batch_bytes])


def _check_producer(producer_id: ProducerId, base_sequence: int) -> None:
    if producer_id < NO_PRODUCER or base_sequence < 0:
        raise RequestError(f"producer id {producer_id}, sequence {base_sequence} is out of range")


def _join(header: BatchHeader, payload: Buffer) -> bytes:
    return b"".join((_encode_header(header, payload), payload))


def _encode_header(header: BatchHeader, payload: Buffer) -> bytes:
    try:
        return encode_header(header, payload)
    except struct.error as error:
        raise RequestError(f"a number does not fit the batch header: {error}") from error


def _encode_column(values: Sequence[Value]) -> EncodedColumn:
    kinds = set(map(type, values))
    validity = _encode_validity(values) if NoneType in kinds else b""
    data = _to_bytes_each(values, kinds)
    lengths = list(map(len, data))
    data_bytes = sum(lengths)
    check_payload_bytes(data_bytes)  # first, so that every length fits its four bytes
    return EncodedColumn(_encode_lengths(lengths), data, data_bytes, validity)


def _encode_keys(keys: Iterable[Value] | None, *, count: int) -> EncodedColumn | None:
    if keys is None:
        return None
    key_list = _to_list(keys)
    _check_count("keys", key_list, count)
    return None if key_list.count(None) == count else _encode_column(key_list)


def _encode_headers(
    headers: Iterable[Iterable[tuple[str, Value]] | None] | None, *, count: int
) -> EncodedHeaders | None:
    if headers is None:
        return None
    header_list = [tuple(pairs or ()) for pairs in headers]
    _check_count("headers", header_list, count)
    keys = [key for pairs in header_list for key, _ in pairs]
    if not keys:
        return None
    if set(map(type, keys)) != {str}:
        raise TypeError("a header's key is text")
    return EncodedHeaders(
        count=len(keys),
        counts=_encode_lengths(list(map(len, header_list))),
        keys=_encode_column(keys),
        values=_encode_column([value for pairs in header_list for _, value in pairs]),
    )


def _encode_timestamps(timestamps: Iterable[int | None] | None, timestamp: int, *, count: int) -> EncodedTimestamps:
    if timestamps is None:
        return EncodedTimestamps(timestamp, timestamp)
    stamps = [timestamp if stamp is None else stamp for stamp in timestamps]
    _check_count("timestamps", stamps, count)
    first, greatest = (stamps[0], max(stamps)) if stamps else (timestamp, timestamp)
    if stamps.count(first) == count:
        return EncodedTimestamps(first, first)
    try:
        column = array("q", stamps)
    except OverflowError as error:
        raise RequestError(f"a timestamp does not fit 64 bits: {error}") from error
    return EncodedTimestamps(first, greatest, to_little_endian(column).tobytes())


def _encode_lengths(lengths: Sequence[int]) -> bytes:
    return to_little_endian(array("I", lengths)).tobytes()


def _encode_validity(values: Sequence[Value]) -> bytes:
    bitmap = bytearray((len(values) + 7) // 8)
    for position, value in enumerate(values):
        if value is not None:
            bitmap[position >> 3] |= 1 << (position & 7)
    return bytes(bitmap)


def _to_bytes_each(values: Sequence[Value], kinds: set[type]) -> Sequence[bytes]:
    if kinds == {bytes}:
        return cast("Sequence[bytes]", values)
    try:
        if kinds == {str}:
            return list(map(str.encode, cast("Sequence[str]", values)))
        return list(map(_to_bytes, values))
    except UnicodeEncodeError as error:
        raise RequestError(f"the text cannot be stored as UTF-8: {error}") from error


def _to_bytes(value: Value) -> bytes:
    match value:
        case None:
            return b""
        case str():
            return value.encode()
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case _:
            raise TypeError(f"a record is bytes, text or None, not {type(value).__name__}")


def _to_list(values: Iterable[Value]) -> Sequence[Value]:
    if isinstance(values, str | bytes | bytearray | memoryview):
        raise TypeError("values and keys are given as an iterable of them, not as a single one")
    return values if isinstance(values, list | tuple) else list(values)


def _check_count(what: str, column: Sequence[object], count: int) -> None:
    if len(column) != count:
        raise RequestError(f"{count} values but {len(column)} {what}")

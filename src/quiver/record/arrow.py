"""Batches from Arrow arrays and back, with no loop over records.

With `digest` the only module of the package that imports numpy and pyarrow (extra `arrow`). Arrow trusts the
buffers it is given, and wrong offsets crash the process: so `to_arrow` must check every length,
bitmap and header key before Arrow sees them. Arrow calls what the format calls a record's columns
by the same names: `offset, timestamp, key, value, headers`.

Both ways copy the lengths (the format has lengths, Arrow has offsets). `to_arrow` does not copy the
bytes: its arrays keep the batch's buffer alive, and that buffer must not change under them.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.errors import DecodeError, RequestError
from quiver.model import NO_PRODUCER, Offset, ProducerId
from quiver.record.batch import Batch
from quiver.record.builder import seal_batch
from quiver.record.compression import Compression
from quiver.record.header import BatchHeader
from quiver.record.payload import (
    HAS_HEADERS,
    HAS_KEYS,
    EncodedColumn,
    EncodedHeaders,
    EncodedRecords,
    EncodedTimestamps,
    Layout,
    check_payload_bytes,
    decode_layout,
    locate_data,
)

_TIMESTAMP_TYPE = pa.timestamp("ms", tz="UTC")
_HEADER_TYPE = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
_HEADERS_TYPE = pa.list_(_HEADER_TYPE)
_LARGE_HEADERS = pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())]))

_FIELDS: list[pa.Field[Any]] = [
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("timestamp", _TIMESTAMP_TYPE, nullable=False),
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("headers", _HEADERS_TYPE),
]

ARROW_SCHEMA: Final = pa.schema(_FIELDS)
"""The schema in which every batch is read. A record without headers has a null list, as in Spark's own Kafka source."""

ArrowArray: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any]"
_Array: TypeAlias = "pa.Array[Any]"
_Numbers = npt.NDArray[Any]


def build_batch_from_arrow(
    values: ArrowArray,
    *,
    timestamp: int,
    keys: ArrowArray | None = None,
    timestamps: ArrowArray | None = None,
    headers: ArrowArray | None = None,
    compression: Compression = Compression.NONE,
    producer_id: ProducerId = NO_PRODUCER,
    producer_epoch: int = 0,
    base_sequence: int = 0,
) -> bytes:
    """Build an unstamped batch of at least one record from columns of equal length.

    `values` and `keys` are of any binary or string type; `timestamps` are integers (milliseconds) or Arrow timestamps
    (cut to milliseconds), null where `timestamp` applies; `headers` are lists of (key, value) structs, or maps.
    Raises `RequestError` for any other type. A payload that compression does not shrink is stored uncompressed.
    """
    if not len(values):
        raise RequestError("a batch holds at least one record")
    for name, column in (("keys", keys), ("timestamps", timestamps), ("headers", headers)):
        if column is not None and len(column) != len(values):
            raise RequestError(f"{len(values)} values but {len(column)} {name}")
    records = EncodedRecords(
        count=len(values),
        timestamps=_encode_timestamps(timestamps, timestamp),
        values=_encode_column(_cast(values, pa.large_binary())),
        keys=None if keys is None or keys.null_count == len(keys) else _encode_column(_cast(keys, pa.large_binary())),
        headers=None
        if headers is None
        else _encode_headers(cast("pa.LargeListArray[Any]", _cast(headers, _LARGE_HEADERS))),
    )
    return seal_batch(
        records,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def to_arrow(batch: Batch, first_offset: Offset | None = None, end_offset: Offset | None = None) -> pa.RecordBatch:
    """Return the records from `first_offset` up to `end_offset`, as far as they are in this batch, as `ARROW_SCHEMA`.

    Raises `DecodeError` if the payload is not well-formed; its checksum is `Batch.decode`'s business.
    """
    header = batch.header
    if header.is_control:
        return pa.RecordBatch.from_pylist([], schema=ARROW_SCHEMA)
    raw = memoryview(batch.payload())
    layout = decode_layout(raw, record_count=header.record_count)
    offsets = np.arange(header.base_offset, header.end_offset, dtype=np.int64)
    timestamps = _decode_timestamps(raw, layout, header)
    key, value, headers = _decode_columns(raw, layout, header)
    columns = [_from_numpy(offsets, pa.int64()), _from_numpy(timestamps, _TIMESTAMP_TYPE), key, value, headers]
    record_batch = pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)
    positions = batch.positions(first_offset, end_offset)
    return record_batch.slice(positions.start, len(positions))


def _encode_column(column: _Array) -> EncodedColumn:
    """Encode a large_binary array of at least one element."""
    validity = b""
    if column.null_count:
        validity = np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little").tobytes()
        column = column.fill_null(b"")  # a null may hide bytes; this leaves them out
    _, offset_buffer, data_buffer = column.buffers()
    assert offset_buffer is not None
    offsets = np.frombuffer(memoryview(offset_buffer), np.int64, len(column) + 1, 8 * column.offset)
    first, end = int(offsets[0]), int(offsets[-1])
    check_payload_bytes(end - first)
    data = memoryview(data_buffer or b"")[first:end]
    return EncodedColumn(np.diff(offsets).astype("<u4").tobytes(), [data], end - first, validity)


def _encode_headers(headers: pa.LargeListArray[Any]) -> EncodedHeaders | None:
    """Encode an array of `_LARGE_HEADERS`."""
    items = cast("pa.StructArray", headers.flatten())
    if not len(items):
        return None
    keys, values = items.flatten()
    if keys.null_count:
        raise RequestError("a header's key is text, not null")
    return EncodedHeaders(
        count=len(items),
        counts=headers.value_lengths().fill_null(0).to_numpy().astype("<u4").tobytes(),
        keys=_encode_column(_cast(keys, pa.large_binary())),
        values=_encode_column(values),
    )


def _encode_timestamps(timestamps: ArrowArray | None, timestamp: int) -> EncodedTimestamps:
    if timestamps is None or timestamps.null_count == len(timestamps):
        return EncodedTimestamps(timestamp, timestamp)
    if pa.types.is_timestamp(timestamps.type):
        timestamps = timestamps.cast(pa.timestamp("ms", tz=timestamps.type.tz), safe=False)
    elif not pa.types.is_integer(timestamps.type):
        raise RequestError(f"timestamps cannot be {timestamps.type}")
    try:
        stamps = _cast(timestamps, pa.int64()).fill_null(timestamp).to_numpy()
    except OverflowError as error:
        raise RequestError(f"timestamp {timestamp} does not fit 64 bits") from error
    first, greatest = int(stamps[0]), int(stamps.max())
    if (stamps == first).all():
        return EncodedTimestamps(first, first)
    return EncodedTimestamps(first, greatest, stamps.astype("<i8").tobytes())


def _cast(column: ArrowArray, target: pa.DataType) -> _Array:
    """Return `column` in one piece as `target`, or raise `RequestError` if its type cannot be."""
    try:
        converted = column.cast(target)
        array = converted.combine_chunks() if isinstance(converted, pa.ChunkedArray) else converted
        array.validate(full=True)  # Arrow's own casts have been seen to make arrays with wrong offsets
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RequestError(f"a column of {column.type} cannot be stored: {error}") from error
    return array


def _decode_columns(raw: memoryview, layout: Layout, header: BatchHeader) -> tuple[_Array, _Array, _Array]:
    """Return the columns of bytes: key, value, headers."""
    spans = (layout.value_lengths, layout.key_lengths, layout.header_key_lengths, layout.header_value_lengths)
    lengths = [_read_numbers(raw, span, "<u4") for span in spans]
    data = locate_data(raw, layout, [_add_up(column) for column in lengths])
    key: _Array = pa.nulls(header.record_count, pa.binary())
    headers: _Array = pa.nulls(header.record_count, _HEADERS_TYPE)
    value = _decode_column(pa.binary(), lengths[0], raw[data[0]], raw[layout.value_validity])
    if layout.flags & HAS_KEYS:
        key = _decode_column(pa.binary(), lengths[1], raw[data[1]], raw[layout.key_validity])
    if layout.flags & HAS_HEADERS:
        header_key = _decode_column(pa.string(), lengths[2], raw[data[2]], raw[:0])
        header_value = _decode_column(pa.binary(), lengths[3], raw[data[3]], raw[layout.header_value_validity])
        headers = _decode_headers(_read_numbers(raw, layout.header_counts, "<u4"), header_key, header_value)
    return key, value, headers


def _decode_column(kind: pa.DataType, lengths: _Numbers, data: memoryview, validity: memoryview) -> _Array:
    """Return one column whose lengths add up to `data`; an empty `validity` means that nothing is null."""
    if validity:
        if validity[-1] >> (len(lengths) % 8 or 8):
            raise DecodeError("a bitmap has bits beyond its column")
        is_valid = np.unpackbits(np.frombuffer(validity, np.uint8), count=len(lengths), bitorder="little")
        if lengths[is_valid == 0].any():
            raise DecodeError("a null has a length")
    buffers = [pa.py_buffer(validity) if validity else None, _to_buffer(_accumulate(lengths)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(lengths), buffers)


def _decode_headers(counts: _Numbers, keys: _Array, values: _Array) -> _Array:
    if _add_up(counts) != len(keys):
        raise DecodeError(f"the records' header counts do not add up to {len(keys)}")
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DecodeError(f"a header key is not UTF-8: {error}") from error
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(_HEADER_TYPE))
    validity = np.packbits(counts > 0, bitorder="little")
    buffers: list[pa.Buffer | None] = [_to_buffer(validity), _to_buffer(_accumulate(counts))]
    return pa.Array.from_buffers(_HEADERS_TYPE, len(counts), buffers, children=[pairs])


def _decode_timestamps(raw: memoryview, layout: Layout, header: BatchHeader) -> _Numbers:
    timestamps = _read_numbers(raw, layout.timestamps, "<i8")
    first, greatest = (timestamps[0], timestamps.max()) if len(timestamps) else (header.first_timestamp,) * 2
    if first != header.first_timestamp or greatest != header.max_timestamp:
        raise DecodeError("the timestamps are not those that the batch header states")
    if not len(timestamps):
        return np.full(header.record_count, header.first_timestamp, np.int64)
    # Arrow needs them aligned, which they are not if a batch starts anywhere in a larger buffer.
    return np.require(timestamps, np.int64, "A")


def _read_numbers(raw: memoryview, span: slice, kind: str) -> _Numbers:
    dtype = np.dtype(kind)
    return np.ndarray((span.stop - span.start) // dtype.itemsize, dtype, buffer=raw, offset=span.start)


def _add_up(lengths: _Numbers) -> int:
    """Return the sum, taken in 64 bits: wrong lengths cannot wrap around to a sum that fits."""
    return int(lengths.sum(dtype=np.uint64)) if len(lengths) else 0


def _accumulate(lengths: _Numbers) -> _Numbers:
    """Return where each element starts, and where the last ends; `PAYLOAD_BYTES_MAX` keeps that inside 31 bits."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    return offsets


def _from_numpy(numbers: _Numbers, kind: pa.DataType) -> _Array:
    return pa.Array.from_buffers(kind, len(numbers), [None, _to_buffer(numbers)])


def _to_buffer(numbers: _Numbers) -> pa.Buffer:
    return pa.py_buffer(numbers.data)

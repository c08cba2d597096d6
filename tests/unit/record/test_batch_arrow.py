"""Arrow in and out of batches: every type, slices, nulls, and buffers that lie anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import RequestError
from quiver.model import Index, Offset, ProducerId, Term
from quiver.record import (
    PAYLOAD_BYTES_MAX,
    Batch,
    Compression,
    build_batch,
    build_control_batch,
    decode_header,
    stamp,
)
from quiver.record.arrow import ARROW_SCHEMA, build_batch_from_arrow, to_arrow

NULLABLE = st.none() | st.binary(max_size=20)
TIMESTAMP = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.lists(st.tuples(st.text(max_size=5), NULLABLE), max_size=3)
ROWS = st.lists(st.tuples(TIMESTAMP, NULLABLE, NULLABLE, HEADERS), min_size=1, max_size=40)
PAIR = pa.struct([("key", pa.string()), ("value", pa.binary())])

BINARY_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view()]
STRING_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
VALUES = ["aa", None, "", "ü", "bbb"]
VALUE_BYTES = [None if value is None else value.encode() for value in VALUES]


def values_of(batch: bytes) -> list[bytes | None]:
    return Batch.decode(batch).values()


def plain(rows: list[Any]) -> dict[str, Any]:
    timestamps, keys, values, headers = zip(*rows, strict=True)
    return {"values": values, "keys": keys, "timestamps": timestamps, "headers": headers}


@settings(deadline=None)
@given(ROWS)
def test_arrow_and_python_build_the_same_bytes(rows: list[Any]) -> None:
    columns = plain(rows)
    headers = [[{"key": key, "value": value} for key, value in pairs] for pairs in columns["headers"]]
    built = build_batch_from_arrow(
        pa.array(columns["values"], pa.binary()),
        timestamp=0,
        keys=pa.array(columns["keys"], pa.binary()),
        timestamps=pa.array(columns["timestamps"], pa.int64()),
        headers=pa.array(headers, pa.list_(PAIR)),
    )
    assert built == build_batch(timestamp=0, **columns)


def build_from_columns(read: pa.RecordBatch, **named: Any) -> bytes:
    """Build a batch from what `to_arrow` returned."""
    columns: dict[str, Any] = {
        "keys": read.column("key"),
        "timestamps": read.column("timestamp"),
        "headers": read.column("headers"),
    }
    return build_batch_from_arrow(read.column("value"), **columns, **named)


@settings(deadline=None)
@given(ROWS, st.sampled_from(Compression), st.integers(0, 45), st.integers(0, 45))
def test_slice_of_a_batch_as_arrow_builds_the_batch_of_that_slice(
    rows: list[Any], compression: Compression, first: int, end: int
) -> None:
    batch = Batch.decode(build_batch(timestamp=0, compression=compression, **plain(rows)))
    table = to_arrow(batch, Offset(first), Offset(end))
    assert table.column("offset").to_pylist() == list(range(len(rows)))[first:end]
    assert table.schema == ARROW_SCHEMA
    table.validate(full=True)
    if rows[first:end]:
        assert build_from_columns(table, timestamp=0) == build_batch(timestamp=0, **plain(rows[first:end]))


@pytest.mark.parametrize("kind", BINARY_TYPES, ids=str)
def test_every_binary_type_is_taken(kind: pa.DataType) -> None:
    assert values_of(build_batch_from_arrow(pa.array(VALUE_BYTES, kind), timestamp=1)) == VALUE_BYTES


@pytest.mark.parametrize("kind", STRING_TYPES, ids=str)
def test_every_string_type_is_taken(kind: pa.DataType) -> None:
    array = pa.array(VALUES, pa.string()).cast(kind)
    assert values_of(build_batch_from_arrow(array, timestamp=1)) == VALUE_BYTES


@pytest.mark.parametrize("kind", [*BINARY_TYPES, *STRING_TYPES], ids=str)
def test_slices_and_chunks_of_every_type_are_taken(kind: pa.DataType) -> None:
    array = pa.array(VALUES, pa.string()).cast(pa.binary() if kind in BINARY_TYPES else pa.string()).cast(kind)
    assert values_of(build_batch_from_arrow(array[1:4], timestamp=1)) == VALUE_BYTES[1:4]
    chunks = pa.chunked_array([array[3:], array[:0], array[:2]])
    assert values_of(build_batch_from_arrow(chunks, timestamp=1, keys=chunks)) == VALUE_BYTES[3:] + VALUE_BYTES[:2]


def test_bytes_hidden_under_a_null_are_left_out() -> None:
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes())
    array = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x05"), offsets, pa.py_buffer(b"aSSb")])
    built = build_batch_from_arrow(array, timestamp=1)
    assert built == build_batch([b"a", None, b"b"], timestamp=1)
    assert b"SS" not in built


def test_column_of_nulls_is_taken() -> None:
    built = build_batch_from_arrow(
        pa.nulls(3), timestamp=1, keys=pa.nulls(3), timestamps=pa.nulls(3), headers=pa.nulls(3)
    )
    assert built == build_batch([None] * 3, timestamp=1)


@pytest.mark.parametrize(
    ("timestamps", "expected"),
    [
        (pa.array([1, None, 3], pa.int32()), [1, 7, 3]),
        (pa.array([1, 2, 3], pa.uint64()), [1, 2, 3]),
        (pa.array([1999, None, 3001], pa.timestamp("us", tz="Europe/Vienna")), [1, 7, 3]),
        (pa.array([2, 2, 2], pa.timestamp("s")), [2000, 2000, 2000]),
        (pa.chunked_array([pa.array([1, 2]), pa.array([0])]), [1, 2, 0]),
    ],
    ids=str,
)
def test_timestamps_of_every_unit_become_milliseconds(timestamps: Any, expected: list[int]) -> None:
    values = pa.array([b"a", b"b", b"c"])
    batch = Batch.decode(build_batch_from_arrow(values, timestamp=7, timestamps=timestamps))
    assert [record.timestamp for record in batch.records()] == expected
    assert batch.header.max_timestamp == max(expected)


HEADER_ROWS: list[Any] = [[("a", b"1")], None, [], [("c", None), ("a", b"")]]


@pytest.mark.parametrize(
    "kind",
    [pa.map_(pa.string(), pa.binary()), pa.list_(PAIR), pa.large_list(PAIR)],
    ids=["map", "list", "large_list"],
)
def test_headers_are_lists_of_pairs_or_maps(kind: pa.DataType) -> None:
    pairs = [row and [{"key": key, "value": value} for key, value in row] for row in HEADER_ROWS]
    headers = pa.array(HEADER_ROWS if pa.types.is_map(kind) else pairs, kind)
    for cut in (slice(0, 4), slice(1, 4), slice(1, 3)):
        values = pa.array([b"v"] * 4)[cut]
        built = build_batch_from_arrow(values, timestamp=1, headers=headers[cut])
        assert built == build_batch([b"v"] * len(values), timestamp=1, headers=HEADER_ROWS[cut])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"values": pa.array([], pa.binary())}, "at least one record"),
        ({"values": pa.chunked_array([], pa.binary())}, "at least one record"),
        ({"values": pa.array([1, 2])}, "int64 cannot be stored"),
        ({"keys": pa.array([1.5, 2])}, "double cannot be stored"),
        ({"keys": pa.array([b"a"])}, "2 values but 1 keys"),
        ({"timestamps": pa.array([1])}, "2 values but 1 timestamps"),
        ({"timestamps": pa.array(["1", "2"])}, "timestamps cannot be string"),
        ({"timestamps": pa.array([1, 2**63], pa.uint64())}, "cannot be stored"),
        ({"headers": pa.array([[], None], pa.list_(pa.int8()))}, "cannot be stored"),
        ({"headers": pa.array([[{"key": None, "value": b""}], []], pa.list_(PAIR))}, "key is text"),
        ({"headers": pa.array([[None], []], pa.list_(PAIR))}, "key is text"),
        ({"headers": pa.array([[{"key": b"\xff", "value": b""}], []])}, "cannot be stored"),
        ({"values": pa.array([bytes(PAYLOAD_BYTES_MAX + 1), b""])}, "fewer records"),
        ({"producer_id": ProducerId(-2)}, "out of range"),
        ({"timestamp": 2**63}, "does not fit"),
        ({"timestamp": 2**63, "timestamps": pa.array([1, None])}, "does not fit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_a_batch_is_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_batch_from_arrow(**{"values": pa.array([b"a", b"b"]), "timestamp": 1, **columns})


def test_record_batch_keeps_every_column_and_the_producer() -> None:
    stamped = stamp(
        build_batch(["a", None], timestamp=9, keys=[None, "k"], timestamps=[5, 4], headers=[[("h", None)], None]),
        term=Term(1),
        index=Index(2),
        base_offset=Offset(70),
        append_timestamp=3,
    )
    table = to_arrow(Batch.decode(stamped))
    assert table.to_pydict() | {"timestamp": table.column("timestamp").cast(pa.int64()).to_pylist()} == {
        "offset": [70, 71],
        "timestamp": [5, 4],
        "key": [None, b"k"],
        "value": [b"a", None],
        "headers": [[{"key": "h", "value": None}], None],
    }
    built = build_from_columns(table, timestamp=9, producer_id=ProducerId(4), producer_epoch=2, base_sequence=8)
    header = decode_header(built)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (4, 2, 8)
    assert to_arrow(Batch.decode(built)).drop_columns("offset") == table.drop_columns("offset")


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("compression", Compression)
def test_batch_is_read_wherever_it_lies(position: int, compression: Compression) -> None:
    built = build_batch(
        [b"abc"] * 50, timestamp=1, timestamps=range(50), keys=[None, b"k"] * 25, compression=compression
    )
    buffer = bytearray(position) + built + b"tail"
    table = to_arrow(Batch.decode(buffer, position))
    table.validate(full=True)
    assert table == to_arrow(Batch.decode(built))
    assert all(at is None or at.address % 8 == 0 for at in table.column("timestamp").buffers())


def test_control_batch_and_empty_range_are_empty_tables() -> None:
    control = to_arrow(Batch.decode(build_control_batch(b"x", timestamp=1)))
    nothing = to_arrow(Batch.decode(build_batch([b"a"], timestamp=1)), Offset(5), Offset(9))
    assert control.num_rows == nothing.num_rows == 0
    assert control.schema == nothing.schema == ARROW_SCHEMA


def test_values_are_not_copied_on_their_way_to_arrow() -> None:
    buffer = bytearray(build_batch([b"first", b"second"], timestamp=1))
    table = to_arrow(Batch.decode(buffer))
    buffer[-6:] = b"SECOND"
    assert table.column("value").to_pylist() == [b"first", b"SECOND"]

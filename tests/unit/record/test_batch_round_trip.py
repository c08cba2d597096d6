"""What goes into a batch comes out of it, whatever its columns, compression and place in a buffer."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import DecodeError, RequestError
from quiver.model import Index, Offset, ProducerId, Term
from quiver.record import (
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    Batch,
    Compression,
    Record,
    Value,
    build_batch,
    build_control_batch,
    decode_batches,
    seal_control_batch,
    stamp,
)
from quiver.record.batch import CHUNK_RECORDS

NULLABLE = st.none() | st.binary(max_size=20)
TIMESTAMP = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.lists(st.tuples(st.text(max_size=5), NULLABLE), max_size=3).map(tuple)
ROWS = st.lists(st.tuples(TIMESTAMP, NULLABLE, NULLABLE, HEADERS), min_size=1, max_size=40)
BASE_OFFSET = Offset(1000)
VALID: dict[str, Any] = {"values": [b"a", b"b"], "timestamp": 1}


def build(rows: list[Any], compression: Compression = Compression.NONE) -> bytes:
    timestamps, keys, values, headers = zip(*rows, strict=True)
    return build_batch(values, timestamp=0, keys=keys, timestamps=timestamps, headers=headers, compression=compression)


def at_base_offset(batch: bytes) -> Batch:
    stamped = stamp(batch, term=Term(3), index=Index(7), base_offset=BASE_OFFSET, append_timestamp=6)
    return Batch.decode(stamped)


def expected(rows: Iterable[Any]) -> list[Record]:
    return [Record(Offset(BASE_OFFSET + at), *row) for at, row in enumerate(rows)]


@settings(deadline=None)
@given(ROWS, st.sampled_from(Compression))
def test_batch_returns_what_was_put_in(rows: list[Any], compression: Compression) -> None:
    batch = at_base_offset(build(rows, compression))
    assert list(batch.records()) == expected(rows)
    assert batch.values() == [value for _, _, value, _ in rows]
    assert len(batch) == len(rows)
    assert batch.header.first_timestamp == rows[0][0]
    assert batch.header.max_timestamp == max(timestamp for timestamp, _, _, _ in rows)


@settings(deadline=None)
@given(ROWS, st.none() | st.integers(990, 1050), st.none() | st.integers(990, 1050))
def test_range_of_offsets_selects_exactly_its_records(rows: list[Any], first: int | None, end: int | None) -> None:
    batch = at_base_offset(build(rows))
    first_offset, end_offset = (None if bound is None else Offset(bound) for bound in (first, end))
    wanted = [
        record
        for record in expected(rows)
        if (first is None or record.offset >= first) and (end is None or record.offset < end)
    ]
    assert list(batch.records(first_offset, end_offset)) == wanted
    assert batch.values(first_offset, end_offset) == [record.value for record in wanted]


@settings(deadline=None)
@given(ROWS, st.data())
def test_records_behave_as_a_list_of_them(rows: list[Any], data: st.DataObject) -> None:
    records, model = at_base_offset(build(rows)).records(), expected(rows)
    at = data.draw(st.integers(-len(rows), len(rows) - 1))
    cut = data.draw(st.slices(len(rows)))
    assert records[at] == model[at]
    assert list(records[cut]) == model[cut]
    assert len(records[cut]) == len(model[cut])
    with pytest.raises(IndexError):
        records[len(rows)]


def test_iteration_goes_on_across_chunks() -> None:
    values = [None if number % 3 == 0 else b"%d" % number for number in range(2 * CHUNK_RECORDS + 5)]
    batch = at_base_offset(build_batch(values, timestamp=0, keys=iter(values[::-1])))
    records = list(batch.records(Offset(BASE_OFFSET + 7)))
    assert [record.value for record in records] == values[7:]
    assert [record.key for record in records] == values[::-1][7:]
    assert [record.offset for record in records] == list(range(BASE_OFFSET + 7, BASE_OFFSET + len(values)))


def test_null_empty_and_absent_stay_distinct() -> None:
    (record, empty, absent) = Batch.decode(build_batch([None, b"", b"x"], timestamp=1, keys=[b"", None, "k"])).records()
    assert (record.key, record.value) == (b"", None)
    assert (empty.key, empty.value) == (None, b"")
    assert (absent.key, absent.headers) == (b"k", ())


def test_text_and_buffers_are_stored_as_bytes() -> None:
    values: list[Value] = ["ü", bytearray(b"a"), memoryview(b"b"), b"c"]
    assert Batch.decode(build_batch(iter(values), timestamp=1)).values() == ["ü".encode(), b"a", b"b", b"c"]


def test_record_text_is_its_value_as_text() -> None:
    texts = Batch.decode(build_batch(["ü", None, b"\xff"], timestamp=1)).records()
    assert (texts[0].text, texts[1].text) == ("ü", None)
    with pytest.raises(DecodeError, match="offset 2 is not UTF-8"):
        _ = texts[2].text


def test_missing_timestamps_are_the_batch_timestamp() -> None:
    batch = Batch.decode(build_batch([b"a", b"b", b"c"], timestamp=5, timestamps=[None, 3, 9]))
    assert [record.timestamp for record in batch.records()] == [5, 3, 9]


@pytest.mark.parametrize(
    "columns",
    [
        {"keys": [None]},
        {"headers": [None]},
        {"headers": [[]]},
        {"timestamps": [7]},
        {"timestamps": [None]},
    ],
)
def test_columns_that_say_nothing_cost_nothing(columns: dict[str, Any]) -> None:
    assert build_batch([b"a"], timestamp=7, **columns) == build_batch([b"a"], timestamp=7)


def test_small_record_costs_little() -> None:
    assert len(build_batch([bytes(100)], timestamp=1)) - HEADER_BYTES - 100 == 12


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_compression_shrinks_what_repeats_and_leaves_the_rest_alone(compression: Compression) -> None:
    repetitive = build_batch([b"same line"] * 1000, timestamp=1, compression=compression)
    assert len(repetitive) < 1000
    assert Batch.decode(repetitive).header.compression == compression
    noise = build_batch([Random(1).randbytes(1000)], timestamp=1, compression=compression)
    assert Batch.decode(noise).header.compression == Compression.NONE


def test_producer_fields_are_kept() -> None:
    built = build_batch([b"a"], timestamp=1, producer_id=ProducerId(12), producer_epoch=3, base_sequence=99)
    header = Batch.decode(built).header
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (12, 3, 99)


def test_control_batch_carries_its_payload_and_no_records() -> None:
    batch = at_base_offset(build_control_batch(b"membership", timestamp=5))
    assert batch.header.is_control
    assert bytes(batch.payload()) == b"membership"
    assert (len(batch), batch.values(), list(batch.records())) == (0, [], [])
    assert batch.header.end_offset == batch.header.base_offset == BASE_OFFSET


def test_control_batch_is_sealed_in_place_as_it_is_built() -> None:
    sealed = bytearray(HEADER_BYTES) + b"membership"
    seal_control_batch(sealed, timestamp=5)
    assert sealed == build_control_batch(b"membership", timestamp=5)
    sealed += b"can grow"  # no view of it is left
    with pytest.raises(RequestError, match="exceeds"):
        seal_control_batch(bytearray(HEADER_BYTES + PAYLOAD_BYTES_MAX + 1), timestamp=1)


def test_batches_are_read_one_after_the_other() -> None:
    parts = [
        build_batch([b"a", b"b"], timestamp=1),
        build_control_batch(b"", timestamp=2),
        build_batch(["c"], timestamp=3),
    ]
    batches = list(decode_batches(b"".join(parts)))
    assert [batch.values() for batch in batches] == [[b"a", b"b"], [], [b"c"]]
    assert [bytes(batch.data) for batch in batches] == parts
    with pytest.raises(DecodeError, match="truncated batch"):
        list(decode_batches(b"".join(parts)[:-1], verify=False))


def test_batch_names_itself() -> None:
    assert repr(Batch.decode(build_batch([b"abc"], timestamp=1))) == "<Batch of 1 records from offset 0, 111 bytes>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": []}, "at least one record"),
        ({"values": [], "timestamps": []}, "at least one record"),
        ({"keys": [b"k"]}, "2 values but 1 keys"),
        ({"timestamps": [1]}, "2 values but 1 timestamps"),
        ({"headers": [None] * 3}, "2 values but 3 headers"),
        ({"values": ["a", "\ud800"]}, "UTF-8"),
        ({"values": [b"a", "\ud800"]}, "UTF-8"),
        ({"headers": [[("\ud800", b"")], None]}, "UTF-8"),
        ({"timestamp": 2**63}, "does not fit"),
        ({"timestamps": [0, 2**63]}, "does not fit"),
        ({"producer_id": -2}, "out of range"),
        ({"base_sequence": -1}, "out of range"),
        ({"producer_epoch": 2**32}, "does not fit"),
        ({"values": [bytes(PAYLOAD_BYTES_MAX + 1), b""]}, "fewer records"),
        ({"values": [bytes(PAYLOAD_BYTES_MAX - 8), b""]}, "fewer records"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_batch(**{**VALID, **arguments})


def test_control_payload_is_bounded() -> None:
    with pytest.raises(RequestError, match="exceeds"):
        build_control_batch(bytes(PAYLOAD_BYTES_MAX + 1), timestamp=1)


@pytest.mark.parametrize(
    "arguments",
    [{"values": [1]}, {"values": b"ab"}, {"values": "ab"}, {"headers": [[(b"k", b"v")], None]}, {"keys": "k"}],
)
def test_wrong_types_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        build_batch(**{**VALID, **arguments})


def test_one_value_alone_is_built_as_among_others() -> None:
    """The short way gives the very bytes of the long one, and refuses what it refuses."""
    for value in (b"", b"x" * 100, b"\0"):
        short = build_batch([value], timestamp=7, producer_id=ProducerId(3), producer_epoch=2, base_sequence=9)
        long = build_batch(
            [value], keys=[None], timestamp=7, producer_id=ProducerId(3), producer_epoch=2, base_sequence=9
        )
        assert short == long
        assert Batch.decode(short).values() == [value]
    with pytest.raises(RequestError, match="out of range"):
        build_batch([b"x"], timestamp=7, base_sequence=-1)
    with pytest.raises(RequestError, match="exceeds"):
        build_batch([bytes(PAYLOAD_BYTES_MAX)], timestamp=7)
    with pytest.raises(RequestError, match="does not fit"):
        build_batch([b"x"], timestamp=1 << 63)

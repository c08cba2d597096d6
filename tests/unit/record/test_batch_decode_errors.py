"""Bytes that are not a batch: `DecodeError` and nothing else, from either reader, within the stated bound.

Both readers, the pure one and Arrow's, must judge every payload alike, and agree on what is in it.
"""

from __future__ import annotations

import struct
import tracemalloc
from array import array
from collections.abc import Iterable
from typing import Any

import lz4.block
import pyarrow as pa
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quiver.errors import DecodeError
from quiver.record import HEADER_BYTES, Batch, BatchHeader, Compression, Record, build_batch, crc32c, decode_batches
from quiver.record.arrow import to_arrow
from quiver.record.columns import BinaryColumn
from quiver.record.compression import decompress
from quiver.record.header import encode_header
from quiver.record.payload import to_little_endian

BATCHES = [
    build_batch([b"abc", None, b"", b"d"] * 3, timestamp=5, keys=[b"k", None, b"", None] * 3, compression=compression)
    for compression in Compression
] + [
    build_batch(["ü", "b"], timestamp=5, timestamps=[1, 2], headers=[[("kü", None), ("b", "x")], [("", "")]]),
    build_batch([bytes(100)] * 9, timestamp=5, timestamps=range(9), compression=Compression.ZSTD),
]


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def i64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def forge(payload: bytes, *, record_count: int, **header: Any) -> bytes:
    """Return a batch with this payload and right checksums."""
    sizes = {"payload_bytes": len(payload), "raw_bytes": len(payload)} | header
    return encode_header(BatchHeader(record_count=record_count, **sizes), payload) + payload


def fix_checksums(data: bytearray) -> bytearray:
    """Make a batch of any bytes look whole: magic, version, stored length, both checksums."""
    data[0:4], data[40:42] = b"QVB1", b"\x01\x00"
    struct.pack_into("<I", data, 48, len(data) - HEADER_BYTES)
    if not data[42]:
        struct.pack_into("<I", data, 52, len(data) - HEADER_BYTES)
    struct.pack_into("<I", data, 92, crc32c(data[HEADER_BYTES:], crc32c(data[40:92])))
    struct.pack_into("<I", data, 4, crc32c(data[8:HEADER_BYTES]))
    return data


def read_both_ways(data: bytes | bytearray) -> list[Record] | None:
    """Read every record with both readers; None if they refuse. Fails if they differ or raise anything else."""
    try:
        records = list(Batch.decode(data).records())
    except DecodeError:
        with pytest.raises(DecodeError):
            to_arrow(Batch.decode(data))
        return None
    table = to_arrow(Batch.decode(data))
    table.validate(full=True)
    names = ("offset", "key", "value")
    assert [[getattr(record, name) for name in names] for record in records] == [
        [row[name] for name in names] for row in table.select(names).to_pylist()
    ]
    assert [record.timestamp for record in records] == table.column("timestamp").cast(pa.int64()).to_pylist()
    headers = [tuple((pair["key"], pair["value"]) for pair in row or ()) for row in table.column("headers").to_pylist()]
    assert [record.headers for record in records] == headers
    return records


def test_forged_payload_that_breaks_no_rule_is_read() -> None:
    payload = (
        b"\x3f\0\0\0" + u32(1) + i64(0, 0) + u32(1, 0) + u32(0, 2) + u32(0, 1) + u32(1) + u32(0) + b"\1\2\0" + b"vkkh"
    )
    assert read_both_ways(forge(payload, record_count=2)) == [
        Record(0, 0, None, b"v", ()),  # type: ignore[arg-type]  # a plain int stands for the offset
        Record(1, 0, b"kk", None, (("h", None),)),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("rule", "payload"),
    [
        ("unknown flag", b"\x40\0\0\0" + u32(0) + u32(1, 0) + b"v"),
        ("reserved byte", b"\0\0\1\0" + u32(0) + u32(1, 0) + b"v"),
        ("null keys without keys", b"\x10\0\0\0" + u32(0) + u32(1, 0) + b"\3" + b"v"),
        ("null header values without headers", b"\x20\0\0\0" + u32(0) + u32(1, 0) + b"v"),
        ("headers without the flag", b"\0\0\0\0" + u32(1) + u32(1, 0) + b"v"),
        ("the flag without headers", b"\4\0\0\0" + u32(0) + u32(1, 0) + u32(0, 0) + b"v"),
        ("sections beyond the end", b"\2\0\0\0" + u32(0) + u32(1, 0) + b"v"),
        ("many headers", b"\4\0\0\0" + u32(2**32 - 1) + u32(1, 0) + u32(0, 0) + b"v"),
        ("data left over", b"\0\0\0\0" + u32(0) + u32(1, 0) + b"vv"),
        ("data too short", b"\0\0\0\0" + u32(0) + u32(1, 1) + b"v"),
        ("lengths that wrap to the right sum", b"\0\0\0\0" + u32(0) + u32(2**32 - 1, 2) + b"v"),
        ("value bits beyond the column", b"\x08\0\0\0" + u32(0) + u32(1, 0) + b"\7" + b"v"),
        ("a null value with a length", b"\x08\0\0\0" + u32(0) + u32(1, 0) + b"\2" + b"v"),
        ("a null key with a length", b"\x12\0\0\0" + u32(0) + u32(1, 0) + u32(0, 1) + b"\1" + b"vk"),
        ("a null header value with a length", b"\x24\0\0\0" + u32(1) + u32(1, 0, 1, 0, 0, 1) + b"\0" + b"vh"),
        ("header counts that do not add up", b"\4\0\0\0" + u32(1) + u32(1, 0) + u32(0, 0) + u32(0, 0) + b"v"),
        ("header counts that wrap", b"\4\0\0\0" + u32(1) + u32(1, 0) + u32(2**32 - 1, 2) + u32(0, 0) + b"v"),
        ("a header key that is not UTF-8", b"\4\0\0\0" + u32(1) + u32(1, 0) + u32(1, 0) + u32(1, 0) + b"v\xff"),
        ("a character cut in two", b"\4\0\0\0" + u32(2) + u32(1, 0) + u32(1, 1) + u32(1, 1) + u32(0, 0) + b"v\xc3\xbc"),
        ("another first timestamp", b"\1\0\0\0" + u32(0) + i64(-1, 0) + u32(1, 0) + b"v"),
        ("another greatest timestamp", b"\1\0\0\0" + u32(0) + i64(0, 1) + u32(1, 0) + b"v"),
    ],
)
def test_payload_that_breaks_a_rule_is_refused(rule: str, payload: bytes) -> None:
    assert read_both_ways(forge(payload, record_count=2)) is None


KEYS = st.lists(st.text(max_size=3).map(str.encode) | st.binary(max_size=2), max_size=6)


@settings(max_examples=500)
@given(KEYS)
@example(["ü".encode()[:1], b"", "ü".encode()[1:]])
@example([b"a", b""])
def test_keys_are_text_if_each_is(keys: list[bytes]) -> None:
    """They are checked together, since a batch can have millions."""
    try:
        expected = bool([key.decode() for key in keys] or True)
    except UnicodeDecodeError:
        expected = False
    assert BinaryColumn(array("I", map(len, keys)), b"".join(keys), b"").is_text() is expected


def test_greatest_timestamp_without_a_column_is_the_first() -> None:
    payload = b"\0\0\0\0" + u32(0) + u32(1, 0) + b"v"
    assert read_both_ways(forge(payload, record_count=2, max_timestamp=1)) is None


def test_payload_without_room_for_a_preamble_is_refused() -> None:
    packed = lz4.block.compress(bytes(7), store_size=False)
    with pytest.raises(DecodeError, match="cannot be in"):
        Batch.decode(forge(packed, record_count=1, compression=1, raw_bytes=7))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
@example(BATCHES[0])
def test_arbitrary_bytes_raise_nothing_but_decode_error(data: bytes) -> None:
    try:
        for batch in decode_batches(data):
            batch.records()
    except DecodeError:
        pass


@settings(deadline=None, max_examples=1000)
@given(st.sampled_from(BATCHES), st.data())
def test_mutated_batch_with_right_checksums_is_judged_alike_by_both_readers(batch: bytes, data: st.DataObject) -> None:
    mutated = bytearray(batch)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(42, len(mutated) - 1))
        mutated[at] = data.draw(st.integers(0, 255))
    keep = data.draw(st.just(len(mutated)) | st.integers(HEADER_BYTES, len(mutated)))
    read_both_ways(fix_checksums(mutated[:keep] + data.draw(st.binary(max_size=4))))


def test_fixed_checksums_reach_the_payload() -> None:
    """The test above would be worth nothing if its batches were all refused at the door."""
    for batch in BATCHES:
        assert read_both_ways(fix_checksums(bytearray(batch))) is not None


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
@pytest.mark.parametrize("raw_bytes", [999, 1001, 12, 2**26])
def test_raw_size_that_is_not_the_real_one_is_refused(compression: Compression, raw_bytes: int) -> None:
    raw = b"\0\0\0\0" + u32(0) + u32(988) + bytes(988)
    packed = {
        Compression.LZ4: lz4.block.compress(raw, store_size=False),
        Compression.ZSTD: zstandard.ZstdCompressor().compress(raw),
    }[compression]
    assert read_both_ways(forge(packed, record_count=1, compression=compression, raw_bytes=1000)) is not None
    assert read_both_ways(forge(packed, record_count=1, compression=compression, raw_bytes=raw_bytes)) is None


def zstd_frames() -> Iterable[Any]:
    raw = bytes(1000)
    whole = zstandard.ZstdCompressor().compress(raw)
    yield pytest.param(b"", id="nothing")
    yield pytest.param(b"not a frame at all", id="no frame")
    yield pytest.param(whole[:-1], id="cut")
    yield pytest.param(whole + b"x", id="bytes left over")
    yield pytest.param(whole + whole, id="two frames")
    yield pytest.param(b"\x50\x2a\x4d\x18" + u32(1000) + raw, id="skippable frame")
    yield pytest.param(zstandard.ZstdCompressor(write_content_size=False).compress(raw), id="no content size")
    yield pytest.param(whole[:4] + b"\xe0" + b"\xff" * 8 + whole[7:], id="content size of 16 EiB")
    # Window descriptor 0x80 asks for 2**26 bytes, which the library would grant; the content size is right.
    yield pytest.param(whole[:4] + b"\x40\x80" + struct.pack("<H", 1000 - 256) + whole[7:], id="window of 64 MiB")


@pytest.mark.parametrize("stored", list(zstd_frames()))
def test_zstandard_frame_that_is_not_exactly_the_payload_is_refused(stored: bytes) -> None:
    with pytest.raises(DecodeError, match="Zstandard"):
        decompress(stored, Compression.ZSTD, raw_bytes=1000)


@pytest.mark.parametrize("stored", [b"", b"abc", b"\xff" * 50])
def test_lz4_block_that_is_not_exactly_the_payload_is_refused(stored: bytes) -> None:
    with pytest.raises(DecodeError, match="LZ4"):
        decompress(stored, Compression.LZ4, raw_bytes=1000)


@pytest.mark.parametrize("compression", Compression)
def test_reading_holds_at_most_four_times_the_raw_payload(compression: Compression) -> None:
    """As many records as fit in the payload is the worst case: nothing but lengths."""
    raw_bytes = 4 << 20
    record_count = (raw_bytes - 8) // 4
    batch = build_batch([b""] * record_count, timestamp=1, keys=None, compression=compression)
    assert Batch.decode(batch).header.raw_bytes == raw_bytes
    tracemalloc.start()
    try:
        records = Batch.decode(batch).records()
        assert records[record_count - 1].value == b""
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 4 * raw_bytes


@pytest.mark.parametrize("value", [b"", None])
def test_arrow_holds_at_most_forty_bytes_a_record_beside_the_payload(value: bytes | None) -> None:
    record_count = 1 << 18
    batch = Batch.decode(build_batch([value] * record_count, timestamp=1))
    pool_bytes = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        table = to_arrow(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.num_rows == record_count
    assert peak + pa.total_allocated_bytes() - pool_bytes <= 40 * record_count


def test_bounds_are_checked_before_anything_is_allocated() -> None:
    lies = forge(b"\0" * 12, record_count=1, compression=Compression.LZ4, raw_bytes=2**32 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="exceeds"):
            Batch.decode(lies)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


def test_numbers_are_little_endian_on_every_machine() -> None:

    assert to_little_endian(array("I", [1]), byteorder="little").tolist() == [1]
    assert to_little_endian(array("I", [1]), byteorder="big").tolist() == [1 << 24]


def test_every_prefix_of_a_batch_is_refused() -> None:
    for batch in BATCHES:
        for size in range(len(batch)):
            with pytest.raises(DecodeError):
                Batch.decode(batch[:size])

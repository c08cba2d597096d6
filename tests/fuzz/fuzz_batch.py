"""Fuzz the batch readers: ``python tests/fuzz/fuzz_batch.py -runs=200000``.

Any bytes are either read alike by both readers, the pure one and Arrow's, or refused by both with
`DecodeError`; anything else is a finding. A checksum stops almost every mutation at the door, so
half of the inputs get right ones: as a batch with its checksums fixed up, or as a payload behind a
header made for it.
"""

from __future__ import annotations

import struct
import sys

import atheris

with atheris.instrument_imports(include=["quiver"]):
    from quiver.errors import DecodeError
    from quiver.record import HEADER_BYTES, Batch, BatchHeader, Compression, Record, build_batch, crc32c
    from quiver.record.arrow import to_arrow
    from quiver.record.header import encode_header

SEEDS = [
    build_batch([b"abc", None, b"", b"d"] * 3, timestamp=5, keys=[b"k", None, b"", None] * 3),
    build_batch(["ü", "b"], timestamp=5, timestamps=[5, 6], headers=[[("kü", None), ("b", "x")], [("", "")]]),
    build_batch([bytes(100)] * 9, timestamp=5, compression=Compression.LZ4),
    build_batch([bytes(100)] * 9, timestamp=5, compression=Compression.ZSTD),
]


def fuzz_one(data: bytes) -> None:
    """Read one input in the way that its first byte chooses."""
    match data[:1][0] % 4 if data else 0:
        case 0 | 1:
            check(data[1:])
        case 2 if len(data) > HEADER_BYTES:
            check(fix_checksums(bytearray(data[1:])))
        case 3 if len(data) > 4:
            check(forge(data[1:4], data[4:]))
        case _:
            mutate_seed(data[1:])


def check(data: bytes | bytearray) -> None:
    """Read `data` both ways and compare."""
    try:
        records = list(Batch.decode(data).records())
    except DecodeError:
        records = None
    try:
        table = to_arrow(Batch.decode(data))
    except DecodeError:
        table = None
    if records is None or table is None:
        assert records is None, "only the Arrow reader refuses"
        assert table is None, "only the pure reader refuses"
        return
    table.validate(full=True)
    assert [as_row(record) for record in records] == table.drop_columns("timestamp").to_pylist()


def as_row(record: Record) -> dict[str, object]:
    """Return a record as Arrow shows it."""
    headers = [{"key": key, "value": value} for key, value in record.headers] or None
    return {"offset": record.offset, "key": record.key, "value": record.value, "headers": headers}


def fix_checksums(data: bytearray) -> bytearray:
    """Make any 96 bytes and more a batch with right checksums."""
    data[0:4], data[40:42] = b"QVB1", b"\x01\x00"
    struct.pack_into("<I", data, 48, len(data) - HEADER_BYTES)
    struct.pack_into("<I", data, 92, crc32c(data[HEADER_BYTES:], crc32c(data[40:92])))
    struct.pack_into("<I", data, 4, crc32c(data[8:HEADER_BYTES]))
    return data


def forge(choices: bytes, payload: bytes) -> bytes:
    """Return a batch with this payload and a header that allows it."""
    compression = choices[0] % 3
    raw_bytes = len(payload) if not compression else 16 * choices[1]
    header = BatchHeader(
        record_count=1 + choices[2] % 32, compression=compression, payload_bytes=len(payload), raw_bytes=raw_bytes
    )
    return encode_header(header, payload) + payload


def mutate_seed(choices: bytes) -> None:
    """Change single bytes of a valid batch: pairs of a place and a value."""
    data = bytearray(SEEDS[len(choices) % len(SEEDS)])
    for at, value in zip(choices[::2], choices[1::2], strict=False):
        data[42 + at % (len(data) - 42)] = value
    check(fix_checksums(data))


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()

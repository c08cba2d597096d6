"""Golden batches: the format does not drift, and neither does its description.

What other versions and other languages wrote must stay readable: the bytes here never change.
Compressed payloads are only read, because another version of a library may pack them differently.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.model import Index, Offset, ProducerId, Term
from quiver.record import Batch, Compression, Record, build_batch, build_control_batch, stamp
from quiver.record.arrow import to_arrow

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol" / "batch.md"


def example() -> bytes:
    """Return the batch of `docs/protocol/batch.md`."""
    built = build_batch(
        ["hello", None, ""],
        timestamp=1714564800000,
        keys=["k1", None, None],
        timestamps=[1714564800000, 1714564800007, 1714564800003],
        headers=[None, [("trace", b"\x2a"), ("source", None)], None],
        producer_id=ProducerId(7),
        producer_epoch=1,
        base_sequence=40,
    )
    return bytes(stamp(built, term=Term(3), index=Index(12), base_offset=Offset(100), append_timestamp=1714564800009))


def dump(data: bytes) -> str:
    """Return `data` as sixteen bytes a line: position, hexadecimal, text."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:04x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  |{text}|")
    return "\n".join(lines)


ONE_RECORD = bytes.fromhex(
    "515642318076ceea0000000000000000000000000000000000000000000000000000000000000000"
    "01000000010000000d0000000d00000001000000000000000100000000000000ffffffffffffffff"
    "0000000000000000000000001ff78023"
    "00000000000000000100000061"
)
CONTROL = bytes.fromhex(
    "51564231cdd9ae5c0000000000000000000000000000000000000000000000000000000000000000"
    "01000001000000000100000001000000ffffffffffffffffffffffffffffffffffffffffffffffff"
    "0000000000000000000000005469534e"
    "01"
)
EXAMPLE = bytes.fromhex(
    "51564231f85dc87203000000000000000c000000000000006400000000000000099e06348f010000"
    "01000000030000006a0000006a000000009e06348f010000079e06348f0100000700000000000000"
    "010000002800000000000000a1ce6e9d"
    "3f00000002000000009e06348f010000079e06348f010000039e06348f0100000500000000000000"
    "00000000020000000000000000000000000000000200000000000000050000000600000001000000"
    "0000000005010168656c6c6f6b317472616365736f757263652a"
)
LZ4 = bytes.fromhex(
    "515642312bfcca980000000000000000000000000000000000000000000000000000000000000000"
    "01000100140000001c0000000c01000001000000000000000100000000000000ffffffffffffffff"
    "000000000000000000000000d92734b9"
    "130001001f0904003c9f73616d65206c696e6509009350206c696e65"
)
ZSTD = bytes.fromhex(
    "51564231e337bfdd0000000000000000000000000000000000000000000000000000000000000000"
    "0100020014000000210000000c01000001000000000000000100000000000000ffffffffffffffff"
    "000000000000000000000000d5caa683"
    "28b52ffd600c00bd00006000000973616d65206c696e6503002816ea78872e06b0"
)


def crc32c_bit_by_bit(data: bytes) -> int:
    """Compute CRC-32C as its definition does, to hold the fast library to."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("built", "golden"),
    [
        (build_batch([b"a"], timestamp=1), ONE_RECORD),
        (build_control_batch(b"\x01", timestamp=-1), CONTROL),
        (example(), EXAMPLE),
    ],
    ids=["one record", "control", "example"],
)
def test_builders_still_write_the_golden_bytes(built: bytes, golden: bytes) -> None:
    assert built.hex() == golden.hex()


def test_example_is_still_read_as_it_was_written() -> None:
    batch = Batch.decode(EXAMPLE)
    assert list(batch.records()) == [
        Record(Offset(100), 1714564800000, b"k1", b"hello", ()),
        Record(Offset(101), 1714564800007, None, None, (("trace", b"\x2a"), ("source", None))),
        Record(Offset(102), 1714564800003, None, b"", ()),
    ]
    assert to_arrow(batch).column("value").to_pylist() == [b"hello", None, b""]


@pytest.mark.parametrize("golden", [LZ4, ZSTD], ids=["lz4", "zstd"])
def test_compressed_batches_are_still_read(golden: bytes) -> None:
    assert Batch.decode(golden).header.compression in (Compression.LZ4, Compression.ZSTD)
    assert Batch.decode(golden).values() == [b"same line"] * 20


@pytest.mark.parametrize("golden", [ONE_RECORD, CONTROL, EXAMPLE, LZ4, ZSTD])
def test_golden_checksums_are_crc32c_of_the_stated_bytes(golden: bytes) -> None:
    assert int.from_bytes(golden[4:8], "little") == crc32c_bit_by_bit(golden[8:96])
    assert int.from_bytes(golden[92:96], "little") == crc32c_bit_by_bit(golden[40:92] + golden[96:])


def test_document_shows_the_example_as_it_is() -> None:
    assert f"```\n{dump(EXAMPLE)}\n```" in DOCUMENT.read_text(encoding="utf-8")

"""The header: every rule it is held to, and who may write which part of it."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import DecodeError
from quiver.model import Buffer, Index, Offset, ProducerId, Term
from quiver.record import (
    HEADER_BYTES,
    Batch,
    BatchHeader,
    Compression,
    build_batch,
    build_control_batch,
    crc32c,
    decode_header,
    stamp,
    verify_payload,
)
from quiver.record.header import encode_header

BATCH = build_batch([b"abc", b"d"], timestamp=5, producer_id=ProducerId(1))
STAMP: dict[str, Any] = {"term": Term(2), "index": Index(9), "base_offset": Offset(40), "append_timestamp": 77}


def forge(batch: bytes, **changes: Any) -> bytes:
    """Return the batch with other header fields and right checksums."""
    payload = batch[HEADER_BYTES:]
    return encode_header(msgspec.structs.replace(decode_header(batch), **changes), payload) + payload


def flip(batch: bytes, bit: int) -> bytearray:
    damaged = bytearray(batch)
    damaged[bit // 8] ^= 1 << bit % 8
    return damaged


def test_checksum_is_crc32c_and_chains() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(memoryview(bytearray(b"x123456789"))[1:]) == 0xE3069283


def test_header_states_the_batch() -> None:
    header = decode_header(BATCH)
    assert header == BatchHeader(
        record_count=2,
        payload_bytes=20,
        raw_bytes=20,
        first_timestamp=5,
        max_timestamp=5,
        producer_id=ProducerId(1),
        payload_crc=crc32c(BATCH[HEADER_BYTES:], crc32c(BATCH[40:92])),
    )
    assert (header.batch_bytes, header.end_offset, header.is_control) == (len(BATCH), 2, False)


def test_header_needs_no_payload() -> None:
    assert decode_header(BATCH[:HEADER_BYTES]) == decode_header(BATCH)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_header_is_found_at_its_position(kind: type[Any]) -> None:
    buffer: Buffer = kind(b"xyz" + BATCH + b"tail")
    header = decode_header(buffer, 3)
    verify_payload(buffer, header, 3)
    assert header == decode_header(BATCH)
    assert Batch.decode(buffer, 3).values() == [b"abc", b"d"]


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_too_few_bytes_are_refused(size: int) -> None:
    with pytest.raises(DecodeError, match="too few"):
        decode_header(BATCH[:size])
    with pytest.raises(DecodeError, match="too few"):
        decode_header(b"x" + BATCH[:size], 1)


def test_other_magic_is_refused() -> None:
    with pytest.raises(DecodeError, match="starts with"):
        decode_header(b"QVB2" + BATCH[4:])


def test_any_flipped_header_bit_is_found() -> None:
    for bit in range(8 * 4, 8 * HEADER_BYTES):
        with pytest.raises(DecodeError, match="checksum"):
            decode_header(flip(BATCH, bit))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "unknown version"),
        ({"encoding": 1}, "unknown version"),
        ({"compression": 3}, "impossible"),
        ({"raw_bytes": 21}, "impossible"),
        ({"payload_bytes": 19}, "impossible"),
        ({"kind": 2}, "kind 2"),
        ({"kind": 1}, "kind 1"),
        ({"kind": 1, "record_count": 0, "compression": 1}, "kind 1"),
        ({"record_count": 0}, "0 records"),
        ({"record_count": 4}, "4 records"),
        ({"record_count": 2**32 - 1}, "records"),
        ({"base_offset": -1}, "base offset"),
        ({"base_offset": 2**63 - 2}, "base offset"),
        ({"first_timestamp": 6}, "timestamp"),
        ({"producer_id": -2}, "producer id"),
        ({"base_sequence": -1}, "sequence"),
        ({"compression": 1, "raw_bytes": 2**26 + 1}, "exceeds"),
        ({"compression": 1, "payload_bytes": 2**26 + 1}, "exceeds"),
    ],
)
def test_impossible_header_is_refused_although_its_checksums_are_right(changes: dict[str, int], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode_header(forge(BATCH, **changes))


def test_greatest_possible_numbers_are_accepted() -> None:
    extremes = {"base_offset": 2**63 - 3, "term": 2**64 - 1, "index": 2**64 - 1, "append_timestamp": -(2**63)}
    header = decode_header(forge(BATCH, **extremes, record_count=2, producer_epoch=2**32 - 1))
    assert header.end_offset == 2**63 - 1


def test_reader_may_set_a_lower_bound() -> None:
    assert decode_header(BATCH, payload_bytes_max=20).payload_bytes == 20
    with pytest.raises(DecodeError, match="exceeds 19"):
        decode_header(BATCH, payload_bytes_max=19)
    with pytest.raises(DecodeError, match="exceeds 19"):
        Batch.decode(BATCH, payload_bytes_max=19)
    packed = build_batch([bytes(1000)], timestamp=1, compression=Compression.ZSTD)
    with pytest.raises(DecodeError, match="exceeds 500"):
        Batch.decode(packed, payload_bytes_max=500)


def test_empty_control_batch_is_a_header_alone() -> None:
    assert len(build_control_batch(b"", timestamp=1)) == HEADER_BYTES


def test_stamp_writes_a_writable_buffer_in_place() -> None:
    for buffer in (bytearray(BATCH), memoryview(bytearray(BATCH))):
        assert stamp(buffer, **STAMP) is buffer
        assert decode_header(buffer).base_offset == 40


def test_stamp_copies_a_buffer_that_it_may_not_write() -> None:
    for buffer in (bytes(BATCH), memoryview(bytes(BATCH))):
        stamped = stamp(buffer, **STAMP)
        assert stamped is not buffer
        assert bytes(buffer) == BATCH
        assert decode_header(stamped).base_offset == 40


@settings(deadline=None)
@given(
    term=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**64 - 1),
    base_offset=st.integers(0, 2**63 - 3),
    append_timestamp=st.integers(-(2**63), 2**63 - 1),
)
def test_stamp_touches_its_own_part_only(**numbers: int) -> None:
    stamped = bytes(stamp(BATCH, **numbers))  # type: ignore[arg-type]  # plain ints stand for the ids
    assert stamped[:4] + stamped[40:] == BATCH[:4] + BATCH[40:]
    header = decode_header(stamped)
    verify_payload(stamped, header)
    assert {name: getattr(header, name) for name in numbers} == numbers


def test_a_stamped_batch_is_what_its_bytes_decode_to() -> None:
    batch = Batch.stamped(BATCH, **STAMP)
    decoded = Batch.decode(batch.data)
    assert (batch.header, bytes(batch.data)) == (decoded.header, bytes(decoded.data))
    assert (batch.header.term, batch.header.index, batch.header.base_offset) == (2, 9, 40)


def test_producer_checksum_finds_any_flipped_bit_behind_a_new_stamp() -> None:
    """A broker that damages a batch and then stamps it makes a right header checksum over wrong bytes."""
    for bit in range(8 * 40, 8 * len(BATCH)):
        with pytest.raises(DecodeError):
            Batch.decode(stamp(flip(BATCH, bit), **STAMP))


def test_verify_finds_a_cut_payload() -> None:
    with pytest.raises(DecodeError, match="has 116 bytes and 115 are there"):
        verify_payload(BATCH[:-1], decode_header(BATCH))
    with pytest.raises(DecodeError, match="truncated batch"):
        Batch.decode(BATCH[:-1], verify=False)


def test_unverified_batch_can_be_verified_later() -> None:
    batch = Batch.decode(BATCH[:-1] + b"X", verify=False)
    with pytest.raises(DecodeError, match="producer's checksum"):
        batch.verify()


def test_number_that_does_not_fit_is_a_struct_error() -> None:
    with pytest.raises(struct.error):
        encode_header(BatchHeader(record_count=-1), b"")

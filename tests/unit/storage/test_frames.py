"""Segment headers, marks and footers: exact round trips, and nothing but `DecodeError` for other bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import DecodeError
from quiver.model import Index, Offset, Term
from quiver.record.checksum import crc32c
from quiver.storage.frames import (
    MARK_BYTES,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    Footer,
    SegmentHeader,
    SparseIndex,
    decode_footer,
    decode_mark,
    decode_segment_header,
    encode_mark,
    footer_bytes,
)
from quiver.storage.hardstate import HardStateFile, StoredHardState, _decode_slot, _encode_slot
from quiver.storage.scan import BadFrame, SegmentFrame, decode_frame
from quiver.storage.snapshots import StoredSnapshot, decode_snapshot
from quiver.testing import SimulatedDisk

U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.builds(
    SegmentHeader,
    generation=U64,
    first_index=U64.map(Index),
    first_offset=I64.map(Offset),
    previous_term=U64.map(Term),
    created_ms=I64,
)


@st.composite
def footers(draw: st.DrawFn) -> Footer:
    index = SparseIndex()
    for position, entry, offset, timestamp in draw(st.lists(st.tuples(I64, I64, I64, I64), max_size=5)):
        index.add(position=position, index=Index(entry), offset=Offset(offset), timestamp_before=timestamp)
    return Footer(
        header=draw(HEADERS),
        data_end=draw(U64),
        end_index=draw(U64.map(Index)),
        end_offset=draw(I64.map(Offset)),
        max_timestamp=draw(I64),
        last_append_ms=draw(I64),
        terms=tuple(draw(st.lists(st.tuples(U64.map(Index), U64.map(Term)), max_size=3))),
        index=index,
    )


SNAPSHOTS = st.builds(
    StoredSnapshot,
    last_index=U64.map(Index),
    last_term=U64.map(Term),
    end_offset=I64.map(Offset),
    state=st.binary(max_size=50),
)


@given(HEADERS)
def test_segment_header_round_trip(header: SegmentHeader) -> None:
    assert len(header.encode()) == SEGMENT_HEADER_BYTES
    assert decode_segment_header(header.encode() + b"more") == header


@given(U64, st.binary(max_size=5))
def test_mark_round_trip(durable_end: int, before: bytes) -> None:
    assert decode_mark(before + encode_mark(durable_end) + b"more", len(before)) == durable_end


@given(footers())
def test_footer_round_trip(footer: Footer) -> None:
    data = footer.encode()
    assert footer_bytes(data[-TRAILER_BYTES:]) == len(data)
    decoded = decode_footer(data)
    assert decoded.index.encode() == footer.index.encode()
    fields = ("header", "data_end", "end_index", "end_offset", "max_timestamp", "last_append_ms", "terms")
    assert [getattr(decoded, name) for name in fields] == [getattr(footer, name) for name in fields]


@given(SNAPSHOTS)
def test_snapshot_round_trip(snapshot: StoredSnapshot) -> None:
    assert decode_snapshot(snapshot.encode()) == snapshot


DECODERS: dict[str, Callable[[bytes], object]] = {
    "header": decode_segment_header,
    "mark": lambda data: decode_mark(data, 0),
    "trailer": footer_bytes,
    "footer": decode_footer,
    "snapshot": decode_snapshot,
}
ENCODED = st.one_of(
    HEADERS.map(SegmentHeader.encode),
    U64.map(encode_mark),
    footers().map(Footer.encode),
    SNAPSHOTS.map(StoredSnapshot.encode),
)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.one_of(st.binary(max_size=400), ENCODED))
def test_arbitrary_bytes_are_decoded_or_refused(name: str, data: bytes) -> None:
    with suppress(DecodeError):
        DECODERS[name](data)


@settings(max_examples=300, deadline=None)
@given(data=ENCODED, position=st.integers(0, 10_000), mask=st.integers(1, 255), cut=st.booleans())
def test_changed_bytes_are_refused(data: bytes, position: int, mask: int, cut: bool) -> None:
    position %= len(data)
    changed = bytearray(data)
    changed[position] ^= mask
    damaged = bytes(data[:position] if cut else changed)
    decode = {b"SEGQ": "header", b"MRKQ": "mark", b"FTRQ": "footer", b"QVSN": "snapshot"}[data[:4]]
    with pytest.raises(DecodeError):
        DECODERS[decode](damaged)


@given(st.binary(max_size=300), st.integers(0, 20))
def test_arbitrary_bytes_are_no_frame(data: bytes, at: int) -> None:
    assert isinstance(decode_frame(data, min(at, len(data))), BadFrame)


def test_a_mark_is_a_frame() -> None:
    frame = decode_frame(b"ab" + encode_mark(77), 2, base=100)
    assert isinstance(frame, SegmentFrame)
    assert (frame.position, frame.end, frame.durable_end, frame.header) == (102, 102 + MARK_BYTES, 77, None)


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_no_hard_state(data: bytes) -> None:
    assert _decode_slot(data) is None


def test_a_hard_state_whose_file_lost_its_end_is_found_in_the_first_slot() -> None:
    disk = SimulatedDisk()
    slot = _encode_slot(1, StoredHardState(term=Term(3)))
    disk.write_file("/l/hardstate", slot + slot[:100])
    assert HardStateFile(disk, "/l").load() == StoredHardState(term=Term(3))


def test_a_segment_header_of_another_version_is_refused_by_its_number() -> None:
    data = bytearray(
        SegmentHeader(
            generation=0, first_index=Index(1), first_offset=Offset(0), previous_term=Term(0), created_ms=0
        ).encode()
    )
    data[8] = 2
    data[4:8] = crc32c(bytes(data[8:])).to_bytes(4, "little")
    with pytest.raises(DecodeError, match="version 2"):
        decode_segment_header(data)


def test_footer_whose_length_does_not_match_its_counts_is_rejected() -> None:
    footer = Footer(
        header=SegmentHeader(
            generation=0, first_index=Index(1), first_offset=Offset(0), previous_term=Term(0), created_ms=0
        ),
        data_end=80,
        end_index=Index(1),
        end_offset=Offset(0),
        max_timestamp=0,
        last_append_ms=0,
        terms=(),
        index=SparseIndex(),
    ).encode()
    body = bytearray(footer[:-TRAILER_BYTES])
    body[44:48] = (5).to_bytes(4, "little")
    trailer = len(body).to_bytes(4, "little") + crc32c(bytes(body)).to_bytes(4, "little") + b"FTRQ"
    with pytest.raises(DecodeError, match="length does not match its counts"):
        decode_footer(bytes(body) + trailer)


def test_a_snapshot_of_another_version_is_refused_by_its_number() -> None:
    data = bytearray(StoredSnapshot(last_index=Index(1), last_term=Term(1), end_offset=Offset(0), state=b"x").encode())
    data[8] = 9
    data[4:8] = crc32c(bytes(data[8:])).to_bytes(4, "little")
    with pytest.raises(DecodeError, match="version 9"):
        decode_snapshot(data)

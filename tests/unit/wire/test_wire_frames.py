"""Frames: the reader against a naive one, however the stream is cut, and against anything that is not a frame."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import DecodeError, InvariantBroken
from quiver.model import Buffer
from quiver.record.checksum import crc32c
from quiver.wire.frames import (
    BUFFER_BYTES_MAX,
    BUFFER_BYTES_MIN,
    HEAD_BYTES_MAX,
    HEADER_BYTES,
    JOIN_BYTES_MAX,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
)

FRAME_BYTES_MAX = 4 * 1024 * 1024
Plain = tuple[int, bytes, bytes]


def feed(reader: FrameReader, data: Buffer) -> list[Frame]:
    """Give a reader bytes in as few pieces as it takes, and return what it makes of them."""
    frames = []
    rest = memoryview(data)
    while rest:
        room = reader.writable()
        count = min(len(room), len(rest))
        room[:count] = rest[:count]
        rest = rest[count:]
        reader.received(count)
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
    return frames


def read(pieces: Iterable[bytes]) -> list[Plain]:
    reader = FrameReader(FRAME_BYTES_MAX)
    frames = [frame for piece in pieces for frame in feed(reader, piece)]
    return [(int(frame.kind), bytes(frame.head), bytes(frame.payload)) for frame in frames]


def split_naively(data: bytes) -> list[Plain]:
    """Cut a valid stream as the byte table says."""
    frames = []
    while data:
        length, _, kind, _, head_bytes = struct.unpack("<IIBBH", data[:12])
        frame, data = data[12 : 4 + length], data[4 + length :]
        frames.append((kind, frame[:head_bytes], frame[head_bytes:]))
    return frames


def frame_bytes(
    kind: FrameKind, head: bytes = b"", parts: Sequence[Buffer] = (), *, check_payload: bool = False
) -> bytes:
    return b"".join(encode_frame(kind, head, parts, check_payload=check_payload))


STREAM = b"".join(
    (
        frame_bytes(FrameKind.HELLO, b"head"),
        frame_bytes(FrameKind.MESSAGE, b"", [b"a", b"bc"], check_payload=True),
        frame_bytes(FrameKind.MESSAGE, b"", [], check_payload=True),
        frame_bytes(FrameKind.REFUSAL, b"x" * 40, [b"payload"]),
    )
)


def forge(kind: int, flags: int, head_bytes: int, rest: bytes) -> bytes:
    """Return a frame with a right checksum, whatever else is wrong with it."""
    checked = struct.pack("<BBH", kind, flags, head_bytes) + rest
    covered = checked if flags & 1 else checked[: 4 + head_bytes]
    return struct.pack("<II", 4 + len(checked), crc32c(covered)) + checked


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_reader_finds_the_same_frames_wherever_the_stream_is_cut(at: int) -> None:
    assert read([STREAM[:at], STREAM[at:]]) == split_naively(STREAM)


def test_reader_finds_the_same_frames_byte_by_byte() -> None:
    assert read(STREAM[at : at + 1] for at in range(len(STREAM))) == split_naively(STREAM)


@settings(deadline=None)  # 2 MiB in small pieces take their time on a busy machine
@given(
    st.lists(
        st.tuples(
            st.sampled_from(FrameKind),
            st.binary(max_size=30),
            st.integers(0, 3 * BUFFER_BYTES_MIN) | st.integers(0, BUFFER_BYTES_MAX + 9),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.lists(st.integers(64, 2 * BUFFER_BYTES_MIN), min_size=1, max_size=20),
)
def test_reader_agrees_with_naive_splitting(frames: list[tuple[FrameKind, bytes, int, bool]], sizes: list[int]) -> None:
    stream = b"".join(
        frame_bytes(kind, head, [bytes([at]) * payload_bytes], check_payload=check)
        for at, (kind, head, payload_bytes, check) in enumerate(frames)
    )
    pieces: list[bytes] = []
    at = 0
    while at < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[at : at + size])
        at += size
    assert read(pieces) == split_naively(stream)
    assert read([stream]) == split_naively(stream)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_arbitrary_bytes_are_frames_or_a_decode_error(pieces: list[bytes]) -> None:
    reader = FrameReader(1024)
    with suppress(DecodeError):
        for piece in pieces:
            feed(reader, piece)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 80), st.binary(max_size=64))
def test_only_known_kinds_flags_and_heads_are_read(kind: int, flags: int, head_bytes: int, rest: bytes) -> None:
    frame = forge(kind, flags, head_bytes, rest)
    if kind in set(FrameKind) and flags in (0, 1) and head_bytes <= len(rest):
        assert read([frame]) == [(kind, rest[:head_bytes], rest[head_bytes:])]
    else:
        with pytest.raises(DecodeError):
            read([frame])


@pytest.mark.parametrize("length", [0, 1, 7, 2**20 - 3, 2**31, 2**32 - 1])
def test_impossible_length_is_refused_from_its_four_bytes(length: int) -> None:
    reader = FrameReader(2**20)
    assert feed(reader, struct.pack("<I", length)[:3]) == []
    with pytest.raises(DecodeError, match=f"frame of {length + 4} bytes, must be 12 to 1048576"):
        feed(reader, struct.pack("<I", length)[3:])


def test_frame_of_the_greatest_length_is_read() -> None:
    reader = FrameReader(2**20)
    frame = frame_bytes(FrameKind.MESSAGE, b"", [bytes(2**20 - HEADER_BYTES)])
    assert [len(found.payload) for found in feed(reader, frame)] == [2**20 - HEADER_BYTES]
    reader.frame_bytes_max = 2**20 - 1
    with pytest.raises(DecodeError, match="must be 12 to 1048575"):
        feed(reader, frame)


@pytest.mark.parametrize("bit", range(8 * (HEADER_BYTES + 7)))
def test_no_flipped_bit_goes_unnoticed(bit: int) -> None:
    frame = bytearray(frame_bytes(FrameKind.MESSAGE, b"head", [b"abc"], check_payload=True))
    frame[bit // 8] ^= 1 << bit % 8
    # A frame that grew swallows the next one, one that shrank leaves bytes behind: both then fail.
    with pytest.raises(DecodeError):
        read([bytes(frame) + STREAM + bytes(FRAME_BYTES_MAX)])


def test_payload_is_not_checked_unless_its_sender_wants() -> None:
    frame = bytearray(frame_bytes(FrameKind.MESSAGE, b"head", [b"abc"]))
    frame[-1] ^= 1
    assert read([bytes(frame)]) == [(3, b"head", b"abb")]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0, 5, 0],
        [JOIN_BYTES_MAX - 1],
        [JOIN_BYTES_MAX],
        [3, JOIN_BYTES_MAX, 4, 5, JOIN_BYTES_MAX + 1, JOIN_BYTES_MAX, 6],
        [JOIN_BYTES_MAX // 2] * 5,
    ],
)
def test_parts_arrive_as_one_payload(sizes: list[int], check: bool) -> None:
    parts: list[Buffer] = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    views: list[Buffer] = [memoryview(bytearray(part)) for part in parts]
    whole = frame_bytes(FrameKind.MESSAGE, b"h", parts, check_payload=check)
    assert read([whole]) == [(3, b"h", b"".join(parts))]
    assert frame_bytes(FrameKind.MESSAGE, b"h", views, check_payload=check) == whole


def test_large_parts_are_not_copied() -> None:
    large = bytes(JOIN_BYTES_MAX)
    buffers = encode_frame(FrameKind.MESSAGE, b"", [b"a", large, b"b", b"c", large])
    assert [buffer is large for buffer in buffers] == [False, True, False, True]
    assert bytes(buffers[2]) == b"bc"


def test_head_too_long_for_its_length_is_a_bug() -> None:
    assert len(frame_bytes(FrameKind.HELLO, bytes(HEAD_BYTES_MAX))) == HEADER_BYTES + HEAD_BYTES_MAX
    with pytest.raises(InvariantBroken, match="head_bytes=65536"):
        encode_frame(FrameKind.HELLO, bytes(HEAD_BYTES_MAX + 1))


@pytest.mark.parametrize("payload_bytes", [100, BUFFER_BYTES_MIN, 2 * BUFFER_BYTES_MAX])
def test_frames_can_be_kept_and_are_read_only(payload_bytes: int) -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    kept = []
    for at in range(9):
        kept += feed(reader, frame_bytes(FrameKind.MESSAGE, b"", [bytes([at]) * payload_bytes]))
    assert [bytes(frame.payload) for frame in kept] == [bytes([at]) * payload_bytes for at in range(9)]
    assert all(frame.payload.readonly for frame in kept)


def test_idle_reader_is_small_and_a_busy_one_grows_to_its_bound() -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    assert len(reader.writable()) == BUFFER_BYTES_MIN
    feed(reader, frame_bytes(FrameKind.MESSAGE, b"", [bytes(90)]) * 20_000)
    feed(reader, b"")
    assert BUFFER_BYTES_MAX // 2 < len(reader.writable()) <= BUFFER_BYTES_MAX


def test_claimed_length_of_a_large_frame_allocates_nothing() -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    frame = frame_bytes(FrameKind.MESSAGE, b"", [bytes(2**20)])
    assert feed(reader, frame[:100]) == []
    assert len(reader.writable()) == BUFFER_BYTES_MAX - 100
    (received,) = feed(reader, frame[100:])
    assert len(received.body) == 2**20

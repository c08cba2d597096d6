"""Frames: message boundaries in a byte stream. Pure: bytes in, frames out, no I/O.

A frame is a fixed header of 12 bytes, a head (a few fields, msgpack) and a raw payload; the byte table is in
`docs/protocol/wire.md`. The checksum covers kind to head. It covers the payload only if a flag says so:
batches carry their own checksums, so that a sender does not have to read their bytes again.

Invariants: a frame's length is checked against the limit as soon as its first four bytes are received, and memory for
it grows as its bytes arrive, to at most four times of what has arrived; a returned frame owns its memory, which is
never written again; a received byte is copied less than three times on average, however the stream was split. Input is
untrusted: any violation is a `DecodeError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from quiver.errors import DecodeError, invariant
from quiver.model import Buffer
from quiver.record.checksum import crc32c

HEADER = struct.Struct("<IIBBH")
"""Length of all that follows it, checksum, kind, flags, length of the head."""
HEADER_BYTES = HEADER.size
LENGTH_BYTES = 4
CHECKED_FROM = 8
"""Position of the first byte that the checksum covers: the kind."""
HEAD_BYTES_MAX = 0xFFFF

CHECKED_PAYLOAD = 0x01
"""Flag: the checksum covers the payload as well."""
KNOWN_FLAGS = CHECKED_PAYLOAD

JOIN_BYTES_MAX = 32 * 1024
"""Parts shorter than this are copied into one buffer, which costs less than one write for each."""
BUFFER_BYTES_MIN = 4 * 1024
BUFFER_BYTES_MAX = 256 * 1024
"""A reader's buffer starts small, since most connections are idle, and grows when a read has filled it."""
GROWTH = 4
"""How many times larger the memory of a large frame becomes when it is full: a length alone allocates nothing."""

_FRONT = struct.Struct("<II")
_REST = struct.Struct("<BBH")
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = 4


class FrameKind(IntEnum):
    """The kind of a frame; numbers are never reused."""

    HELLO = 1
    REFUSAL = 2
    MESSAGE = 3
    REQUEST = 4
    RESPONSE = 5
    CANCEL = 6


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(msgspec.Struct, gc=False):
    """One whole frame; its views may be kept, and their content never changes."""

    kind: FrameKind
    head: memoryview
    payload: memoryview
    body: memoryview = memoryview(b"")
    """Head and payload as one view."""


def encode_frame(
    kind: FrameKind, head: bytes = b"", parts: Sequence[Buffer] = (), *, check_payload: bool = False
) -> list[Buffer]:
    """Return the buffers that make up one frame, whose payload is given in parts of unsigned bytes.

    Large parts are returned as they are, without a copy: they must not change until they are sent.
    """
    if len(head) > HEAD_BYTES_MAX:
        invariant(False, "the head of a frame is too long", head_bytes=len(head))  # noqa: FBT003 - not called when it holds
    rest = _REST.pack(kind, CHECKED_PAYLOAD if check_payload else 0, len(head))
    if sum(map(len, parts)) >= JOIN_BYTES_MAX:
        return _encode_large(rest + head, parts, check_payload=check_payload)
    body = b"".join((rest, head, *parts))
    checksum = crc32c(body if check_payload else body[: len(rest) + len(head)])
    return [_FRONT.pack(_CHECKSUM_BYTES + len(body), checksum) + body]


def _encode_large(checked: bytes, parts: Sequence[Buffer], *, check_payload: bool) -> list[Buffer]:
    checksum = crc32c(checked)
    if check_payload:
        for part in parts:
            checksum = crc32c(part, checksum)
    length = _CHECKSUM_BYTES + len(checked) + sum(map(len, parts))
    buffers: list[Buffer] = []
    small: list[Buffer] = [_FRONT.pack(length, checksum), checked]
    for part in parts:
        if len(part) < JOIN_BYTES_MAX:
            small.append(part)
            continue
        if small:
            buffers.append(b"".join(small))
            small = []
        buffers.append(part)
    if small:
        buffers.append(b"".join(small))
    return buffers


class FrameReader:
    """Split a received stream into frames.

    Its user receives into `writable()`, reports the count with `received`, and calls `next_frame` until it returns
    None. After a `DecodeError` the frame boundaries are lost and the reader is unusable.
    """

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        """Greatest length of a whole frame; may be changed between two frames."""
        self._view = memoryview(bytearray(BUFFER_BYTES_MIN))
        self._first = 0
        self._end = 0
        # How many bytes, counted from `_first`, the next frame is known to need.
        self._wanted_bytes = HEADER_BYTES
        # A frame larger than the buffer is received directly into memory of its own.
        self._large: memoryview | None = None
        self._large_frame_bytes = 0
        self.large_bytes = 0
        """How much has arrived of a frame that is larger than the buffer; 0 if there is none."""
        self.is_drained = True
        """Whether the last frame that `next_frame` returned was all that had been received."""
        self.frames = 0
        """Frames returned so far."""

    def writable(self) -> memoryview:
        """Return the buffer for the next received bytes; never empty."""
        if self._large is not None:
            if self.large_bytes == len(self._large):
                self._grow_large()
            return self._large[self.large_bytes :]
        if self._first == self._end and self._end < len(self._view):
            self._first = self._end = 0
        elif self._first + self._wanted_bytes > len(self._view) or self._first == self._end:
            self._make_room()
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Report that `count` bytes were written into the buffer that `writable` returned."""
        if self._large is not None:
            self.large_bytes += count
        else:
            self._end += count

    @property
    def is_partial(self) -> bool:
        """Return whether a frame has begun that is not complete."""
        return self._large is not None or self._end > self._first

    def close(self) -> None:
        """Free the memory at once; its connection may stay referred to until the next garbage collection."""
        self._view, self._large = memoryview(b""), None
        self._first = self._end = self.large_bytes = 0

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None until more is received.

        Raises:
            DecodeError: the stream does not continue with a valid frame.
        """
        if self._large is not None:
            return self._finish_large()
        held_bytes = self._end - self._first
        if held_bytes < LENGTH_BYTES:
            self._wanted_bytes = HEADER_BYTES
            return None
        frame_bytes = LENGTH_BYTES + _LENGTH.unpack_from(self._view, self._first)[0]
        if not HEADER_BYTES <= frame_bytes <= self.frame_bytes_max:
            raise DecodeError(f"frame of {frame_bytes} bytes, must be {HEADER_BYTES} to {self.frame_bytes_max}")
        if held_bytes < frame_bytes:
            self._expect(frame_bytes)
            return None
        end = self._first + frame_bytes
        frame = _decode_frame(memoryview(bytes(self._view[self._first : end])))
        self._first = end
        self.is_drained = end == self._end
        self.frames += 1
        return frame

    def _make_room(self) -> None:
        """Move the beginning of an unfinished frame to the front, of a larger buffer if the last read filled it.

        It is called at most once per frame, so that a stream in tiny pieces does not move the same bytes many times.
        """
        held = self._view[self._first : self._end]
        if self._end == len(self._view) < BUFFER_BYTES_MAX:
            self._view = memoryview(bytearray(4 * len(self._view)))
        self._view[: len(held)] = held
        self._first, self._end = 0, len(held)

    def _expect(self, frame_bytes: int) -> None:
        self._wanted_bytes = frame_bytes
        if frame_bytes <= len(self._view):
            return
        held = self._view[self._first : self._end]
        self._large = memoryview(bytearray(min(frame_bytes, max(BUFFER_BYTES_MAX, GROWTH * len(held)))))
        self._large_frame_bytes = frame_bytes
        self._large[: len(held)] = held
        self.large_bytes = len(held)
        # `_end` stays, because `_make_room` grows a buffer that the last read has filled.
        self._first = self._end

    def _grow_large(self) -> None:
        assert self._large is not None
        grown = memoryview(bytearray(min(self._large_frame_bytes, GROWTH * len(self._large))))
        grown[: self.large_bytes] = self._large
        self._large = grown

    def _finish_large(self) -> Frame | None:
        assert self._large is not None
        if self.large_bytes < self._large_frame_bytes:
            return None
        whole, self._large = self._large.toreadonly(), None
        self.large_bytes = 0
        self.is_drained = True  # what follows was not read: a large frame is received into memory of its own
        self.frames += 1
        return _decode_frame(whole)


def _decode_frame(whole: memoryview) -> Frame:
    """Check a frame's header against its bytes and split the frame.

    Raises:
        DecodeError: the checksum or the head's length is wrong, or the kind or a flag unknown.
    """
    _, checksum, kind_number, flags, head_bytes = HEADER.unpack_from(whole)
    head_end = HEADER_BYTES + head_bytes
    if head_end > len(whole):
        raise DecodeError(f"head of {head_bytes} bytes in a frame of {len(whole)}")
    if crc32c(whole[CHECKED_FROM:] if flags & CHECKED_PAYLOAD else whole[CHECKED_FROM:head_end]) != checksum:
        raise DecodeError("the frame's checksum is wrong")
    kind = _KINDS.get(kind_number)
    if kind is None or flags & ~KNOWN_FLAGS:
        raise DecodeError(f"the frame has an unknown kind {kind_number} or unknown flags {flags:#04x}")
    return Frame(kind, whole[HEADER_BYTES:head_end], whole[head_end:], whole[HEADER_BYTES:])

"""Read the frames of a segment file, verify each, and classify the bytes that are no frame.

- `scan` yields intact batches and marks and stops at the first bad frame, for code that serves or appends;
- `scan_entries` does the same, but skips damaged marks, which hold no entry;
- `walk` continues after bad ranges, for inspection;
- `is_damage` and its siblings distinguish damage from a torn tail.

All of them read in chunks, so that a segment of any size needs little memory, and each batch is a view of a chunk:
one copy from the page cache.

Damage or torn tail: after a power failure the sectors of an unsynced write may have reached the disk in any order, so
intact frames *after* a hole prove nothing. Two things prove that the hole was once intact: a later mark that covers it,
or that no sector of the bad frame is missing, so that its bytes have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from quiver.errors import DecodeError
from quiver.record.header import HEADER_BYTES, MAGIC, BatchHeader, decode_header, verify_payload
from quiver.storage.disk import File
from quiver.storage.frames import (
    FOOTER_MAGIC,
    MARK_BYTES,
    MARK_MAGIC,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    decode_mark,
    footer_bytes,
)

CHUNK_BYTES = 1024 * 1024
"""Size of one read: large enough to be cheap per byte, small enough to be cheap in memory."""
CHUNK_BYTES_MAX = 4 * CHUNK_BYTES
"""Largest size of one read, unless a single batch is larger."""
_FRAMES_PER_CHUNK = 4
"""Batches of the last seen size that a chunk should hold: the one that crosses its end is read twice."""
_NO_DATA = memoryview(b"")
SECTOR_BYTES = 512
"""The unit in which a disk loses unsynced bytes; a lost sector of a growing file reads as zeros."""


class SegmentFrame(msgspec.Struct, frozen=True, gc=False):
    """One intact frame: a batch (then `header` and `data` are set) or a mark (then `durable_end` is)."""

    position: int
    end: int
    header: BatchHeader | None
    data: memoryview
    durable_end: int = 0


class BadFrame(msgspec.Struct, frozen=True):
    """The position at which a scan stopped before the end, and the reason."""

    position: int
    reason: str
    header: BatchHeader | None = None
    """Set when the batch's header is intact and only its payload is missing or bad."""


def scan(file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[SegmentFrame | BadFrame]:
    """Yield the frames in `[position, end)`, up to and including the first `BadFrame`, if there is one."""
    while position < end:
        asked_bytes = min(chunk_bytes, end - position)
        chunk = file.read(asked_bytes, position)
        if not chunk:
            yield BadFrame(position, "the file ends too early")
            return
        base, chunk_end = position, position + len(chunk)
        is_all = chunk_end == end or len(chunk) < asked_bytes
        while position < chunk_end:
            found = decode_frame(chunk, position - base, base=base)
            if isinstance(found, BadFrame):
                needed = found.header.batch_bytes if found.header else HEADER_BYTES
                if is_all or position + needed <= chunk_end:
                    yield found
                    return
                # The frame crosses the chunk's end: read again from its first byte, enough for all of it and more.
                chunk_bytes = max(chunk_bytes, needed, min(needed * _FRAMES_PER_CHUNK, CHUNK_BYTES_MAX))
                break
            yield found
            position = found.end


def decode_frame(data: bytes, at: int, *, base: int = 0) -> SegmentFrame | BadFrame:
    """Return the frame at `at` of `data`, which begins at position `base` of its file."""
    header: BatchHeader | None = None
    try:
        if data.startswith(MARK_MAGIC, at):
            return SegmentFrame(base + at, base + at + MARK_BYTES, None, _NO_DATA, decode_mark(data, at))
        header = decode_header(data, at, may_be_sealed=True)
        end = at + HEADER_BYTES + header.payload_bytes
        if end > len(data):
            return BadFrame(base + at, "the batch crosses the end of the data", header)
        verify_payload(data, header, at)
        return SegmentFrame(base + at, base + end, header, memoryview(data)[at:end])
    except DecodeError as error:
        return BadFrame(base + at, str(error), header)


# -- damage or torn tail ------------------------------------------------------------------------


def is_footer(file: File, position: int, end: int) -> bool:
    """Return whether `[position, end)` is a footer, possibly damaged or incomplete: it holds no entries."""
    if file.read(len(FOOTER_MAGIC), position) == FOOTER_MAGIC:
        return True
    try:
        return footer_bytes(file.read(TRAILER_BYTES, end - TRAILER_BYTES)) == end - position
    except DecodeError:
        return False


def is_damage(file: File, bad: BadFrame, end: int) -> bool:
    """Return whether bad bytes are damage, which was once on disk, or a torn tail, which was never acknowledged."""
    if is_marked_durable(file, bad.position, end):
        return True
    frame_end = bad.position + (bad.header.batch_bytes if bad.header else HEADER_BYTES)
    if not _has_bytes(file, frame_end - 1, end):
        return False  # the frame crosses the end of the written bytes
    return not _has_lost_sector(file, bad.position, frame_end)


def is_marked_durable(file: File, position: int, end: int) -> bool:
    """Return whether an intact mark in `[position, end)` covers the byte at `position`: it was once on disk."""
    for at in _find_all(file, MARK_MAGIC, position, end):
        try:
            # A mark covers only bytes before itself; bytes of a batch may look like a mark by chance.
            if position < decode_mark(file.read(MARK_BYTES, at), 0) <= at:
                return True
        except DecodeError:
            continue
    return False


def is_damaged_mark(file: File, position: int, end: int, *, next_index: int | None) -> bool:
    """Return whether only a mark is bad at `position`: the log continues directly after its length.

    `next_index` is the entry that must follow, if it is known.
    """
    following = next(scan(file, position + MARK_BYTES, end), None)
    if not isinstance(following, SegmentFrame):
        return False
    return following.header is None or next_index in (None, following.header.index)


def scan_entries(
    file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[SegmentFrame | BadFrame]:
    """Yield the frames in `[position, end)` as `scan` does, but skip damaged marks."""
    next_index: int | None = None
    while True:
        bad: BadFrame | None = None
        for found in scan(file, position, end, chunk_bytes=chunk_bytes):
            if isinstance(found, BadFrame):
                bad = found
                break
            yield found
            next_index = found.header.index + 1 if found.header else next_index
        if bad is None:
            return
        if not is_damaged_mark(file, bad.position, end, next_index=next_index):
            yield bad
            return
        position = bad.position + MARK_BYTES


def is_torn_at_birth(file: File, size: int) -> bool:
    """Return whether a segment with a bad header was never completely created, and so holds no acknowledged entry."""
    if size <= SEGMENT_HEADER_BYTES:
        return True
    # The header is in one sector: either the sector was lost, or the header was on disk and has changed since.
    is_lost = not any(file.read(SEGMENT_HEADER_BYTES, 0))
    return is_lost and not is_marked_durable(file, SEGMENT_HEADER_BYTES, size)


def _find_all(file: File, wanted: bytes, position: int, end: int) -> Iterator[int]:
    """Yield each position in `[position, end)` of the bytes `wanted`."""
    overlap = len(wanted) - 1  # the wanted bytes may cross the end of a chunk
    while position < end:
        chunk = file.read(min(CHUNK_BYTES + overlap, end - position), position)
        at = chunk.find(wanted)
        while at >= 0:
            yield position + at
            at = chunk.find(wanted, at + 1)
        position += CHUNK_BYTES


def _has_bytes(file: File, position: int, end: int) -> bool:
    """Return whether `[position, end)` contains a byte other than zero."""
    while position < end:
        chunk = file.read(min(CHUNK_BYTES, end - position), position)
        if chunk.count(0) < len(chunk):
            return True
        position += CHUNK_BYTES
    return False


def _has_lost_sector(file: File, position: int, end: int) -> bool:
    while position < end:
        chunk_end = min(position - position % SECTOR_BYTES + CHUNK_BYTES, end)
        chunk = file.read(chunk_end - position, position)
        cuts = [0, *range(SECTOR_BYTES - position % SECTOR_BYTES, len(chunk), SECTOR_BYTES), len(chunk)]
        if any(not any(chunk[first:end]) for first, end in pairwise(cuts)):
            return True
        position = chunk_end
    return False


# -- continuing after damage --------------------------------------------------------------------


class BadRange(msgspec.Struct, frozen=True):
    """Bytes that are not a frame, up to the next intact batch or the end."""

    position: int
    end: int
    reason: str


def walk(file: File, position: int, end: int, *, next_index: int) -> Iterator[SegmentFrame | BadRange]:
    """Yield the frames and bad ranges that fill `[position, end)`, in order and without a gap.

    `next_index` is the first expected entry. After a bad range the walk must not resume at a batch inside another
    batch's payload. It resumes directly after a bad batch whose header gives its length, or else only at a whole,
    checksummed batch whose index is plausible: each entry in between needs at least a header's bytes.
    """
    while position < end:
        bad: BadFrame | None = None
        for found in scan(file, position, end):
            if isinstance(found, BadFrame):
                bad = found
                break
            yield found
            next_index = found.header.index + 1 if found.header else next_index
        if bad is None:
            return
        position = _resume(file, bad, end, next_index)
        yield BadRange(bad.position, position, bad.reason)


def _resume(file: File, bad: BadFrame, end: int, next_index: int) -> int:
    """Return the position of the next trustworthy batch, or `end`."""
    if bad.header is not None:
        after = bad.position + bad.header.batch_bytes
        if after == end or _is_mark(file, after, end) or _is_batch(file, after, end, bad, next_index):
            return after
    at = _find_magic(file, bad.position + 1, end)
    while at < end and not _is_batch(file, at, end, bad, next_index):
        at = _find_magic(file, at + 1, end)
    return at


def _is_mark(file: File, position: int, end: int) -> bool:
    try:
        decode_mark(file.read(max(0, min(MARK_BYTES, end - position)), position), 0)
    except DecodeError:
        return False
    return True


def _is_batch(file: File, position: int, end: int, bad: BadFrame, next_index: int) -> bool:
    try:
        header = decode_header(file.read(max(0, min(HEADER_BYTES, end - position)), position), may_be_sealed=True)
    except DecodeError:
        return False
    entries_between_max = (position - bad.position) // HEADER_BYTES
    if not next_index <= header.index <= next_index + entries_between_max:
        return False
    found = next(scan(file, position, end, chunk_bytes=header.batch_bytes))
    return isinstance(found, SegmentFrame)


def _find_magic(file: File, position: int, end: int) -> int:
    """Return the next position of a batch's magic bytes, or `end`."""
    while position < end:
        chunk = file.read(min(CHUNK_BYTES, end - position), position)
        at = chunk.find(MAGIC)
        if at >= 0:
            return position + at
        if position + len(chunk) >= end or len(chunk) < len(MAGIC):
            return end
        position += len(chunk) - len(MAGIC) + 1  # the magic may cross the chunk's end
    return end

"""Judge the bytes at which the scan of a segment stopped: a torn tail, damage, a footer or a mark gone bad.

A write that was not synced when the power went may reach the disk in any order of sectors, so intact
frames *behind* a hole prove nothing. What proves that the hole was once whole is a mark behind it, or that
no sector of the bad frame is missing: then its bytes have changed since.

Everything is read in chunks, and never more than one: a segment may be much larger than memory should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from quiver.errors import DecodeError
from quiver.record.header import HEADER_BYTES
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
from quiver.storage.scan import CHUNK_BYTES, BadFrame, Frame, scan

SECTOR_BYTES = 512
"""The unit in which a disk loses unsynced bytes; a lost one of a growing file reads as zeros."""


def is_footer(file: File, position: int, end: int) -> bool:
    """Tell whether `[position, end)` is a footer, perhaps damaged or incomplete: it holds no entries."""
    if file.read(len(FOOTER_MAGIC), position) == FOOTER_MAGIC:
        return True
    try:
        return footer_bytes(file.read(TRAILER_BYTES, end - TRAILER_BYTES)) == end - position
    except DecodeError:
        return False


def is_damage(file: File, bad: BadFrame, end: int) -> bool:
    """Tell damage, which was on disk once, from a torn tail, which was never acknowledged."""
    if is_vouched_for(file, bad.position, end):
        return True
    frame_end = bad.position + (bad.header.batch_bytes if bad.header else HEADER_BYTES)
    if not _has_bytes(file, frame_end - 1, end):
        return False  # it crosses the end of the file, or of what was written of it
    return not _has_lost_sector(file, bad.position, frame_end)


def is_vouched_for(file: File, position: int, end: int) -> bool:
    """Tell whether an intact mark in `[position, end)` says that the byte at `position` was on disk."""
    for at in _find_all(file, MARK_MAGIC, position, end):
        try:
            # A mark speaks of what lies before itself; bytes of a batch may happen to look like one.
            if position < decode_mark(file.read(MARK_BYTES, at), 0) <= at:
                return True
        except DecodeError:
            continue
    return False


def is_damaged_mark(file: File, position: int, end: int, *, next_index: int | None) -> bool:
    """Tell whether nothing but a mark is bad at `position`: right behind its length the log goes on.

    `next_index` is the entry that must follow, if that is known.
    """
    behind = next(scan(file, position + MARK_BYTES, end), None)
    if not isinstance(behind, Frame):
        return False
    return behind.header is None or next_index in (None, behind.header.index)


def scan_entries(file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Frame | BadFrame]:
    """Yield the frames in `[position, end)` as `scan` does, but step over marks that have gone bad."""
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
    """Tell whether a segment whose header is bad never was whole, and so holds nothing that was acknowledged."""
    if size <= SEGMENT_HEADER_BYTES:
        return True
    # The header lies in one sector: it was lost as a whole, or it was there and has changed since.
    is_lost = not any(file.read(SEGMENT_HEADER_BYTES, 0))
    return is_lost and not is_vouched_for(file, SEGMENT_HEADER_BYTES, size)


def _find_all(file: File, wanted: bytes, position: int, end: int) -> Iterator[int]:
    """Yield each position in `[position, end)` at which the bytes `wanted` stand."""
    overlap = len(wanted) - 1  # what is wanted may cross the end of a chunk
    while position < end:
        chunk = file.read(min(CHUNK_BYTES + overlap, end - position), position)
        at = chunk.find(wanted)
        while at >= 0:
            yield position + at
            at = chunk.find(wanted, at + 1)
        position += CHUNK_BYTES


def _has_bytes(file: File, position: int, end: int) -> bool:
    """Tell whether `[position, end)` holds anything but zeros."""
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

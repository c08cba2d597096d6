"""Walk a segment file past damage: every intact frame, and every range of bytes that is none.

`scan` stops at the first bad frame, which is right for whoever serves or appends. An inspection wants to
know how much is bad and what lies behind it. Resuming is a guess that must not be fooled by a batch that
lies inside another's payload, so the walk is taken up again right behind a bad batch whose header tells its
length, or else only where a whole, checksummed batch stands whose index could follow: each entry between
would have needed at least a header's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quiver.errors import DecodeError
from quiver.record.header import HEADER_BYTES, MAGIC, decode_header
from quiver.storage.disk import File
from quiver.storage.frames import MARK_BYTES, decode_mark
from quiver.storage.scan import CHUNK_BYTES, BadFrame, Frame, scan


class BadRange(msgspec.Struct, frozen=True):
    """Bytes that are no frame, up to the next intact batch or the end."""

    position: int
    end: int
    reason: str


def walk(file: File, position: int, end: int, *, next_index: int) -> Iterator[Frame | BadRange]:
    """Yield what fills `[position, end)`, in order and without a gap; `next_index` is the first entry expected."""
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
    """Return the position of the next batch that can be believed, or `end`."""
    if bad.header is not None:
        behind = bad.position + bad.header.batch_bytes
        if behind == end or _is_mark(file, behind, end) or _is_batch(file, behind, end, bad, next_index):
            return behind
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
        header = decode_header(file.read(max(0, min(HEADER_BYTES, end - position)), position))
    except DecodeError:
        return False
    entries_between_max = (position - bad.position) // HEADER_BYTES
    if not next_index <= header.index <= next_index + entries_between_max:
        return False
    found = next(scan(file, position, end, chunk_bytes=header.batch_bytes))
    return isinstance(found, Frame)


def _find_magic(file: File, position: int, end: int) -> int:
    """Return where the bytes that begin a batch next stand, or `end`."""
    while position < end:
        chunk = file.read(min(CHUNK_BYTES, end - position), position)
        at = chunk.find(MAGIC)
        if at >= 0:
            return position + at
        if position + len(chunk) >= end or len(chunk) < len(MAGIC):
            return end
        position += len(chunk) - len(MAGIC) + 1  # the magic may cross the chunk's end
    return end

"""Walk the frames of a segment file, checking each: the one reader behind recovery, reads and verify.

`scan` yields every intact batch and mark from a position on and stops at the first thing that is
neither, saying why. It reads in chunks, so that a segment of any size costs little memory, and each
batch is a view into a chunk: one copy from the page cache, no more.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quiver.errors import DecodeError
from quiver.model import Buffer
from quiver.record.header import HEADER_BYTES, BatchHeader, decode_header, verify_payload
from quiver.storage.disk import File
from quiver.storage.frames import MARK_BYTES, MARK_MAGIC, decode_mark

CHUNK_BYTES = 1024 * 1024
"""What one read asks for: large enough to be cheap per byte, small enough to be cheap in memory."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One intact frame: a batch (then `header` and `data` are set) or a mark (then `durable_end` is)."""

    position: int
    end: int
    header: BatchHeader | None
    data: memoryview
    durable_end: int = 0


class BadFrame(msgspec.Struct, frozen=True):
    """Where a scan stopped before the end, and why."""

    position: int
    reason: str
    header: BatchHeader | None = None
    """Set when the batch's header is intact and only its payload is missing or bad."""


def scan(file: File, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Frame | BadFrame]:
    """Yield the frames in `[position, end)`; a `BadFrame` is the last thing yielded, if there is one."""
    wanted = chunk_bytes
    while position < end:
        chunk = memoryview(file.read(min(wanted, end - position), position))
        at = 0
        while at < len(chunk):
            found = decode_frame(chunk, at, base=position)
            if isinstance(found, BadFrame):
                break
            yield found
            at = found.end - position
        else:
            if not len(chunk):
                yield BadFrame(position, "the file is shorter than it should be")
                return
            position, wanted = position + at, chunk_bytes
            continue
        needed = _bytes_needed(found)
        if position + len(chunk) >= end or needed <= len(chunk) - at:
            yield found
            return
        # The frame crosses the chunk: read again from its first byte, enough for all of it.
        position, wanted = position + at, max(chunk_bytes, needed)


def decode_frame(data: Buffer, at: int, *, base: int = 0) -> Frame | BadFrame:
    """Return the frame at `at` of `data`, which stands at position `base` of its file."""
    header: BatchHeader | None = None
    try:
        if data[at : at + 4] == MARK_MAGIC:
            durable_end = decode_mark(data, at)
            return Frame(base + at, base + at + MARK_BYTES, None, memoryview(b""), durable_end)
        header = decode_header(data, at)
        end = at + header.batch_bytes
        if end > len(data):
            return BadFrame(base + at, "the batch crosses the end of the data", header)
        verify_payload(data, header, at)
        return Frame(base + at, base + end, header, memoryview(data)[at:end])
    except DecodeError as error:
        return BadFrame(base + at, str(error), header)


def _bytes_needed(bad: BadFrame) -> int:
    return bad.header.batch_bytes if bad.header else HEADER_BYTES

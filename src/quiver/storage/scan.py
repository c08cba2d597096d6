"""Walk the frames of a segment file, checking each: the one reader behind recovery, reads and verify.

`scan` yields every intact batch and mark from a position on and stops at the first thing that is
neither, saying why. It reads in chunks, so that a segment of any size costs little memory, and each
batch is a view into a chunk: one copy from the page cache, no more.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quiver.errors import DecodeError
from quiver.record.header import HEADER_BYTES, BatchHeader, decode_header, verify_payload
from quiver.storage.disk import File
from quiver.storage.frames import MARK_BYTES, MARK_MAGIC, decode_mark

CHUNK_BYTES = 1024 * 1024
"""What one read asks for: large enough to be cheap per byte, small enough to be cheap in memory."""
CHUNK_BYTES_MAX = 4 * CHUNK_BYTES
"""What one read asks for at most, unless a single batch is larger."""
_FRAMES_PER_CHUNK = 4
"""How many batches of the size met last a chunk should hold: the one that crosses its end is read twice."""
_NO_DATA = memoryview(b"")


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
    while position < end:
        asked_bytes = min(chunk_bytes, end - position)
        chunk = file.read(asked_bytes, position)
        if not chunk:
            yield BadFrame(position, "the file is shorter than it should be")
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
                # The frame crosses the chunk: read again from its first byte, enough for all of it and some more.
                chunk_bytes = max(chunk_bytes, needed, min(needed * _FRAMES_PER_CHUNK, CHUNK_BYTES_MAX))
                break
            yield found
            position = found.end


def decode_frame(data: bytes, at: int, *, base: int = 0) -> Frame | BadFrame:
    """Return the frame at `at` of `data`, which stands at position `base` of its file."""
    header: BatchHeader | None = None
    try:
        if data.startswith(MARK_MAGIC, at):
            return Frame(base + at, base + at + MARK_BYTES, None, _NO_DATA, decode_mark(data, at))
        header = decode_header(data, at)
        end = at + HEADER_BYTES + header.payload_bytes
        if end > len(data):
            return BadFrame(base + at, "the batch crosses the end of the data", header)
        verify_payload(data, header, at)
        return Frame(base + at, base + end, header, memoryview(data)[at:end])
    except DecodeError as error:
        return BadFrame(base + at, str(error), header)

"""Read batches from segment files, verifying every checksum.

Blocking functions over a list of segments and a disk, run in the executor concurrently with appends, truncation and
retention. Each read opens its files itself, so no handle is kept open or counted: a file that retention has removed is
not found, and the log turns that into `TrimmedError`. Only whole, intact batches are returned, each a view of the
chunk that one read returned: one copy. Batches of an encrypted log are decrypted here, after the checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from quiver.errors import DamageError, DecodeError
from quiver.record.batch import Batch
from quiver.record.header import ENCODING_SEALED, BatchHeader
from quiver.storage.disk import Disk
from quiver.storage.frames import SEGMENT_HEADER_BYTES
from quiver.storage.scan import CHUNK_BYTES_MAX, BadFrame, SegmentFrame, scan_entries
from quiver.storage.segment import NO_TIMESTAMP, Segment

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher

CHUNK_BYTES_MIN = 4096
"""The smallest disk read: one page."""
UNBOUNDED = (1 << 63) - 1


class SegmentRange(msgspec.Struct, frozen=True, gc=False):
    """A range of a log's bytes: consecutive segments, from a position in the first to one in the last."""

    segments: Sequence[Segment]
    first_position: int
    end_position: int


class LargeBatch(Exception):  # noqa: N818 - no failure: the reader is asked again, with enough room
    """The first batch of a read is larger than its reader has room for; nothing was returned."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"the first batch has {size_bytes} bytes")
        self.size_bytes = size_bytes


class ReadFilter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Conditions that every returned batch meets, and the limits of the read."""

    end_index: int
    """Stop before this entry: it and its successors may be only partly written."""
    bytes_max: int
    """Return at most this many bytes, but at least one batch."""
    first_bytes_max: int = UNBOUNDED
    """Raise `LargeBatch` if the first batch has more bytes."""
    first_index: int = 0
    first_offset: int = -1
    end_offset: int = UNBOUNDED
    """Stop before the first batch that extends beyond this offset."""
    timestamp_min: int = NO_TIMESTAMP
    """Skip batches whose records are all older."""
    data_only: bool = False

    def includes(self, header: BatchHeader) -> bool:
        """Return whether a batch before both ends meets the conditions."""
        if header.index < self.first_index:
            return False
        if not self.data_only:
            return True
        return (
            not header.is_control
            and header.end_offset > self.first_offset
            and header.max_timestamp >= self.timestamp_min
        )


def filter_batches(batches: Iterable[Batch], read_filter: ReadFilter) -> list[Batch]:
    """Return the matching ones of consecutive batches, reading no further than needed.

    Raises:
        DamageError: as `batches` raises it, if no matching batch precedes it.
        LargeBatch: the first matching batch has more than `first_bytes_max` bytes.
    """
    found: list[Batch] = []
    try:
        _collect(found, batches, read_filter)
    except DamageError:
        if not found:
            raise  # otherwise serve the batches before the damage; the next read reports it
    return found


def _collect(found: list[Batch], batches: Iterable[Batch], read_filter: ReadFilter) -> None:
    size_bytes = 0
    for batch in batches:
        header = batch.header
        if header.index >= read_filter.end_index or header.end_offset > read_filter.end_offset:
            return
        if read_filter.includes(header):
            if found and size_bytes + len(batch.data) > read_filter.bytes_max:
                return
            if not found and len(batch.data) > read_filter.first_bytes_max:
                raise LargeBatch(len(batch.data))
            found.append(batch)
            size_bytes += len(batch.data)
        # Stop before the next frame is read: it may be only partly written.
        if size_bytes >= read_filter.bytes_max or header.index + 1 >= read_filter.end_index:
            return


def read_batches(
    disk: Disk, directory: str, part: SegmentRange, read_filter: ReadFilter, cipher: LogCipher | None = None
) -> list[Batch]:
    """Return the matching batches of a part of a log, decrypted if it has a cipher.

    Raises:
        DamageError: the next batch fails its checksum, or cannot be decrypted.
        FileNotFoundError: a segment was removed meanwhile.
    """
    chunk_bytes = min(max(read_filter.bytes_max, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
    return filter_batches(_batches(disk, directory, part, chunk_bytes, cipher), read_filter)


def _batches(
    disk: Disk, directory: str, part: SegmentRange, chunk_bytes: int, cipher: LogCipher | None
) -> Iterator[Batch]:
    expected: int | None = None
    for segment, first_position, end_position in _files(part):
        file = disk.open(f"{directory}/{segment.name}")
        try:
            for frame in scan_entries(file, first_position, end_position, chunk_bytes=chunk_bytes):
                batch = _checked(segment, frame, expected, cipher)
                if batch is not None:
                    expected = batch.header.index + 1
                    yield batch
        finally:
            file.close()


def _files(part: SegmentRange) -> Iterator[tuple[Segment, int, int]]:
    """Yield each segment with the positions to read; the size of the last one may still change."""
    first_position = part.first_position
    for segment in part.segments:
        is_last = segment is part.segments[-1]
        yield segment, first_position, part.end_position if is_last else segment.size_bytes
        first_position = SEGMENT_HEADER_BYTES


def _checked(
    segment: Segment, frame: SegmentFrame | BadFrame, expected: int | None, cipher: LogCipher | None
) -> Batch | None:
    if isinstance(frame, BadFrame):
        raise DamageError(f"{segment.name}: byte {frame.position}: {frame.reason}")
    if frame.header is None:
        return None
    if expected is not None and frame.header.index != expected:
        raise DamageError(
            f"{segment.name}: byte {frame.position}: found entry {frame.header.index}, expected {expected}"
        )
    if cipher is None and frame.header.encoding != ENCODING_SEALED:
        return Batch(frame.data, frame.header)
    return _opened(segment, frame, frame.header, cipher)


def _opened(segment: Segment, frame: SegmentFrame, header: BatchHeader, cipher: LogCipher | None) -> Batch:
    if cipher is None:
        raise DamageError(
            f"{segment.name}: byte {frame.position}: entry {header.index} is encrypted, but its log is not"
        )
    try:
        return cipher.open_batch(frame.data, header)
    except DecodeError as error:
        raise DamageError(f"{segment.name}: byte {frame.position}: {error}") from error

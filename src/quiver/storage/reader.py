"""Read batches back from segment files, every checksum verified.

Blocking functions over a list of segments and a disk, run in an executor beside appends, truncation
and retention. They open the file for each read, so nothing needs to be kept open or counted: a file
that retention removed meanwhile is simply gone, which the log answers with `TrimmedError`.
Only whole, intact batches are returned, each a view into what one read brought: one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from quiver.errors import DamageError
from quiver.record.batch import Batch
from quiver.record.header import BatchHeader
from quiver.storage.disk import Disk
from quiver.storage.frames import SEGMENT_HEADER_BYTES
from quiver.storage.scan import CHUNK_BYTES_MAX, BadFrame, Frame
from quiver.storage.segment import NO_TIMESTAMP, Segment
from quiver.storage.verdict import scan_entries

CHUNK_BYTES_MIN = 4096
"""The least that a read asks the disk for: a page."""
UNBOUNDED = (1 << 63) - 1


class Place(msgspec.Struct, frozen=True, gc=False):
    """A part of a log to be read: consecutive segments, from a position in the first to one in the last."""

    segments: Sequence[Segment]
    first_position: int
    end_position: int


class Wanted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which batches a read is after: all the conditions hold for each of them."""

    end_index: int
    """Stop before this entry: what lies behind it may be in the middle of being written."""
    bytes_max: int
    """Return no more than this, but at least one batch."""
    first_index: int = 0
    first_offset: int = -1
    end_offset: int = UNBOUNDED
    """Stop before the first batch that reaches past this offset."""
    timestamp_min: int = NO_TIMESTAMP
    """Skip batches that are older as a whole."""
    data_only: bool = False

    def includes(self, header: BatchHeader) -> bool:
        """Tell whether a batch that lies before both ends is wanted."""
        if header.index < self.first_index:
            return False
        if not self.data_only:
            return True
        return (
            not header.is_control
            and header.end_offset > self.first_offset
            and header.max_timestamp >= self.timestamp_min
        )


def take_wanted(batches: Iterable[Batch], wanted: Wanted) -> list[Batch]:
    """Return the wanted ones of consecutive batches, looking no further than needed.

    Raises:
        DamageError: as `batches` raises it, if that is before the first wanted one.
    """
    found: list[Batch] = []
    try:
        _take_into(found, batches, wanted)
    except DamageError:
        if not found:
            raise  # what lies before the damage is served, and the next read will meet it
    return found


def _take_into(found: list[Batch], batches: Iterable[Batch], wanted: Wanted) -> None:
    size_bytes = 0
    for batch in batches:
        header = batch.header
        if header.index >= wanted.end_index or header.end_offset > wanted.end_offset:
            return
        if wanted.includes(header):
            if found and size_bytes + len(batch.data) > wanted.bytes_max:
                return
            found.append(batch)
            size_bytes += len(batch.data)
        # Decide before the next frame is looked at, which may not be whole yet.
        if size_bytes >= wanted.bytes_max or header.index + 1 >= wanted.end_index:
            return


def read_batches(disk: Disk, directory: str, place: Place, wanted: Wanted) -> list[Batch]:
    """Return the wanted batches from a place in a log.

    Raises:
        DamageError: the next wanted batch fails its checksum.
        FileNotFoundError: a segment was removed meanwhile.
    """
    chunk_bytes = min(max(wanted.bytes_max, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
    return take_wanted(_batches(disk, directory, place, chunk_bytes), wanted)


def _batches(disk: Disk, directory: str, place: Place, chunk_bytes: int) -> Iterator[Batch]:
    expected: int | None = None
    for segment, first_position, end_position in _parts(place):
        file = disk.open(f"{directory}/{segment.name}")
        try:
            for frame in scan_entries(file, first_position, end_position, chunk_bytes=chunk_bytes):
                batch = _checked(segment, frame, expected)
                if batch is not None:
                    expected = batch.header.index + 1
                    yield batch
        finally:
            file.close()


def _parts(place: Place) -> Iterator[tuple[Segment, int, int]]:
    """Yield each segment with the positions to read; only of the last may the size still change."""
    first_position = place.first_position
    for segment in place.segments:
        is_last = segment is place.segments[-1]
        yield segment, first_position, place.end_position if is_last else segment.size_bytes
        first_position = SEGMENT_HEADER_BYTES


def _checked(segment: Segment, frame: Frame | BadFrame, expected: int | None) -> Batch | None:
    if isinstance(frame, BadFrame):
        raise DamageError(f"{segment.name}: byte {frame.position}: {frame.reason}")
    if frame.header is None:
        return None
    if expected is not None and frame.header.index != expected:
        raise DamageError(f"{segment.name}: byte {frame.position}: entry {frame.header.index} instead of {expected}")
    return Batch(frame.data, frame.header)

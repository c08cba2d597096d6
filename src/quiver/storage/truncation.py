"""Shorten a log at either end, or start it over: the file work, safe to be cut off at any point.

Blocking functions, run in an executor while no flush of the same log runs. Each keeps the order that
lets recovery find either the log before or a log between the two, never one with a hole:
- a suffix goes newest file first, then the cut inside the file that keeps a part;
- a prefix goes oldest file first;
- a reset writes a segment of the next generation before it removes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import DamageError
from quiver.model import Index
from quiver.storage.disk import Disk, File
from quiver.storage.flush import write_all
from quiver.storage.recovery import TEMPORARY_SUFFIX
from quiver.storage.scan import BadFrame
from quiver.storage.segment import Segment, is_segment_name
from quiver.storage.verdict import scan_entries


def cut_suffix(
    disk: Disk, directory: str, segments: Sequence[Segment], end_index: Index, *, index_interval_bytes: int
) -> tuple[Segment, File]:
    """Remove the entries at or behind `end_index`; return the segment that ends there, and its open file.

    On disk after this returns: nothing at or behind `end_index`.
    """
    kept = [segment for segment in segments if segment.first_index <= end_index]
    for segment in reversed(segments[len(kept) :]):
        remove_durably(disk, directory, segment.name)
    file = disk.open(f"{directory}/{kept[-1].name}")
    try:
        shortened = _shorten(kept[-1], file, end_index, index_interval_bytes)
        file.truncate(shortened.size_bytes)
        file.sync()
    except BaseException:
        file.close()
        raise
    return shortened, file


def _shorten(segment: Segment, file: File, end_index: Index, index_interval_bytes: int) -> Segment:
    """Return the bookkeeping of a segment as if it ended at `end_index`."""
    shortened = segment.rewound(end_index - 1)
    for frame in scan_entries(file, shortened.size_bytes, segment.size_bytes):
        if shortened.end_index == end_index:
            break
        if isinstance(frame, BadFrame):
            raise DamageError(f"{segment.name}: byte {frame.position}: {frame.reason}")
        if frame.header is not None:
            shortened.add(
                frame.header,
                position=frame.position,
                size_bytes=frame.end - frame.position,
                index_interval_bytes=index_interval_bytes,
            )
    return shortened


def remove_prefix(disk: Disk, directory: str, names: Sequence[str]) -> None:
    """Remove the given oldest segments. On disk after this returns: none of them."""
    for name in names:
        remove_durably(disk, directory, name)


def start_over(disk: Disk, directory: str, segment: Segment) -> File:
    """Replace all segments by an empty one of the next generation; return its open file.

    The rename decides: before it the old log is there, after it the new one, and recovery finishes the removal.
    """
    path = f"{directory}/{segment.name}"
    file = disk.open(path + TEMPORARY_SUFFIX, create=True)
    try:
        write_all(file, [segment.header.encode()], 0)
        file.sync()
        disk.rename(path + TEMPORARY_SUFFIX, path)
        disk.sync_directory(directory)  # on disk now: the new log's start
        for name in disk.names(directory):
            if is_segment_name(name) and name != segment.name:
                remove_durably(disk, directory, name)
    except BaseException:
        file.close()
        raise
    return file


def remove_durably(disk: Disk, directory: str, name: str) -> None:
    """Remove one file of a directory. On disk after this returns: its name is gone."""
    disk.remove(f"{directory}/{name}")
    disk.sync_directory(directory)

"""Truncate a log at either end, or reset it: the file operations, safe against a crash at any point.

Blocking functions, run in the executor while no flush of the same log runs. Their order of operations guarantees that
recovery finds the old log, the new log, or a contiguous log in between, never one with a gap:
- a suffix is removed newest file first, then by truncating the file that keeps a part;
- a prefix is removed oldest file first;
- a reset writes a segment of the next generation before it removes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import DamageError
from quiver.model import Index
from quiver.storage.disk import Disk, File
from quiver.storage.flush import sync_finally, write_all
from quiver.storage.recovery import TEMPORARY_SUFFIX
from quiver.storage.scan import BadFrame, scan_entries
from quiver.storage.segment import Segment, is_segment_name


def truncate_suffix(
    disk: Disk, directory: str, segments: Sequence[Segment], end_index: Index, *, index_interval_bytes: int
) -> tuple[Segment, File]:
    """Remove the entries at or after `end_index`; return the segment that ends there, and its open file.

    On disk after this returns: no entry at or after `end_index`.
    """
    kept = [segment for segment in segments if segment.first_index <= end_index]
    for segment in reversed(segments[len(kept) :]):
        remove_durably(disk, directory, segment.name)
    file = disk.open(f"{directory}/{kept[-1].name}")
    try:
        truncated = _truncated_segment(kept[-1], file, end_index, index_interval_bytes)
        file.truncate(truncated.size_bytes)
        sync_finally(file)  # on disk now: the file's new end; the next flush writes there
    except BaseException:
        file.close()
        raise
    return truncated, file


def _truncated_segment(segment: Segment, file: File, end_index: Index, index_interval_bytes: int) -> Segment:
    """Return the bookkeeping of a segment as if it ended at `end_index`."""
    truncated = segment.rewound(end_index - 1)
    for frame in scan_entries(file, truncated.size_bytes, segment.size_bytes):
        if truncated.end_index == end_index:
            break
        if isinstance(frame, BadFrame):
            raise DamageError(f"{segment.name}: byte {frame.position}: {frame.reason}")
        if frame.header is not None:
            truncated.add(
                frame.header,
                position=frame.position,
                size_bytes=frame.end - frame.position,
                index_interval_bytes=index_interval_bytes,
            )
    return truncated


def remove_prefix(disk: Disk, directory: str, names: Sequence[str]) -> None:
    """Remove the given oldest segments. On disk after this returns: none of them."""
    for name in names:
        remove_durably(disk, directory, name)


def replace_segments(disk: Disk, directory: str, segment: Segment) -> File:
    """Replace all segments by an empty one of the next generation; return its open file.

    The rename commits the replacement: a crash before it leaves the old log, a crash after it the new one, and
    recovery finishes the removal.
    """
    path = f"{directory}/{segment.name}"
    if disk.exists(path + TEMPORARY_SUFFIX):
        disk.remove(path + TEMPORARY_SUFFIX)  # left by an attempt that met the end of the disk
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
    """Remove one file of a directory, unless an attempt that met the end of the disk has.

    On disk after this returns: its name is gone.
    """
    if disk.exists(f"{directory}/{name}"):
        disk.remove(f"{directory}/{name}")
    disk.sync_directory(directory)

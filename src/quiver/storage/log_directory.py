"""The directory of a log: created with an empty first segment, or recovered. Blocking functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.config import LogSettings
from quiver.model import Index, Offset, Term
from quiver.storage.disk import Disk
from quiver.storage.flush import write_all
from quiver.storage.frames import SegmentHeader
from quiver.storage.recovery import Recovery, recover
from quiver.storage.segment import Segment, segment_name
from quiver.storage.truncation import replace_segments

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher


def open_directory(
    disk: Disk,
    directory: str,
    settings: LogSettings,
    now_ms: int,
    *,
    verify: bool,
    cipher: LogCipher | None = None,
    is_synced: bool = False,
) -> Recovery:
    """Recover a directory, or create an empty log in it; with `verify`, decrypt every entry with `cipher`, too.

    With `is_synced` the directory's name is known to be durable.
    """
    is_found = is_synced or disk.exists(directory)
    if not is_found:
        make_directory(disk, directory)
    recovery = recover(
        disk,
        directory,
        index_interval_bytes=settings.index_interval_bytes,
        trust_footers=not verify,
        cipher=cipher if verify else None,
    )
    if is_found and not is_synced and not (recovery.segments and recovery.segments[-1].is_covered):
        disk.sync_directory(_parent_of(directory))  # on disk now: its name, however the previous process ended
    if not recovery.segments:
        recovery.segments.append(_first_segment(now_ms))
        replace_segments(disk, directory, recovery.segments[0]).close()
    return recovery


def write_new_log(disk: Disk, directory: str, now_ms: int) -> None:
    """Write an empty log into an empty directory; blocks. The caller makes it durable before the log is opened."""
    segment = _first_segment(now_ms)
    file = disk.open(f"{directory}/{segment.name}", create=True)
    try:
        write_all(file, [segment.header.encode()], 0)
    finally:
        file.close()


def _first_segment(now_ms: int) -> Segment:
    header = SegmentHeader(
        generation=0, first_index=Index(1), first_offset=Offset(0), previous_term=Term(0), created_ms=now_ms
    )
    return Segment(header, segment_name(1))


def make_directory(disk: Disk, path: str) -> None:
    """Create a directory and its missing parents. On disk after this returns: all their names."""
    parent = _parent_of(path)
    if not disk.exists(path):
        if parent not in ("/", "."):
            make_directory(disk, parent)
        disk.make_directory(path)
    disk.sync_directory(parent)


def _parent_of(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")

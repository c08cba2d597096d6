"""Open a log directory after a stop, a crash or a power loss, and report what was found.

Recovery trusts the footers of sealed segments and reads only the last segment. The rule for the end of that segment:
- a hole that a later mark covers, or a whole frame that fails its checksum although no sector of it was lost, is
  **damage**: it was once on disk. Recovery reports its range, the log serves nothing after it, and nothing is
  truncated until the owner requests it (`move_damage_aside`);
- anything else that is not a whole frame is a **torn tail**: it was never acknowledged. Recovery truncates it.
Segments of an older generation, temporary files and segments torn at birth are leftovers; recovery removes them.

Blocking; runs in an executor. These truncations and removals are the only writes. Each is durable before the log is
used again, so a second crash during recovery finds the same log.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from quiver.errors import DamageError, DecodeError
from quiver.model import Index, Offset, Term
from quiver.record.header import HEADER_BYTES
from quiver.storage.disk import Disk, File
from quiver.storage.flush import write_all
from quiver.storage.frames import (
    MARK_BYTES,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    Footer,
    SegmentHeader,
    decode_footer,
    decode_segment_header,
    footer_bytes,
)
from quiver.storage.scan import (
    CHUNK_BYTES,
    BadFrame,
    SegmentFrame,
    is_damage,
    is_damaged_mark,
    is_footer,
    is_torn_at_birth,
    scan,
    walk,
)
from quiver.storage.segment import Segment, is_segment_name

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher

TEMPORARY_SUFFIX = ".tmp"


class Damage(msgspec.Struct, frozen=True):
    """A byte range that was once on disk and now fails its checksum; everything after it is uncertain."""

    name: str
    first_position: int
    end_position: int
    first_index: Index
    end_index_max: Index
    """No entry at or after this index was ever in the log; the replica is incomplete until its log reaches it again."""
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.name}: bytes {self.first_position}..{self.end_position} are damaged "
            f"(entries from {self.first_index} to before {self.end_index_max} at most): {self.reason}"
        )


class Recovery(msgspec.Struct, frozen=True):
    """The result of opening a log directory."""

    segments: list[Segment]
    damage: tuple[Damage, ...]
    """Damage that hides entries. From the first of them on, the log serves nothing and accepts nothing."""
    warnings: tuple[str, ...]
    """Damage that hides no entry, and the truncations and removals that were made."""


class _Findings:
    """The findings that one recovery collects."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        index_interval_bytes: int,
        *,
        trust_footers: bool,
        cipher: LogCipher | None,
    ) -> None:
        self.cipher = cipher
        self.disk = disk
        self.directory = directory
        self.index_interval_bytes = index_interval_bytes
        self.trust_footers = trust_footers
        self.damage: list[Damage] = []
        self.rebuilt: set[str] = set()
        """Segments whose header was rebuilt: their generation is unknown."""
        self.warnings: list[str] = []

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def remove(self, name: str, reason: str) -> None:
        self.disk.remove(self.path(name))
        self.disk.sync_directory(self.directory)
        self.warnings.append(f"{name}: removed, {reason}")


def recover(
    disk: Disk,
    directory: str,
    *,
    index_interval_bytes: int,
    trust_footers: bool = True,
    cipher: LogCipher | None = None,
) -> Recovery:
    """Read a log directory, which must exist, and repair what a crash may have left.

    Without `trust_footers` every byte of every segment is read and checked; with `cipher`, every entry that is read
    must be one that it opens, whatever its checksums say.

    Raises:
        DamageError: the start of the log cannot be determined; nothing was changed.
        OSError: as the disk raises it.
    """
    findings = _Findings(disk, directory, index_interval_bytes, trust_footers=trust_footers, cipher=cipher)
    names = disk.names(directory)
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            findings.remove(name, "a leftover of an interrupted write")
    segments: list[Segment] = []
    wanted = [name for name in names if is_segment_name(name)]
    for name in wanted:
        segment = _recover_segment(
            findings, name, previous=segments[-1] if segments else None, is_last=name == wanted[-1]
        )
        if segment is not None:
            segments.append(segment)
    segments = _drop_old_generations(findings, segments)
    _check_continuity(findings, segments)
    damage = tuple(_with_all_after(damage, segments[-1]) for damage in findings.damage)
    return Recovery(segments, damage, tuple(findings.warnings))


def _recover_segment(findings: _Findings, name: str, *, previous: Segment | None, is_last: bool) -> Segment | None:
    file = findings.disk.open(findings.path(name))
    try:
        header = _read_header(file)
        # A next segment is created only after the seal is synced: it proves that all that the footer lists is on disk.
        footer = None if is_last or not findings.trust_footers else read_footer(file)
        if footer is not None:
            if header is None:
                findings.warnings.append(f"{name}: the segment header is damaged; its copy in the footer is used")
            return Segment.from_footer(name, footer)
        if header is None:
            header = _rebuild_header(findings, file, name, previous=previous, is_last=is_last)
        if header is not None:
            return _scan_segment(findings, file, Segment(header, name), is_last=is_last)
    finally:
        file.close()
    findings.remove(name, "it was torn at birth and holds no entry")
    return None


def _read_header(file: File) -> SegmentHeader | None:
    try:
        return decode_segment_header(file.read(SEGMENT_HEADER_BYTES, 0))
    except DecodeError:
        return None


def read_footer(file: File) -> Footer | None:
    """Return the footer at the end of a segment file; None if it is missing or not intact."""
    size = file.size()
    try:
        length = footer_bytes(file.read(TRAILER_BYTES, max(size - TRAILER_BYTES, 0)))
        return decode_footer(file.read(length, size - length)) if length <= size else None
    except DecodeError:
        return None


def _rebuild_header(
    findings: _Findings, file: File, name: str, *, previous: Segment | None, is_last: bool
) -> SegmentHeader | None:
    """Rebuild a damaged segment header; return None if the segment was torn at birth."""
    first_index, size = Index(int(name[:20])), file.size()
    first = next(scan(file, SEGMENT_HEADER_BYTES, size), None)
    batch = first.header if isinstance(first, SegmentFrame) else None
    if previous is None and (batch is None or first_index > 1):
        # Raft compares the term of the entry before this segment with other replicas, and only this header holds it.
        raise DamageError(f"{name}: the header of the log's first segment is damaged; where the log starts is unknown")
    if batch is None and is_last and is_torn_at_birth(file, size):
        return None
    findings.rebuilt.add(name)
    findings.warnings.append(
        f"{name}: the segment header is damaged; it was rebuilt from the neighbouring segment and batch"
    )
    return SegmentHeader(
        generation=previous.header.generation if previous else 0,
        first_index=first_index,
        first_offset=batch.base_offset if batch else _end_offset_of(previous),
        previous_term=previous.last_term if previous else Term(0),
        created_ms=batch.append_timestamp if batch else 0,
    )


def _end_offset_of(segment: Segment | None) -> Offset:
    return segment.end_offset if segment else Offset(0)


def _scan_segment(findings: _Findings, file: File, segment: Segment, *, is_last: bool) -> Segment:
    """Read a segment that has no usable footer; truncate its torn tail if it is the last segment."""
    size = file.size()
    bad = _scan_frames(findings, file, segment, SEGMENT_HEADER_BYTES, size)
    while bad is not None:
        if is_footer(file, bad.position, size):
            if is_last:
                _truncate_torn_tail(findings, file, segment, size, "an unfinished seal")
                return segment
            segment.is_sealed = read_footer(file) is not None
            if not segment.is_sealed:
                findings.warnings.append(
                    f"{segment.name}: the footer is damaged; every batch of the segment was read instead"
                )
            return segment
        if is_last and not is_damage(file, bad, size):
            _truncate_torn_tail(findings, file, segment, size, bad.reason)
            return segment
        if not is_damaged_mark(file, bad.position, size, next_index=segment.end_index):
            _report_damage(findings, file, segment, bad, size)
            return segment
        findings.warnings.append(f"{segment.name}: the mark at byte {bad.position} is damaged; it holds no entry")
        bad = _scan_frames(findings, file, segment, bad.position + MARK_BYTES, size)
    return segment


def _scan_frames(findings: _Findings, file: File, segment: Segment, position: int, size: int) -> BadFrame | None:
    for found in scan(file, position, size):
        if isinstance(found, BadFrame):
            return found
        if found.header is None:
            segment.size_bytes = found.end
            segment.marked_bytes = found.durable_end
            continue
        if found.header.index != segment.end_index or found.header.base_offset != segment.end_offset:
            return BadFrame(found.position, f"found entry {found.header.index}, expected entry {segment.end_index}")
        if findings.cipher is not None:
            try:
                findings.cipher.open_batch(found.data, found.header)
            except DecodeError as error:
                return BadFrame(found.position, error.message, found.header)
        segment.add(
            found.header,
            position=found.position,
            size_bytes=found.end - found.position,
            index_interval_bytes=findings.index_interval_bytes,
        )
    return None


def _truncate_torn_tail(findings: _Findings, file: File, segment: Segment, size: int, reason: str) -> None:
    file.truncate(segment.size_bytes)
    file.sync()  # on disk now: the file ends after its last whole frame, where the next append starts
    findings.warnings.append(f"{segment.name}: truncated {size - segment.size_bytes} bytes of a torn tail: {reason}")


def _report_damage(findings: _Findings, file: File, segment: Segment, bad: BadFrame, size: int) -> None:
    findings.damage.append(
        Damage(
            name=segment.name,
            first_position=bad.position,
            end_position=size,
            first_index=segment.end_index,
            end_index_max=_end_index_max(file, segment, bad, size),
            reason=bad.reason,
        )
    )


def _end_index_max(file: File, segment: Segment, bad: BadFrame, size: int) -> Index:
    """Return the lowest index that, judging by the file's bytes, is after every entry the file can have held.

    A replica does not vote until its log reaches this index again, so a loose bound would delay its vote.
    """
    end_index, position = segment.end_index, bad.position
    if bad.header is not None:
        end_index, position = Index(bad.header.index + 1), min(bad.position + bad.header.batch_bytes, size)
    for found in walk(file, bad.position, size, next_index=segment.end_index):
        if isinstance(found, SegmentFrame):
            position = found.end
            end_index = max(end_index, Index(found.header.index + 1)) if found.header else end_index
    return Index(end_index + (size - position) // HEADER_BYTES)  # no entry is smaller than a header


def _drop_old_generations(findings: _Findings, segments: list[Segment]) -> list[Segment]:
    newest = max((segment.header.generation for segment in segments), default=0)
    kept = []
    for segment in segments:
        if segment.name in findings.rebuilt:
            segment.header = msgspec.structs.replace(segment.header, generation=newest)
        if segment.header.generation == newest:
            kept.append(segment)
        else:
            findings.remove(segment.name, "a leftover of a log reset")
    names = {segment.name for segment in kept}
    findings.damage = [damage for damage in findings.damage if damage.name in names]
    return kept


def _check_continuity(findings: _Findings, segments: list[Segment]) -> None:
    """Report a segment that does not start where the previous one ends: a file is missing or short."""
    damaged = {damage.name for damage in findings.damage}
    for before, after in pairwise(segments):
        if before.end_index != after.first_index and before.name not in damaged:
            findings.damage.append(
                Damage(
                    name=before.name,
                    first_position=before.size_bytes,
                    end_position=before.size_bytes,
                    first_index=before.end_index,
                    end_index_max=after.first_index,
                    reason=f"the next segment begins with entry {after.first_index}; entries in between are missing",
                )
            )


def _with_all_after(damage: Damage, last: Segment) -> Damage:
    """Extend damage to the end of the log: truncating the damage also removes every entry after it."""
    return msgspec.structs.replace(damage, end_index_max=max(damage.end_index_max, last.end_index))


def move_damage_aside(disk: Disk, directory: str, recovery: Recovery) -> Recovery:
    """Truncate the log at the first damage, so that the leader can replicate the entries again.

    The removed bytes are kept in `<segment>.damaged` beside the log. Until the log reaches the `end_index_max` of
    every damage again, the replica is incomplete: the caller must not vote or acknowledge as a complete replica does.
    """
    first = min(recovery.damage, key=lambda damage: damage.first_index)
    kept = [segment for segment in recovery.segments if segment.first_index <= first.first_index]
    for segment in reversed([segment for segment in recovery.segments if segment.first_index > first.first_index]):
        disk.rename(f"{directory}/{segment.name}", f"{directory}/{segment.name}.damaged")
        disk.sync_directory(directory)
    _keep_damaged_tail(disk, directory, kept[-1])
    kept[-1].is_sealed = False
    return Recovery(kept, (), (*recovery.warnings, *(f"truncated: {damage}" for damage in recovery.damage)))


def _keep_damaged_tail(disk: Disk, directory: str, segment: Segment) -> None:
    file = disk.open(f"{directory}/{segment.name}")
    try:
        _copy_tail(disk, file, segment.size_bytes, f"{directory}/{segment.name}.damaged")
        disk.sync_directory(directory)  # on disk now: the copy, with its name
        file.truncate(segment.size_bytes)
        file.sync()
    finally:
        file.close()


def _copy_tail(disk: Disk, file: File, position: int, copy_path: str) -> None:
    if disk.exists(copy_path):
        disk.remove(copy_path)  # left by an attempt that a crash interrupted
    copy = disk.open(copy_path, create=True)
    try:
        copied_bytes = 0
        while chunk := file.read(CHUNK_BYTES, position + copied_bytes):
            write_all(copy, [chunk], copied_bytes)
            copied_bytes += len(chunk)
        copy.sync()
    finally:
        copy.close()

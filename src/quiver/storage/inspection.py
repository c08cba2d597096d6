"""Verify a log directory offline: read every byte, check it, and report what is there, without changing anything.

A restart trusts the footers of sealed segments and repairs the tail; an inspection trusts nothing and repairs nothing.
It runs recovery on a `DryRunDisk` to learn which files belong to the log and what a restart would truncate or remove.
Then it checks every frame of every segment, the hard state and the snapshots: each batch must follow the one before it
in index, offset and term, each mark must cover only bytes before itself, and a sealed segment must match its footer.

Blocking. The directory of a running node may be inspected: entries appended meanwhile can appear as a torn tail, and a
segment that retention removes meanwhile raises `FileNotFoundError`. The field names of the results are part of the
`--json` output of `quiver log verify` and therefore stable.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from quiver.errors import DamageError, DecodeError
from quiver.model import Index, NodeId, Offset, Term
from quiver.record.header import HEADER_BYTES, BatchHeader
from quiver.storage.data_key import DATA_KEY_NAME
from quiver.storage.disk import Disk, File
from quiver.storage.dry_run import DryRunDisk
from quiver.storage.frames import SEGMENT_HEADER_BYTES
from quiver.storage.hardstate import HARD_STATE_NAME, read_slots
from quiver.storage.recovery import TEMPORARY_SUFFIX, recover
from quiver.storage.scan import BadRange, SegmentFrame, walk
from quiver.storage.segment import Segment, is_segment_name
from quiver.storage.snapshots import CHECKPOINT_NAME, StoredSnapshot, decode_snapshot, is_snapshot_name, read_snapshot

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher

_INDEX_INTERVAL_BYTES = 64 * 1024
"""Index interval of the dry run's recovery; affects only the speed of finding an entry."""


class LogFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A range of bytes that has changed since it was written, or is missing."""

    name: str
    first_position: int
    end_position: int
    reason: str
    first_index: Index | None = None
    """The first entry that is lost or uncertain; None for a file without entries."""
    end_index_max: Index | None = None
    """No entry at or after this index is lost or uncertain; equal to `first_index` if none is."""


class SegmentInspection(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of one segment, as read from its bytes."""

    name: str
    is_sealed: bool
    first_index: Index
    end_index: Index
    first_offset: Offset
    end_offset: Offset
    terms: tuple[Term, ...]
    size_bytes: int
    batches: int
    records: int
    marks: int
    vouched_bytes: int
    """Bytes of the file that the newest mark covers."""
    torn_bytes: int
    """Length of a tail that was never acknowledged; the next start truncates it."""


class HardStateInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Raft's hard state."""

    term: Term
    vote: NodeId | None
    commit_index: Index
    intact_copies: int


class SnapshotInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One intact snapshot."""

    name: str
    size_bytes: int
    last_index: Index
    last_term: Term
    end_offset: Offset


class LogInspection(msgspec.Struct, frozen=True, kw_only=True):
    """The result of inspecting a log directory."""

    directory: str
    segments: tuple[SegmentInspection, ...]
    hard_state: HardStateInspection | None
    """None if none was saved, or if none is intact; `damage` then contains it."""
    snapshots: tuple[SnapshotInspection, ...]
    damage: tuple[LogFinding, ...]
    notes: tuple[str, ...]
    """Observations that are not damage: repairs that the next start makes, and files that do not belong to the log."""

    @property
    def is_whole(self) -> bool:
        """Return whether every byte is as written and no entry is missing."""
        return not self.damage


def verify_directory(disk: Disk, directory: str, cipher: LogCipher | None = None) -> LogInspection:
    """Read everything in a log directory, which must exist, and check it.

    An encrypted log is checked without its cipher, too: all checksums, but not whether its entries can be decrypted.

    Raises:
        DamageError: the start of the log cannot be determined.
        OSError: as the disk raises it.
    """
    return _Inspector(disk, directory, cipher).run()


def read_frames(disk: Disk, directory: str, *, first_index: int = 0) -> Iterator[tuple[str, SegmentFrame | BadRange]]:
    """Yield each segment's name with its frames and bad ranges, from an entry on.

    Some marks before that entry may be included; a torn tail is the last item, as a bad range.

    Raises:
        DamageError: the start of the log cannot be determined.
        OSError: as the disk raises it.
    """
    inspector = _Inspector(disk, directory)
    for segment in inspector.recovery.segments:
        if segment.is_sealed and segment.end_index <= first_index:
            continue
        file = disk.open(inspector.path(segment.name))
        try:
            position = segment.position_before_index(first_index)
            end = file.size() if inspector.ends_badly(segment) else segment.size_bytes
            for found in walk(file, position, end, next_index=segment.first_index):
                if isinstance(found, BadRange) or found.header is None or found.header.index >= first_index:
                    yield segment.name, found
        finally:
            file.close()


class _Inspector:
    """One inspection: the dry run of recovery, and the findings beyond it."""

    def __init__(self, disk: Disk, directory: str, cipher: LogCipher | None = None) -> None:
        self._disk = disk
        self._directory = directory
        self._cipher = cipher
        self._dry_run = DryRunDisk(disk)
        self.recovery = recover(self._dry_run, directory, index_interval_bytes=_INDEX_INTERVAL_BYTES)
        self._damage: list[LogFinding] = []
        self._notes = [f"the next start will report: {warning}" for warning in self.recovery.warnings]

    def path(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def ends_badly(self, segment: Segment) -> bool:
        """Return whether the bytes after a segment's `size_bytes` are damaged or torn, not a footer."""
        is_damaged = any(damage.name == segment.name for damage in self.recovery.damage)
        return not segment.is_sealed and (is_damaged or self._is_torn(segment))

    def run(self) -> LogInspection:
        segments = tuple(self._check(segment) for segment in self.recovery.segments)
        self._check_boundaries(segments)
        hard_state = self._inspect_hard_state()
        snapshots = tuple(self._inspect_snapshots())
        self._note_other_files()
        return LogInspection(
            directory=self._directory,
            segments=segments,
            hard_state=hard_state,
            snapshots=snapshots,
            damage=tuple(self._damage),
            notes=tuple(self._notes),
        )

    def _is_torn(self, segment: Segment) -> bool:
        return self.path(segment.name) in self._dry_run.truncated_to

    def _check(self, segment: Segment) -> SegmentInspection:
        file = self._disk.open(self.path(segment.name))
        try:
            is_torn = self._is_torn(segment)
            # The check ends before a torn tail, which is not part of the log, and continues after damage, which is.
            end = file.size() if self.ends_badly(segment) and not is_torn else segment.size_bytes
            inspected, findings = check_segment(file, segment, end_position=end, cipher=self._cipher)
        finally:
            file.close()
        self._damage += findings
        if is_torn:
            return msgspec.structs.replace(inspected, torn_bytes=inspected.size_bytes - segment.size_bytes)
        return inspected

    def _check_boundaries(self, segments: tuple[SegmentInspection, ...]) -> None:
        """Report entries missing between two segments, which no single file shows."""
        damaged = {finding.name for finding in self._damage}
        for before, after in pairwise(segments):
            is_joined = (before.end_index, before.end_offset) == (after.first_index, after.first_offset)
            if not is_joined and before.name not in damaged:
                self._damage.append(
                    LogFinding(
                        name=before.name,
                        first_position=before.size_bytes,
                        end_position=before.size_bytes,
                        reason=f"it ends at entry {before.end_index}, offset {before.end_offset}; the next segment "
                        f"begins with entry {after.first_index}, offset {after.first_offset}",
                        first_index=before.end_index,
                        end_index_max=max(before.end_index, after.first_index),
                    )
                )

    def _inspect_hard_state(self) -> HardStateInspection | None:
        if not self._disk.exists(self.path(HARD_STATE_NAME)):
            return None
        file = self._disk.open(self.path(HARD_STATE_NAME))
        try:
            slots = read_slots(file)
        except DamageError as error:
            self._damage.append(
                LogFinding(name=HARD_STATE_NAME, first_position=0, end_position=file.size(), reason=str(error))
            )
            return None
        finally:
            file.close()
        if not slots:
            self._notes.append(f"{HARD_STATE_NAME}: its first save was interrupted; no vote depends on it")
            return None
        if len(slots) < 2 or slots[0] != slots[1]:
            self._notes.append(f"{HARD_STATE_NAME}: one of its two copies is old or damaged; the next start repairs it")
        state = max(slots, key=lambda slot: slot[0])[1]
        return HardStateInspection(
            term=state.term, vote=state.vote, commit_index=state.commit_index, intact_copies=len(slots)
        )

    def _inspect_snapshots(self) -> Iterator[SnapshotInspection]:
        for name in filter(is_snapshot_name, self._disk.names(self._directory)):
            file = self._disk.open(self.path(name))
            data = file.read(file.size(), 0)
            file.close()
            try:
                snapshot = self._decode(data)
            except DecodeError as error:
                self._damage.append(LogFinding(name=name, first_position=0, end_position=len(data), reason=str(error)))
                continue
            yield SnapshotInspection(
                name=name,
                size_bytes=len(data),
                last_index=snapshot.last_index,
                last_term=snapshot.last_term,
                end_offset=snapshot.end_offset,
            )

    def _decode(self, data: bytes) -> StoredSnapshot:
        return read_snapshot(data)[0] if self._cipher is None else decode_snapshot(data, self._cipher)

    def _note_other_files(self) -> None:
        for name in self._disk.names(self._directory):
            is_known = is_segment_name(name) or is_snapshot_name(name) or name in (HARD_STATE_NAME, DATA_KEY_NAME)
            if name.endswith(".damaged"):
                self._notes.append(f"{name}: bytes that an earlier repair moved aside; not part of the log")
            elif name == DATA_KEY_NAME and self._cipher is None:
                self._notes.append(f"{name}: the log is encrypted; with its key, its entries are decrypted, too")
            elif name == CHECKPOINT_NAME:
                self._note_bad_checkpoint()
            elif not is_known and not name.endswith(TEMPORARY_SUFFIX):
                self._notes.append(f"{name}: not a file of Quiver")

    def _note_bad_checkpoint(self) -> None:
        file = self._disk.open(self.path(CHECKPOINT_NAME))
        data = file.read(file.size(), 0)
        file.close()
        try:
            self._decode(data)
        except DecodeError as error:
            self._notes.append(f"{CHECKPOINT_NAME}: {error}; the next start ignores it and takes longer")


# -- one segment ---------------------------------------------------------------------------------


def check_segment(
    file: File, segment: Segment, *, end_position: int, cipher: LogCipher | None = None
) -> tuple[SegmentInspection, list[LogFinding]]:
    """Read a segment's frames up to `end_position` and compare them with the bookkeeping in `segment`."""
    return _SegmentCheck(segment, cipher).run(file, end_position)


class _SegmentCheck:
    """The state of the check of one segment file."""

    def __init__(self, segment: Segment, cipher: LogCipher | None) -> None:
        self._segment = segment
        self._cipher = cipher
        self._seen = Segment(segment.header, segment.name)
        self._indexed = _indexed_batches(segment)
        self._findings: list[LogFinding] = []
        self._hole: BadRange | None = None
        self._batches = 0
        self._records = 0
        self._marks = 0
        self._vouched_bytes = 0

    def run(self, file: File, end_position: int) -> tuple[SegmentInspection, list[LogFinding]]:
        for found in walk(file, SEGMENT_HEADER_BYTES, end_position, next_index=self._segment.first_index):
            if isinstance(found, BadRange):
                self._close_hole(None)
                self._hole = found
            elif found.header is None:
                self._check_mark(found)
            else:
                self._check_batch(found, found.header)
        self._close_hole(None)
        if self._segment.is_sealed and not self._findings:
            self._check_footer()
        return self._result(file.size()), self._findings

    def _check_mark(self, mark: SegmentFrame) -> None:
        self._marks += 1
        self._vouched_bytes = max(self._vouched_bytes, mark.durable_end)
        if mark.durable_end > mark.position:
            self._report(
                mark.position,
                mark.end,
                f"a mark covers bytes up to {mark.durable_end}, beyond its own position {mark.position}",
            )

    def _check_batch(self, frame: SegmentFrame, header: BatchHeader) -> None:
        was_hole = self._hole is not None
        self._close_hole(Index(header.index))
        complaint = (None if was_hole else self._complaint(header)) or self._decryption_complaint(frame, header)
        if complaint is not None:
            self._report(frame.position, frame.end, complaint, end_index_max=header.index)
        self._batches += 1
        self._records += header.record_count
        if self._indexed.get(frame.position) == (header.index, header.base_offset):
            del self._indexed[frame.position]
        self._seen.add(header, position=frame.position, size_bytes=frame.end - frame.position, index_interval_bytes=1)

    def _decryption_complaint(self, frame: SegmentFrame, header: BatchHeader) -> str | None:
        """Return why a batch of an encrypted log cannot be decrypted; None if it can, or there is no cipher."""
        if self._cipher is None:
            return None
        try:
            self._cipher.open_batch(frame.data, header)
        except DecodeError as error:
            return error.message
        return None

    def _complaint(self, header: BatchHeader) -> str | None:
        """Return why an intact batch does not follow the one before it; None if it does."""
        seen = self._seen
        if header.index != seen.end_index:
            return f"found entry {header.index}, expected entry {seen.end_index}"
        if header.base_offset != seen.end_offset:
            return f"entry {header.index} starts at offset {header.base_offset}, expected {seen.end_offset}"
        if header.term < seen.last_term:
            return f"entry {header.index} has term {header.term}, below the previous entry's term {seen.last_term}"
        return None

    def _close_hole(self, resumed_index: Index | None) -> None:
        """Report the bad range before an intact batch or the end; only now its possible entries are known."""
        hole, self._hole = self._hole, None
        if hole is None:
            return
        if resumed_index is None and self._segment.is_sealed:
            resumed_index = self._segment.end_index
        if resumed_index is None:
            resumed_index = Index(self._seen.end_index + 1 + (hole.end - hole.position) // HEADER_BYTES)
        self._report(hole.position, hole.end, hole.reason, end_index_max=resumed_index)

    def _report(self, first_position: int, end_position: int, reason: str, *, end_index_max: int = 0) -> None:
        first_index = self._seen.end_index
        self._findings.append(
            LogFinding(
                name=self._segment.name,
                first_position=first_position,
                end_position=end_position,
                reason=reason,
                first_index=first_index,
                end_index_max=Index(max(first_index, end_index_max)),
            )
        )

    def _check_footer(self) -> None:
        segment, seen = self._segment, self._seen
        if (seen.end_index, seen.end_offset, seen.terms) != (segment.end_index, segment.end_offset, segment.terms):
            reason = (
                f"the footer does not match the batches: it ends at entry {segment.end_index}, "
                f"offset {segment.end_offset}; they end at entry {seen.end_index}, offset {seen.end_offset}"
            )
            self._report(seen.size_bytes, segment.size_bytes, reason, end_index_max=segment.end_index)
        elif self._indexed:
            reason = f"the footer's index points to byte {min(self._indexed)}, where no such batch begins"
            self._report(segment.size_bytes, segment.size_bytes, reason)

    def _result(self, size_bytes: int) -> SegmentInspection:
        seen = self._seen
        return SegmentInspection(
            name=seen.name,
            is_sealed=self._segment.is_sealed,
            first_index=seen.first_index,
            end_index=seen.end_index,
            first_offset=seen.first_offset,
            end_offset=seen.end_offset,
            terms=tuple(term for _, term in seen.terms),
            size_bytes=size_bytes,
            batches=self._batches,
            records=self._records,
            marks=self._marks,
            vouched_bytes=self._vouched_bytes,
            torn_bytes=0,
        )


def _indexed_batches(segment: Segment) -> dict[int, tuple[int, int]]:
    """Return the batches in a sealed segment's sparse index: position → index and offset."""
    if not segment.is_sealed:
        return {}
    index = segment.index
    return dict(zip(index.positions, zip(index.indexes, index.offsets, strict=True), strict=True))

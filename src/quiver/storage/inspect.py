"""Read every byte of a log directory and say what is there, without changing any.

A restart trusts sealed segments by their footer and mends the tail; an inspection trusts nothing and mends
nothing. It rehearses recovery to learn which files belong to the log and what a restart would cut or remove,
then checks every frame of every segment, the hard state and the snapshots.

Blocking. The directory of a running node may be inspected: what is appended meanwhile can show as a torn
tail, and a segment that retention removes meanwhile raises `FileNotFoundError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from quiver.errors import DamageError, DecodeError
from quiver.storage.check import check_segment
from quiver.storage.disk import Disk
from quiver.storage.hardstate import HARD_STATE_NAME, read_slots
from quiver.storage.inspection import Finding, HardStateInspection, Inspection, SegmentInspection, SnapshotInspection
from quiver.storage.recovery import TEMPORARY_SUFFIX, recover
from quiver.storage.rehearsal import Rehearsal
from quiver.storage.scan import Frame
from quiver.storage.segment import Segment, is_segment_name
from quiver.storage.snapshots import CHECKPOINT_NAME, decode_snapshot, is_snapshot_name
from quiver.storage.walk import BadRange, walk

_INDEX_INTERVAL_BYTES = 64 * 1024
"""How finely the rehearsal indexes the active segment; only the speed of finding an entry hangs on it."""


def verify_directory(disk: Disk, directory: str) -> Inspection:
    """Read everything in a log directory, which must exist, and check it.

    Raises:
        DamageError: the directory cannot be understood at all.
        OSError: as the disk raises it.
    """
    return _Inspector(disk, directory).run()


def read_frames(disk: Disk, directory: str, *, first_index: int = 0) -> Iterator[tuple[str, Frame | BadRange]]:
    """Yield each segment's name with its frames, and with the bytes between that are none, from an entry on.

    Marks a little before that entry may be among them; a torn tail comes last, as a bad range.

    Raises:
        DamageError: the directory cannot be understood at all.
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
    """One inspection: the rehearsed recovery, and what is found beyond it."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._rehearsal = Rehearsal(disk)
        self.recovery = recover(self._rehearsal, directory, index_interval_bytes=_INDEX_INTERVAL_BYTES)
        self._damage: list[Finding] = []
        self._notes = [f"the next start will report: {warning}" for warning in self.recovery.warnings]

    def path(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def ends_badly(self, segment: Segment) -> bool:
        """Tell whether bytes behind a segment's `size_bytes` are damaged or torn, and not a footer."""
        is_damaged = any(damage.name == segment.name for damage in self.recovery.damage)
        return not segment.is_sealed and (is_damaged or self._is_torn(segment))

    def run(self) -> Inspection:
        segments = tuple(self._check(segment) for segment in self.recovery.segments)
        self._check_joints(segments)
        hard_state = self._inspect_hard_state()
        snapshots = tuple(self._inspect_snapshots())
        self._note_other_files()
        return Inspection(
            directory=self._directory,
            segments=segments,
            hard_state=hard_state,
            snapshots=snapshots,
            damage=tuple(self._damage),
            notes=tuple(self._notes),
        )

    def _is_torn(self, segment: Segment) -> bool:
        return self.path(segment.name) in self._rehearsal.cut_to

    def _check(self, segment: Segment) -> SegmentInspection:
        file = self._disk.open(self.path(segment.name))
        try:
            is_torn = self._is_torn(segment)
            # A torn tail is no part of the log, so the check ends before it; damage is, so it goes on behind.
            end = file.size() if self.ends_badly(segment) and not is_torn else segment.size_bytes
            inspected, findings = check_segment(file, segment, end_position=end)
        finally:
            file.close()
        self._damage += findings
        if is_torn:
            return msgspec.structs.replace(inspected, torn_bytes=inspected.size_bytes - segment.size_bytes)
        return inspected

    def _check_joints(self, segments: tuple[SegmentInspection, ...]) -> None:
        """Report what is missing between two segments, which no single file shows."""
        damaged = {finding.name for finding in self._damage}
        for before, after in pairwise(segments):
            is_joined = (before.end_index, before.end_offset) == (after.first_index, after.first_offset)
            if not is_joined and before.name not in damaged:
                self._damage.append(
                    Finding(
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
                Finding(name=HARD_STATE_NAME, first_position=0, end_position=file.size(), reason=str(error))
            )
            return None
        finally:
            file.close()
        if not slots:
            self._notes.append(f"{HARD_STATE_NAME}: its first save was interrupted; nothing was promised by it")
            return None
        if len(slots) < 2 or slots[0] != slots[1]:
            self._notes.append(f"{HARD_STATE_NAME}: one of its two copies is old or damaged; the next start mends it")
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
                snapshot = decode_snapshot(data)
            except DecodeError as error:
                self._damage.append(Finding(name=name, first_position=0, end_position=len(data), reason=str(error)))
                continue
            yield SnapshotInspection(
                name=name,
                size_bytes=len(data),
                last_index=snapshot.last_index,
                last_term=snapshot.last_term,
                end_offset=snapshot.end_offset,
            )

    def _note_other_files(self) -> None:
        for name in self._disk.names(self._directory):
            is_known = is_segment_name(name) or is_snapshot_name(name) or name == HARD_STATE_NAME
            if name.endswith(".damaged"):
                self._notes.append(f"{name}: bytes that an earlier repair set aside; not part of the log")
            elif name == CHECKPOINT_NAME:
                self._note_bad_checkpoint()
            elif not is_known and not name.endswith(TEMPORARY_SUFFIX):
                self._notes.append(f"{name}: not a file of Quiver")

    def _note_bad_checkpoint(self) -> None:
        file = self._disk.open(self.path(CHECKPOINT_NAME))
        data = file.read(file.size(), 0)
        file.close()
        try:
            decode_snapshot(data)
        except DecodeError as error:
            self._notes.append(f"{CHECKPOINT_NAME}: {error}; the next start goes without it, and takes longer")

"""The replicated state machine of a partition, computed by every replica from its committed batches.

It holds the producer table, the consumers' cursors, the windows of work queues, the first offset, the high watermark,
and the index up to which all of this is applied. All of it is in one snapshot, so that no part can be newer than
another (R17). It never reads records.

A member that joins late starts with a *blank* state at the log's start, which is incomplete until a state snapshot
entry is applied. Until then the member lags behind the commit index, so it can neither lead nor answer.

An entry of a known version that cannot be decoded changes nothing, on every replica alike (`bad_entries` counts them);
one of an unknown version stops `apply`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

import msgspec

from quiver.errors import DecodeError, UnavailableError, UnknownVersionError
from quiver.features import LEVEL_MAX
from quiver.logs import facts
from quiver.model import ConsumerId, Index, Offset
from quiver.partition.entries import (
    CursorsEntry,
    FenceEntry,
    ForgetEntry,
    QueueEntry,
    StateSnapshot,
    StateSnapshotEntry,
    TrimEntry,
    TrimPoint,
    decode_entry,
    is_snapshot,
    snapshot_document,
)
from quiver.partition.producers import ProducerTable
from quiver.partition.queue_operations import QueueOperation
from quiver.partition.queue_window import QueueWindow, apply_operation, freeze_windows, frozen_parts
from quiver.partition.state_codec import DecodedState, FrozenContents, decode_steps, encode_steps
from quiver.record import Batch, BatchHeader

logger = logging.getLogger(__name__)

TRIM_POINTS_MAX = 1024
"""Trim points remembered; beyond this, every other one is dropped."""


class _SavedState(msgspec.Struct, frozen=True, array_like=True):
    """The state as stored in a checkpoint or Raft snapshot."""

    applied_index: Index
    end_offset: Offset
    is_complete: bool
    contents: StateSnapshot


_decoder = msgspec.msgpack.Decoder(_SavedState)


class PartitionState:
    """The replicated state of one partition."""

    def __init__(self, *, level_max: int = LEVEL_MAX) -> None:
        self._level_max = level_max
        self.producers = ProducerTable()
        self.cursors: dict[ConsumerId, Offset] = {}
        self.sessions: dict[ConsumerId, int] = {}
        """The last session of consumers that have one: moves of earlier sessions are refused."""
        self.queues: dict[ConsumerId, QueueWindow] = {}
        """The windows of work queues; `cursors` has the first unsettled offset of each."""
        self.queue_resets = 0
        """Counts changes of windows other than by *queue* entries, in this process: whoever planned with them starts
        again."""
        self.applied_index = Index(0)
        self.end_offset = Offset(0)
        """The high watermark: the first offset not known to be committed."""
        self.first_offset = Offset(0)
        """Offset of the first record; records before it were trimmed."""
        self.trimmed_index = Index(0)
        """Entries below it may be removed from the log."""
        self.record_bytes = 0
        """Total size of all batches of records ever appended."""
        self.newest_ms = 0
        """The latest append time of a record."""
        self.metadata_index = Index(0)
        """Metadata index by which clients were last removed from this state; see `check_view`."""
        self.trim_points: list[TrimPoint] = []
        """The state snapshot of the last trim and those since, oldest first."""
        self.is_complete = True
        """Whether this state includes every entry ever committed, and not only those since the log's start."""
        self.bad_entries = 0
        """Entries ignored since the start of this process, because they cannot be decoded."""
        self.is_verifying = False
        """Whether state snapshots in the log are decoded although this state is complete and must be equal to them."""
        self._prepared: tuple[object, DecodedState] | None = None
        """A decoded state, and the bytes or batch that it is of."""
        self.on_applied: Callable[[], None] | None = None
        """Called after batches are applied or a snapshot is restored."""

    def apply(self, batches: Sequence[Batch]) -> None:
        """Apply committed batches in order; see `StateMachine.apply`."""
        applied: BatchHeader | None = None
        try:
            for batch in batches:
                header = batch.header
                if header.is_control:
                    self._apply_control(batch)
                else:
                    self.producers.apply(header)
                    self.record_bytes += header.batch_bytes
                    self.newest_ms = max(self.newest_ms, header.append_timestamp)
                applied = header
        finally:
            if applied is not None:
                self.applied_index, self.end_offset = applied.index, applied.end_offset
                self._notify_applied()

    def snapshot(self) -> bytes:
        """Return the state as bytes; equal states give equal bytes."""
        return b"".join(self.snapshot_steps())

    def snapshot_steps(self) -> Iterator[bytes]:
        """Freeze the state now, and return an iterator over the parts of its bytes, each made in a small step."""
        return encode_steps((self.applied_index, self.end_offset, self.is_complete), self._freeze())

    def entry_steps(self) -> Iterator[bytes]:
        """Freeze the state now, and return the parts of a state snapshot entry."""
        return encode_steps((StateSnapshotEntry.__struct_config__.tag,), self._freeze())

    def restore(self, state: bytes) -> None:
        """Replace this state with that of a `snapshot`; empty bytes restore the initial state."""
        found = self._take_prepared(state)
        if found is None:
            for _ in self.restore_steps(state):
                pass
            found = self._take_prepared(state)
            assert found is not None, "it was just prepared"
        self.applied_index, self.end_offset, self.is_complete = found.items
        self._replace(found)
        self._notify_applied()

    def restore_steps(self, state: bytes) -> Iterator[None]:
        """Decode a `snapshot` in small steps, so that `restore` of these bytes has little left to do."""
        found = DecodedState(items=(Index(0), Offset(0), True))
        if state:
            try:
                yield from decode_steps(state, found, _decode_saved)
            except DecodeError as error:
                message = f"a partition state that this program cannot read ({error.message}); upgrade"
                raise UnknownVersionError(message) from None
        self._prepared = (state, found)

    def apply_steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Decode large state snapshots among batches in small steps, if they are needed, before `apply`."""
        for batch in batches:
            if not self.is_complete and is_snapshot(batch, level_max=self._level_max):
                found = DecodedState()
                yield from decode_steps(snapshot_document(batch), found, _decode_entry_whole)
                self._prepared = (batch, found)

    def _take_prepared(self, source: object) -> DecodedState | None:
        prepared, self._prepared = self._prepared, None
        return prepared[1] if prepared is not None and prepared[0] is source else None

    @staticmethod
    def blank(last_index: Index, end_offset: Offset) -> bytes:
        """Return an incomplete state that knows only the end of the entries up to `last_index`."""
        contents = StateSnapshot(first_offset=end_offset)
        return msgspec.msgpack.encode(_SavedState(last_index, end_offset, is_complete=False, contents=contents))

    def contents(self) -> StateSnapshot:
        """Return the whole state, except for its position in the log."""
        return StateSnapshot(
            first_offset=self.first_offset,
            trimmed_index=self.trimmed_index,
            record_bytes=self.record_bytes,
            newest_ms=self.newest_ms,
            producers=self.producers.rows(),
            cursors=tuple(sorted(self.cursors.items())),
            trim_points=tuple(self.trim_points),
            metadata_index=self.metadata_index,
            sessions=tuple(sorted(self.sessions.items())),
            queues=tuple(frozen_parts(freeze_windows(self.queues))),
        )

    def _freeze(self) -> FrozenContents:
        return FrozenContents(
            (self.first_offset, self.trimmed_index, self.record_bytes, self.newest_ms),
            self.producers.rows(),
            self.cursors.copy(),
            tuple(self.trim_points),
            self.metadata_index,
            self.sessions.copy(),
            freeze_windows(self.queues),
        )

    def cursor(self, consumer_id: ConsumerId) -> Offset | None:
        """Return a consumer's cursor, at least the first offset; None if it has no cursor."""
        cursor = self.cursors.get(consumer_id)
        return None if cursor is None else max(cursor, self.first_offset)

    def check_view(self, checked_index: Index | None) -> None:
        """Refuse to admit a client without state here that was checked against older metadata than its removal.

        Such a client may have been removed with its sequences and cursors: its retry would look new.

        Raises:
            UnavailableError: not done; retry when this node has caught up with the metadata.
        """
        if checked_index is not None and checked_index < self.metadata_index:
            message = f"not done: this node knows the metadata up to index {checked_index} only, and this partition"
            raise UnavailableError(f"{message} removed clients by index {self.metadata_index}; retry", code="behind")

    def _apply_control(self, batch: Batch) -> None:
        if self.is_complete and not self.is_verifying and is_snapshot(batch, level_max=self._level_max):
            self._add_trim_point(batch.header)  # it is this very state: nothing needs to be decoded
            return
        prepared = self._take_prepared(batch)
        if prepared is not None:
            self._replace(prepared)
            self.is_complete = True
            self._add_trim_point(batch.header)
            return
        try:
            entry = decode_entry(batch, level_max=self._level_max)
        except UnknownVersionError:
            raise
        except DecodeError as error:
            self.bad_entries += 1
            logger.warning("entry of a partition ignored", extra=facts(index=batch.header.index, reason=error.message))
            return
        match entry:
            case None:
                pass  # an entry of the replication layer
            case FenceEntry(producer_id, epoch):
                self.producers.fence(producer_id, epoch, batch.header.index)
            case CursorsEntry(cursors, sessions):
                self.cursors.update(cursors)
                self.sessions.update(sessions)
                if self.queues:
                    self._reset_queues(cursors)
            case StateSnapshotEntry(contents):
                self._apply_snapshot(contents, batch)
            case TrimEntry(index, offset):
                self._trim(index, offset)
            case ForgetEntry():
                self._forget(entry)
            case QueueEntry(operations):
                self._apply_queue(operations)
            case unknown:
                assert_never(unknown)

    def _apply_snapshot(self, contents: StateSnapshot, batch: Batch) -> None:
        """Replace the state with a state snapshot, and add it as a trim point."""
        found = DecodedState()
        found.take(contents)
        self._replace(found)
        self.is_complete = True
        self._add_trim_point(batch.header)

    def _add_trim_point(self, header: BatchHeader) -> None:
        self.trim_points.append(TrimPoint(header.index, header.base_offset, self.record_bytes, self.newest_ms))
        if len(self.trim_points) > TRIM_POINTS_MAX:
            del self.trim_points[:-1:2]

    def _trim(self, index: Index, offset: Offset) -> None:
        self.first_offset = max(self.first_offset, offset)
        self.trimmed_index = max(self.trimmed_index, index)
        self.trim_points = [point for point in self.trim_points if point.index >= self.trimmed_index]
        for group_id, window in self.queues.items():
            if window.trim(self.first_offset):
                self.cursors[group_id] = window.first_unsettled
                self.queue_resets += 1

    def _apply_queue(self, operations: Sequence[QueueOperation]) -> None:
        windows = self.queues
        for operation in operations:
            apply_operation(windows, operation)
        # Derived, so that lag, retention and whoever reads cursors know what is not settled.
        for group_id in {operation.group_id for operation in operations} & windows.keys():
            self.cursors[group_id] = windows[group_id].first_unsettled

    def _reset_queues(self, cursors: Sequence[tuple[ConsumerId, Offset]]) -> None:
        """Begin the queues among these consumers again at their new cursors."""
        for group_id, offset in cursors:
            window = self.queues.get(group_id)
            if window is not None:
                window.reset(offset)
                self.cursors[group_id] = window.first_unsettled
                self.queue_resets += 1

    def _forget(self, entry: ForgetEntry) -> None:
        self.producers.forget(entry.producers)
        for consumer_id in entry.consumers:
            self.cursors.pop(consumer_id, None)
            self.sessions.pop(consumer_id, None)
            if self.queues.pop(consumer_id, None) is not None:
                self.queue_resets += 1
        self.metadata_index = max(self.metadata_index, entry.metadata_index)

    def _replace(self, found: DecodedState) -> None:
        self.first_offset, self.trimmed_index, self.record_bytes, self.newest_ms = found.head
        self.producers.adopt(found.producers)
        self.cursors, self.sessions = found.cursors, found.sessions
        self.queues = found.queues
        self.queue_resets += 1
        self.trim_points = found.trim_points
        self.metadata_index = found.metadata_index

    def _notify_applied(self) -> None:
        if self.on_applied is not None:
            self.on_applied()


def _decode_saved(data: bytes) -> tuple[Sequence[Any], StateSnapshot]:
    saved = _decoder.decode(data)
    return (saved.applied_index, saved.end_offset, saved.is_complete), saved.contents


def _decode_entry_whole(data: bytes) -> tuple[Sequence[Any], StateSnapshot]:
    return (), msgspec.msgpack.decode(data, type=StateSnapshotEntry).contents

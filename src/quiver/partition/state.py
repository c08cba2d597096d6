"""What every replica of a partition computes from its committed batches: the driver's state machine.

It holds the producers' table, the consumers' cursors, where the records begin and where the high watermark is, and the
index that all of it stands for. All is in one snapshot, so that no part can be newer than another (R17). It never
looks into records.

A member that joins late starts with a *blank* state at the log's start, which is not the whole truth until it has met
a summary. By then it is behind everything that is committed, so that it can neither lead nor answer meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from quiver.model import ConsumerId, Index, Offset
from quiver.partition.entries import Contents, Cursors, Fence, Mark, Summary, Trim, decode_entry
from quiver.partition.producers import ProducerTable
from quiver.record import Batch

MARKS_MAX = 1024
"""How many summaries are remembered as places to trim to; beyond it every other one is forgotten."""


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """The state in a snapshot."""

    applied_index: Index
    end_offset: Offset
    is_whole: bool
    contents: Contents


_decoder = msgspec.msgpack.Decoder(_Saved)


class PartitionState:
    """The replicated state of one partition."""

    def __init__(self) -> None:
        self.producers = ProducerTable()
        self.cursors: dict[ConsumerId, Offset] = {}
        self.applied_index = Index(0)
        self.end_offset = Offset(0)
        """The high watermark: the first offset that is not known to be committed."""
        self.first_offset = Offset(0)
        """Where records begin: those before it were trimmed."""
        self.trimmed_index = Index(0)
        """Entries below it may be removed from the log."""
        self.record_bytes = 0
        """The size of all batches of records there ever were."""
        self.newest_ms = 0
        """The latest time at which records were appended."""
        self.marks: list[Mark] = []
        """The summary that was last trimmed to, and those since, oldest first."""
        self.is_whole = True
        """Whether this is the state that all entries have led to, and not only those since the log's start."""
        self.on_applied: Callable[[], None] | None = None
        """Called after batches have been applied, or a snapshot restored."""

    def apply(self, batches: Sequence[Batch]) -> None:
        """Take committed batches in order."""
        for batch in batches:
            header = batch.header
            if header.is_control:
                self._apply_control(batch)
            else:
                self.producers.apply(header)
                self.record_bytes += header.batch_bytes
                self.newest_ms = max(self.newest_ms, header.append_timestamp)
        last = batches[-1].header
        self.applied_index, self.end_offset = last.index, last.end_offset
        self._tell_applied()

    def snapshot(self) -> bytes:
        """Return the state as bytes; equal states give equal bytes."""
        return msgspec.msgpack.encode(_Saved(self.applied_index, self.end_offset, self.is_whole, self.contents()))

    def restore(self, state: bytes) -> None:
        """Become the state that `snapshot` was called on; empty bytes stand for the beginning."""
        saved = _decoder.decode(state) if state else _Saved(Index(0), Offset(0), is_whole=True, contents=Contents())
        self.applied_index, self.end_offset, self.is_whole = saved.applied_index, saved.end_offset, saved.is_whole
        self._replace(saved.contents)
        self._tell_applied()

    @staticmethod
    def blank(last_index: Index, end_offset: Offset) -> bytes:
        """Return the state of a replica that knows nothing of the entries up to `last_index` but where they end."""
        contents = Contents(first_offset=end_offset)
        return msgspec.msgpack.encode(_Saved(last_index, end_offset, is_whole=False, contents=contents))

    def contents(self) -> Contents:
        """Return the state but for where it stands: what a summary holds."""
        return Contents(
            first_offset=self.first_offset,
            trimmed_index=self.trimmed_index,
            record_bytes=self.record_bytes,
            newest_ms=self.newest_ms,
            producers=self.producers.rows(),
            cursors=tuple(sorted(self.cursors.items())),
            marks=tuple(self.marks),
        )

    def cursor(self, consumer_id: ConsumerId) -> Offset | None:
        """Return where a consumer is, never before the first record; None if it has not begun."""
        cursor = self.cursors.get(consumer_id)
        return None if cursor is None else max(cursor, self.first_offset)

    def _apply_control(self, batch: Batch) -> None:
        match decode_entry(batch):
            case None:
                pass  # of the layer below
            case Fence(producer_id, epoch):
                self.producers.fence(producer_id, epoch)
            case Cursors(cursors):
                self.cursors.update(cursors)
            case Summary(contents):
                self._summarise(contents, batch)
            case Trim(index, offset):
                self._trim(index, offset)
            case unknown:
                assert_never(unknown)

    def _summarise(self, contents: Contents, batch: Batch) -> None:
        """Take a summary for the truth, whatever is here, and remember it as a place to trim to."""
        header = batch.header
        self._replace(contents)
        self.is_whole = True
        self.marks.append(Mark(header.index, header.base_offset, self.record_bytes, self.newest_ms))
        if len(self.marks) > MARKS_MAX:
            del self.marks[:-1:2]

    def _trim(self, index: Index, offset: Offset) -> None:
        self.first_offset = max(self.first_offset, offset)
        self.trimmed_index = max(self.trimmed_index, index)
        self.marks = [mark for mark in self.marks if mark.index >= self.trimmed_index]

    def _replace(self, contents: Contents) -> None:
        self.producers.replace(contents.producers)
        self.cursors = dict(contents.cursors)
        self.first_offset = contents.first_offset
        self.trimmed_index = contents.trimmed_index
        self.record_bytes = contents.record_bytes
        self.newest_ms = contents.newest_ms
        self.marks = list(contents.marks)

    def _tell_applied(self) -> None:
        if self.on_applied is not None:
            self.on_applied()

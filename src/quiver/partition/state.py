"""What every replica of a partition computes from its committed batches: the driver's state machine.

It holds the producers' table, the high watermark and the index that both stand for. All three are in one
snapshot, so that none can be newer than another (R17). It never looks into payloads.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quiver.model import Index, Offset
from quiver.partition.producers import ProducerTable, Row
from quiver.record import Batch


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """The state in a snapshot."""

    applied_index: Index
    end_offset: Offset
    producers: list[Row]


class PartitionState:
    """The replicated state of one partition."""

    def __init__(self) -> None:
        self.producers = ProducerTable()
        self.applied_index = Index(0)
        self.end_offset = Offset(0)
        """The high watermark: the first offset that is not known to be committed."""

    def apply(self, batches: Sequence[Batch]) -> None:
        """Take committed batches in order."""
        for batch in batches:
            self.producers.apply(batch.header)
        last = batches[-1].header
        self.applied_index, self.end_offset = last.index, last.end_offset

    def snapshot(self) -> bytes:
        """Return the state as bytes; equal states give equal bytes."""
        return msgspec.msgpack.encode(_Saved(self.applied_index, self.end_offset, self.producers.rows()))

    def restore(self, state: bytes) -> None:
        """Become the state that `snapshot` was called on; empty bytes stand for the beginning."""
        saved = msgspec.msgpack.decode(state, type=_Saved) if state else _Saved(Index(0), Offset(0), [])
        self.applied_index, self.end_offset = saved.applied_index, saved.end_offset
        self.producers.replace(saved.producers)

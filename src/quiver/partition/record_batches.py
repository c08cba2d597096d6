"""The batches that consuming reads need a few records of, from a cache, from memory, or from the log.

Consumers that read a record or a few at a time would verify and decode every batch once per record; decoded batches are
therefore cached, within the node's `DecodedBatchBudget`. A call that plans in one turn of the event loop first asks for
what is in memory (`find`), reads what it misses (`read_missing`), and plans again.

A call decodes at most `READ_BYTES_MAX`, or a single larger batch, and must not decode the log's own batches, which the
tail keeps: `find` returns copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from quiver.errors import TrimmedError
from quiver.metrics import now_s
from quiver.model import Offset
from quiver.partition.meters import ConsumeTimings
from quiver.partition.reads import Admit, admit_all, read_admitted, repair_on_damage
from quiver.partition.state import PartitionState
from quiver.record import Batch
from quiver.record.decoded import DecodedBatchBudget, DecodedBatchCache, Reservation, decoded_bytes
from quiver.replication import Member
from quiver.storage import UNBOUNDED

CACHED_BATCHES_MAX = 16
CACHED_BYTES_MAX = 8 * 1024 * 1024
"""Limits of the decoded-batch cache, per partition; `DecodedBatchBudget` limits those of all partitions."""
READ_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of batches, once decoded, that one call reads and decodes; beyond it the answer is shorter.

A single larger batch is decoded all the same. Calls decode in one turn of the event loop, so one such batch at a time
is more than what they have reserved.
"""


class HeldBatches:
    """The batches that one call has read from the log; `is_full` once decoding them takes `READ_BYTES_MAX`."""

    __slots__ = ("_batches", "_size_bytes")

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._size_bytes = 0

    @property
    def is_full(self) -> bool:
        """Return whether no more should be read for the call."""
        return self._size_bytes >= READ_BYTES_MAX

    def begin_read(self) -> None:
        """Drop everything if there is no room: cursors moved meanwhile, and the held batches serve no consumer."""
        if self.is_full:
            self._batches.clear()
            self._size_bytes = 0

    def add(self, batch: Batch) -> None:
        """Hold a batch."""
        self._batches.append(batch)
        self._size_bytes += decoded_bytes(batch)

    def find(self, offset: Offset) -> Batch | None:
        """Return the batch that contains an offset."""
        return next((own for own in self._batches if own.header.base_offset <= offset < own.header.end_offset), None)


class RecordBatches:
    """Finds and reads the batches of one partition."""

    def __init__(
        self, member: Member, state: PartitionState, timings: ConsumeTimings, decoded: DecodedBatchBudget
    ) -> None:
        self._member = member
        self._state = state
        self._timings = timings
        self._decoded = decoded
        self._cached: DecodedBatchCache[Offset] = DecodedBatchCache(
            bytes_max=CACHED_BYTES_MAX, batches_max=CACHED_BATCHES_MAX, budget=decoded
        )

    def close(self) -> None:
        """Release the cached batches; idempotent."""
        self._cached.clear()

    def reserve(self) -> Reservation:
        """Reserve memory for what a call may read and decode; raises `OverloadedError`."""
        return self._decoded.reserve(READ_BYTES_MAX)

    def find(self, offset: Offset, held: HeldBatches) -> Batch | None:
        """Return the batch that contains an offset, if it is in memory."""
        for base_offset, cached in self._cached.items():
            # Written out: a property here would be called for every cached batch and consumer.
            if base_offset <= offset < base_offset + cached.header.record_count:
                return self._cached.get(base_offset)
        batch = self._member.log.peek_record(offset)
        if batch is not None:
            return self._cached.add(batch.header.base_offset, batch)
        return held.find(offset)

    async def read(
        self,
        first_offset: Offset,
        end_offset: Offset,
        bytes_max: int,
        *,
        admitted: int = UNBOUNDED,
        admit: Admit = admit_all,
    ) -> list[Batch]:
        """Read batches from the log as `read_admitted` does; damage is repaired."""
        begun_s = now_s()
        with repair_on_damage(self._member):
            found = await read_admitted(
                self._member.log,
                first_offset,
                end_offset=end_offset,
                bytes_max=bytes_max,
                admitted=admitted,
                admit=admit,
            )
        self._timings.read.observe(now_s() - begun_s)
        return found

    async def read_missing(self, offsets: Iterable[Offset], held: HeldBatches) -> None:
        """Read the batches that contain these offsets, in order and each once, until enough are held."""
        held.begin_read()
        for offset in offsets:
            if held.is_full:
                return
            if held.find(offset) is not None:
                continue
            try:
                found = await self.read(offset, self._state.end_offset, 1)
            except TrimmedError:
                if self._state.first_offset <= offset:
                    raise
                continue  # trimmed meanwhile: whoever needed it plans without it
            for batch in found:
                held.add(self._cached.add(batch.header.base_offset, batch))

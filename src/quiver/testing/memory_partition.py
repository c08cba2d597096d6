"""One partition of a `MemoryCluster`: batches, sequences of producers, cursors and sessions of consumers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quiver.errors import FencedError, OutOfRangeError, OutOfSequenceError, TrimmedError
from quiver.model import NO_PRODUCER, ConsumerId, Index, NodeId, Offset, ProducerId, Term
from quiver.record import Batch, stamp
from quiver.tasks import timeout
from quiver.wire import messages as wire

WINDOW_BATCHES = 8
"""How many batches of a producer a partition remembers."""


@dataclass(slots=True)
class _Sent:
    epoch: int = -1
    next_sequence: int = 0
    batches: list[tuple[int, int, Offset]] = field(default_factory=list)


class MemoryPartition:
    """One partition: its batches, producers and cursors."""

    def __init__(self, leader: NodeId) -> None:
        self.leader = leader
        self.epoch = 1
        self.batches: list[Batch] = []
        self.first_offset = Offset(0)
        self.end_offset = Offset(0)
        self.producers: dict[ProducerId, _Sent] = {}
        self.cursors: dict[ConsumerId, Offset] = {}
        self.sessions: dict[ConsumerId, int] = {}
        self.grown = asyncio.Event()

    def begin_session(self, consumer_id: ConsumerId, session: int) -> None:
        """Begin a session of a consumer; raise if a later one has begun."""
        if session < self.sessions.get(consumer_id, 0):
            raise FencedError(f"consumer {consumer_id} was opened again since")
        if session:
            self.sessions[consumer_id] = session

    def values(self) -> list[bytes | None]:
        """Return every value, in order."""
        return [value for batch in self.batches for value in batch.values()]

    def append(self, data: bytes, *, now_ms: int) -> wire.Produced:
        """Append a batch once."""
        batch = Batch.decode(data)
        header = batch.header
        duplicate = self._find_duplicate(batch)
        if duplicate is not None:
            return wire.Produced(base_offset=duplicate, is_duplicate=True)
        base_offset = self.end_offset
        index = Index(len(self.batches) + 1)
        stamped = stamp(data, term=Term(self.epoch), index=index, base_offset=base_offset, append_timestamp=now_ms)
        self.batches.append(Batch.decode(bytes(stamped)))
        self.end_offset = Offset(base_offset + header.record_count)
        if header.producer_id != NO_PRODUCER:
            known = self.producers.setdefault(header.producer_id, _Sent())
            known.epoch = header.producer_epoch
            known.next_sequence = header.base_sequence + header.record_count
            known.batches = [
                *known.batches[1 - WINDOW_BATCHES :],
                (header.base_sequence, known.next_sequence, base_offset),
            ]
        self.wake()
        return wire.Produced(base_offset=base_offset)

    def wake(self) -> None:
        """Let those who wait for records look again."""
        self.grown.set()
        self.grown = asyncio.Event()

    def _find_duplicate(self, batch: Batch) -> Offset | None:
        """Return the offset of a batch that is there already; raise if it may not be appended."""
        header = batch.header
        if header.producer_id == NO_PRODUCER:
            return None
        known = self.producers.get(header.producer_id, _Sent())
        if header.producer_epoch < known.epoch:
            raise FencedError(f"epoch {header.producer_epoch} of producer {header.producer_id} is over")
        span = (header.base_sequence, header.base_sequence + header.record_count)
        for first, end, offset in known.batches:
            if (first, end) == span:
                return offset
        if header.base_sequence != known.next_sequence:
            raise OutOfSequenceError(f"sequence {header.base_sequence} where {known.next_sequence} is expected")
        return None

    def begin_epoch(self, producer_id: ProducerId, epoch: int) -> int:
        """Fence off earlier epochs; return the next sequence."""
        known = self.producers.setdefault(producer_id, _Sent())
        if epoch < known.epoch:
            raise FencedError(f"epoch {epoch} of producer {producer_id} is over")
        known.epoch = epoch
        return known.next_sequence

    def require_offset(self, offset: Offset) -> None:
        """Refuse an offset beyond the end, as a broker does."""
        if offset > self.end_offset:
            message = f"offset {offset} is beyond the high watermark {self.end_offset}"
            raise OutOfRangeError(message, code="offset_out_of_range")

    async def wait_grown(self, wait_ms: int) -> None:
        """Wait until a batch is appended, at most `wait_ms`."""
        try:
            async with timeout(wait_ms / 1000):
                await self.grown.wait()
        except TimeoutError:
            pass

    def read(self, offset: Offset, bytes_max: int) -> list[bytes]:
        """Return batches from an offset on."""
        if offset < self.first_offset:
            raise TrimmedError(f"offset {offset} is below the first offset {self.first_offset}")
        found: list[bytes] = []
        size_bytes = 0
        for batch in self.batches:
            if batch.header.end_offset <= offset:
                continue
            if found and size_bytes + len(batch.data) > bytes_max:
                break
            found.append(bytes(batch.data))
            size_bytes += len(batch.data)
        return found

    def trim(self, first_offset: int) -> None:
        """Remove what is below an offset, as retention does."""
        self.first_offset = Offset(first_offset)
        self.batches = [batch for batch in self.batches if batch.header.end_offset > first_offset]

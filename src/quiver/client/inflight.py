"""Batches between the accumulator and their outcome, in the order of their sequence numbers.

An `InflightBatch` keeps the bytes that were sent, so that every retry sends the same bytes. `InflightWindow` holds the
batches of one partition. It owns the sequence numbers and the rules for changing them. It neither waits nor sends.

Invariants: batches are in the order of acceptance. Sealed batches come first, and their sequences are contiguous up to
`next_sequence`. A batch that is perhaps committed keeps its sequence until a new epoch has shown what became of it. The
first batch of the window is never known to be committed, and committed batches after it stay in the window. So the
sender never gets further ahead of the first batch than a partition remembers, and can retry it at any time.
"""

from __future__ import annotations

from collections import deque

from quiver.client.batching import RecordSource
from quiver.client.delivery import Outcome
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import ProducerId
from quiver.record import Compression, reseal_batch
from quiver.routing.retry import Deadline


class InflightBatch:
    """A batch that is sent or about to be sent, until its outcome is known."""

    __slots__ = (
        "count",
        "data",
        "deadline",
        "epoch",
        "error",
        "gaps",
        "is_committed",
        "is_in_flight",
        "is_perhaps_done",
        "outcome",
        "sequence",
        "size_bytes",
        "source",
    )

    def __init__(self, source: RecordSource, deadline: Deadline) -> None:
        self.source: RecordSource | None = source
        self.outcome: Outcome = source.outcome
        self.count = len(source)
        self.size_bytes = source.size_bytes
        self.deadline = deadline
        self.data = b""
        self.epoch = -1
        self.sequence = -1
        self.is_in_flight = False
        self.is_committed = False
        self.is_perhaps_done = False
        self.error: QuiverError | None = None
        """The error of the last attempt, until the sender has handled it."""
        self.gaps = 0
        """How often the partition reported it out of sequence although no earlier batch was missing."""

    @property
    def is_sealed(self) -> bool:
        """Whether it has a sequence."""
        return self.sequence >= 0

    @property
    def end_sequence(self) -> int:
        """The first sequence after it."""
        return self.sequence + self.count

    def final_error(self, error: QuiverError) -> QuiverError:
        """Return the error that its delivery fails with when the batch is abandoned because of `error`."""
        if self.is_perhaps_done == (error.outcome == "unknown"):
            return error
        if not self.is_perhaps_done:
            return UnavailableError(f"not done: {error}", code=error.code)
        unknown = OutcomeUnknownError(f"unknown: the batch may be committed; last error: {error}", code=error.code)
        unknown.__cause__ = error
        return unknown


class InflightWindow:
    """The batches of one partition that have no known outcome yet."""

    def __init__(self, compression: Compression) -> None:
        self.waiting: deque[InflightBatch] = deque()
        self.next_sequence = 0
        self._acknowledged_end = 0
        self._compression = compression

    @property
    def is_any_perhaps_done(self) -> bool:
        """Whether any batch that was sent may be in the partition, or may still arrive there."""
        return any(batch.is_perhaps_done or batch.is_committed for batch in self.waiting)

    @property
    def open(self) -> list[InflightBatch]:
        """The batches that are not known to be committed, in order."""
        return [batch for batch in self.waiting if not batch.is_committed]

    def is_sparse(self, records: int) -> bool:
        """Return whether all its batches together have fewer than so many records."""
        return sum(batch.count for batch in self.waiting) < records

    def seal(self, batch: InflightBatch, producer_id: ProducerId, epoch: int) -> None:
        """Assign a batch its sequence and build its bytes; raise `RequestError` if its records do not fit a batch."""
        if batch.source is not None:
            batch.data = batch.source.build(
                compression=self._compression, producer_id=producer_id, epoch=epoch, sequence=self.next_sequence
            )
            batch.source = None
            batch.sequence, batch.epoch = self.next_sequence, epoch
            self.next_sequence = batch.end_sequence
        elif batch.epoch != epoch:
            batch.data = reseal_batch(batch.data, producer_epoch=epoch, base_sequence=batch.sequence)
            batch.epoch = epoch

    def acknowledge(self, batch: InflightBatch) -> None:
        """Mark a batch as committed."""
        batch.is_committed = True
        batch.data = b""
        self._acknowledged_end = max(self._acknowledged_end, batch.end_sequence)
        self._move_window()

    def drop(self, batch: InflightBatch) -> None:
        """Remove an abandoned batch; if it was sealed, the later batches need `align` or `close_gap`."""
        self.waiting.remove(batch)
        self._move_window()

    def align(self, next_sequence: int) -> list[InflightBatch]:
        """Continue at the sequence that the partition expects, under an epoch that fences all earlier sends.

        Returns the batches whose outcome the partition can no longer report: fail them as unknown.
        """
        sealed = [batch for batch in self.open if batch.is_sealed]
        is_forgotten = next_sequence < self._acknowledged_end
        lost = [batch for batch in sealed if batch.is_perhaps_done] if is_forgotten else []
        for batch in lost:
            self.drop(batch)
            sealed.remove(batch)
        if sealed and next_sequence >= sealed[0].sequence:
            # The partition has the first ones already: it answers a resend of the same bytes with their offsets.
            self.next_sequence = max(batch.end_sequence for batch in self.waiting if batch.is_sealed)
            return lost
        for batch in sealed:
            self._move(batch, next_sequence)
            next_sequence = batch.end_sequence
        self.next_sequence = next_sequence
        if is_forgotten:
            self._acknowledged_end = 0
        return lost

    def restart(self, producer_id: ProducerId, epoch: int) -> list[InflightBatch]:
        """Begin from sequence 0 as another producer, whose batches a partition cannot compare with the earlier ones.

        Returns the batches that may be committed under the old id: fail them as unknown.
        """
        lost = [batch for batch in self.open if batch.is_perhaps_done]
        self.waiting = deque(batch for batch in self.open if not batch.is_perhaps_done)
        self.next_sequence = self._acknowledged_end = 0
        for batch in self.waiting:
            if batch.is_sealed:
                batch.sequence, batch.epoch = self.next_sequence, epoch
                batch.data = reseal_batch(
                    batch.data, producer_id=producer_id, producer_epoch=epoch, base_sequence=batch.sequence
                )
                self.next_sequence = batch.end_sequence
        return lost

    def close_gap(self, dropped: InflightBatch) -> None:
        """Renumber the later batches after one that was certainly not committed, and none after it either."""
        next_sequence = dropped.sequence
        for batch in self.waiting:
            if batch.is_sealed:
                self._move(batch, next_sequence)
                next_sequence = batch.end_sequence
        self.next_sequence = next_sequence

    def _move_window(self) -> None:
        while self.waiting and self.waiting[0].is_committed:
            self.waiting.popleft()

    def _move(self, batch: InflightBatch, sequence: int) -> None:
        if batch.sequence != sequence:
            batch.data = reseal_batch(batch.data, producer_epoch=batch.epoch, base_sequence=sequence)
            batch.sequence = sequence

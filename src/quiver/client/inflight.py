"""Batches between the accumulator and their outcome, in the order of their sequence numbers.

An `InflightBatch` keeps the very bytes that were sent, so that every further try sends the same. `Parcels` is one
partition's window of them: it owns the sequence numbers, and the rules by which parcels get others. It neither waits
nor sends.

Invariants: parcels lie in the order of acceptance; sealed ones come first and their sequences are contiguous up to
`next_sequence`; a parcel that was perhaps done keeps its sequence until a new epoch has told what became of it. The
first one is never committed for all we know, and those behind it that are stay in the window: so nothing is sent that
is further ahead of it than a partition remembers, and it can be sent again at any time.
"""

from __future__ import annotations

from collections import deque

from quiver.client.delivery import Outcome
from quiver.client.sources import Source
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import ProducerId
from quiver.record import Compression, reseal_batch
from quiver.routing.retry import Deadline


class InflightBatch:
    """One batch on its way."""

    __slots__ = (
        "count",
        "data",
        "deadline",
        "epoch",
        "error",
        "gaps",
        "is_committed",
        "is_flying",
        "is_perhaps_done",
        "outcome",
        "sequence",
        "size_bytes",
        "source",
    )

    def __init__(self, source: Source, deadline: Deadline) -> None:
        self.source: Source | None = source
        self.outcome: Outcome = source.outcome
        self.count = len(source)
        self.size_bytes = source.size_bytes
        self.deadline = deadline
        self.data = b""
        self.epoch = -1
        self.sequence = -1
        self.is_flying = False
        self.is_committed = False
        self.is_perhaps_done = False
        self.error: QuiverError | None = None
        """Of the last try, until it is dealt with."""
        self.gaps = 0
        """How often it was out of sequence although nothing before it was missing."""

    @property
    def is_sealed(self) -> bool:
        """Whether its sequence is given."""
        return self.sequence >= 0

    @property
    def end_sequence(self) -> int:
        """The first sequence after it."""
        return self.sequence + self.count

    def verdict(self, error: QuiverError) -> QuiverError:
        """Return what its sender is told when it is given up because of `error`."""
        if self.is_perhaps_done == (error.outcome == "unknown"):
            return error
        if not self.is_perhaps_done:
            return UnavailableError(f"not done: {error}", code=error.code)
        unknown = OutcomeUnknownError(f"perhaps done; given up because of: {error}", code=error.code)
        unknown.__cause__ = error
        return unknown


class Parcels:
    """One partition's unanswered parcels."""

    def __init__(self, compression: Compression) -> None:
        self.waiting: deque[InflightBatch] = deque()
        self.next_sequence = 0
        self._acknowledged_end = 0
        self._compression = compression

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def is_any_perhaps_done(self) -> bool:
        """Whether what was sent may be in the partition, or still turn up there."""
        return any(parcel.is_perhaps_done or parcel.is_committed for parcel in self.waiting)

    @property
    def open(self) -> list[InflightBatch]:
        """Those that are not known to be committed, in order."""
        return [parcel for parcel in self.waiting if not parcel.is_committed]

    def seal(self, parcel: InflightBatch, producer_id: ProducerId, epoch: int) -> None:
        """Give a parcel its sequence and its bytes; raises `RequestError` if its records cannot be a batch."""
        if parcel.source is not None:
            parcel.data = parcel.source.build(
                compression=self._compression, producer_id=producer_id, epoch=epoch, sequence=self.next_sequence
            )
            parcel.source = None
            parcel.sequence, parcel.epoch = self.next_sequence, epoch
            self.next_sequence = parcel.end_sequence
        elif parcel.epoch != epoch:
            parcel.data = reseal_batch(parcel.data, producer_epoch=epoch, base_sequence=parcel.sequence)
            parcel.epoch = epoch

    def acknowledge(self, parcel: InflightBatch) -> None:
        """Take note that a parcel is committed."""
        parcel.is_committed = True
        parcel.data = b""
        self._acknowledged_end = max(self._acknowledged_end, parcel.end_sequence)
        self._move_window()

    def drop(self, parcel: InflightBatch) -> None:
        """Take out a parcel that is given up; what follows it needs `align` unless it was not sealed yet."""
        self.waiting.remove(parcel)
        self._move_window()

    def align(self, next_sequence: int) -> list[InflightBatch]:
        """Go on from the sequence that the partition expects, under an epoch that fences off all earlier sends.

        Returns the parcels of which it can no longer be told whether they are in the partition: give them up.
        """
        sealed = [parcel for parcel in self.open if parcel.is_sealed]
        is_forgotten = next_sequence < self._acknowledged_end
        lost = [parcel for parcel in sealed if parcel.is_perhaps_done] if is_forgotten else []
        for parcel in lost:
            self.drop(parcel)
            sealed.remove(parcel)
        if sealed and next_sequence >= sealed[0].sequence:
            # The first ones are there already: sent again as they are, they are answered with their offsets.
            self.next_sequence = max(parcel.end_sequence for parcel in self.waiting if parcel.is_sealed)
            return lost
        for parcel in sealed:
            self._move(parcel, next_sequence)
            next_sequence = parcel.end_sequence
        self.next_sequence = next_sequence
        if is_forgotten:
            self._acknowledged_end = 0
        return lost

    def close_gap(self, dropped: InflightBatch) -> None:
        """Let the later parcels move up after one that surely was not done, nor any after it."""
        next_sequence = dropped.sequence
        for parcel in self.waiting:
            if parcel.is_sealed:
                self._move(parcel, next_sequence)
                next_sequence = parcel.end_sequence
        self.next_sequence = next_sequence

    def _move_window(self) -> None:
        while self.waiting and self.waiting[0].is_committed:
            self.waiting.popleft()

    def _move(self, parcel: InflightBatch, sequence: int) -> None:
        if parcel.sequence != sequence:
            parcel.data = reseal_batch(parcel.data, producer_epoch=parcel.epoch, base_sequence=sequence)
            parcel.sequence = sequence

"""Deduplication: makes a retried batch land once (R20).

Every data batch carries (producer id, epoch, sequence of its first record). Sequences continue across epochs; an epoch
only decides which producer instance may send.

- `ProducerTable` is replicated state: per producer the epoch, the next sequence and the last few batches. It is a pure
  function of the committed log, so every replica has the same table at the same index and evicts the same producer when
  the table is full. A retry gets the offset of the first send, also from a new leader and also in a later epoch.
- `Deduplicator` exists on the leader only: it adds the batches and fences that are proposed but not yet committed.

A new or evicted producer must start at sequence 0. A retry older than the window, or a batch after a gap, is refused
rather than appended: refusing is always safe, guessing is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from quiver.errors import FencedError, OutOfSequenceError
from quiver.model import NO_PRODUCER, Offset, ProducerId
from quiver.partition.entries import FenceEntry, ProducerSnapshot, SentBatch
from quiver.partition.proposal_gate import ProposalOutcome
from quiver.record import BatchHeader

WINDOW_BATCHES = 8
"""Batches remembered per producer; a client has at most five in flight."""
PRODUCERS_MAX = 100_000
"""Producers remembered per partition: about 50 MB at most."""


class SequenceKind(StrEnum):
    """How a batch relates to the producer's committed batches."""

    NEW = "new"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FENCED = "fenced"


class SequenceDecision(msgspec.Struct, frozen=True):
    """The table's decision about a batch; `base_offset` is the committed offset of a duplicate."""

    kind: SequenceKind
    base_offset: Offset | None = None


NEW = SequenceDecision(SequenceKind.NEW)
GAP = SequenceDecision(SequenceKind.GAP)
FENCED = SequenceDecision(SequenceKind.FENCED)


class ProducerState:
    """The committed state of one producer."""

    __slots__ = ("epoch", "next_sequence", "sent")

    def __init__(self, epoch: int, next_sequence: int = 0, sent: Iterable[SentBatch] = ()) -> None:
        self.epoch = epoch
        self.next_sequence = next_sequence
        self.sent = deque(sent, maxlen=WINDOW_BATCHES)


class ProducerTable:
    """The producers of one partition, least recently active first."""

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers: dict[ProducerId, ProducerState] = {}
        self._producers_max = producers_max

    def __len__(self) -> int:
        return len(self._producers)

    def judge(self, header: BatchHeader) -> SequenceDecision:
        """Compare a batch with the committed batches of its producer; changes nothing."""
        if header.producer_id == NO_PRODUCER:
            return NEW
        known = self._producers.get(header.producer_id)
        if known is None:
            return NEW if header.base_sequence == 0 else GAP
        if header.producer_epoch < known.epoch:
            return FENCED
        if header.base_sequence == known.next_sequence:
            return NEW
        end_sequence = header.base_sequence + header.record_count
        for sent in known.sent:
            if (sent.first_sequence, sent.end_sequence) == (header.base_sequence, end_sequence):
                return SequenceDecision(SequenceKind.DUPLICATE, sent.base_offset)
        return GAP

    def next_sequence(self, producer_id: ProducerId, epoch: int) -> int | None:
        """Return the next sequence expected in an epoch; None if the epoch is fenced."""
        known = self._producers.get(producer_id)
        if known is None:
            return 0
        return known.next_sequence if epoch >= known.epoch else None

    def apply(self, header: BatchHeader) -> None:
        """Record a committed batch. A duplicate, out-of-sequence or fenced batch changes nothing."""
        if header.producer_id == NO_PRODUCER or header.is_control or self.judge(header).kind is not SequenceKind.NEW:
            return
        known = self._touch(header.producer_id, header.producer_epoch)
        end_sequence = header.base_sequence + header.record_count
        known.sent.append(SentBatch(header.base_sequence, end_sequence, header.base_offset))
        known.next_sequence = end_sequence

    def fence(self, producer_id: ProducerId, epoch: int) -> None:
        """Record a committed fence; a fence older than the known epoch changes nothing."""
        known = self._producers.get(producer_id)
        if known is None or epoch >= known.epoch:
            self._touch(producer_id, epoch)

    def rows(self) -> tuple[ProducerSnapshot, ...]:
        """Return the table for a snapshot: the same rows, in the same order, on every replica."""
        return tuple(
            ProducerSnapshot(producer_id, known.epoch, known.next_sequence, tuple(known.sent))
            for producer_id, known in self._producers.items()
        )

    def replace(self, rows: Iterable[ProducerSnapshot]) -> None:
        """Replace the table with the rows of a snapshot."""
        self._producers = {row.producer_id: ProducerState(row.epoch, row.next_sequence, row.sent) for row in rows}

    def _touch(self, producer_id: ProducerId, epoch: int) -> ProducerState:
        """Mark a producer as the most recently active, and return it; evict the least recently active if full."""
        known = self._producers.pop(producer_id, None) or ProducerState(epoch)
        known.epoch = epoch
        self._producers[producer_id] = known  # re-inserted last: the dict's order is the order of eviction
        if len(self._producers) > self._producers_max:
            del self._producers[next(iter(self._producers))]
        return known


class _InFlight(msgspec.Struct, frozen=True):
    """A batch that this leader has proposed, or a fence (an empty sequence range)."""

    epoch: int
    first_sequence: int
    end_sequence: int
    done: ProposalOutcome


class Deduplicator:
    """Checks batches against the committed table and against the leader's own proposals in flight.

    Checking and adding must happen in one turn of the event loop, so that no other proposal comes between them.
    """

    def __init__(self, producers: ProducerTable) -> None:
        self._producers = producers
        self._in_flight: dict[ProducerId, list[_InFlight]] = {}

    def find_duplicate(self, header: BatchHeader) -> Offset | ProposalOutcome | None:
        """Return the offset or the pending proposal of an earlier send of this batch; None if it must be proposed.

        Raises:
            FencedError: not done; the producer has begun a later epoch.
            OutOfSequenceError: not done; the batch does not follow the producer's last batch.
        """
        decision = self._producers.judge(header)
        if decision.kind is SequenceKind.FENCED:
            raise fenced(header.producer_id, header.producer_epoch)
        if decision.base_offset is not None:
            return decision.base_offset
        producer_id = header.producer_id
        if producer_id == NO_PRODUCER:
            return None
        in_flight = self._unsettled(producer_id)
        expected = self._producers.next_sequence(producer_id, header.producer_epoch)
        if expected is None or (in_flight and in_flight[-1].epoch > header.producer_epoch):
            raise fenced(producer_id, header.producer_epoch)
        if in_flight:
            expected = in_flight[-1].end_sequence
            end_sequence = header.base_sequence + header.record_count
            for sent in in_flight:
                if (sent.first_sequence, sent.end_sequence) == (header.base_sequence, end_sequence):
                    return sent.done
        if header.base_sequence != expected:
            raise OutOfSequenceError(
                f"not done: producer {producer_id} sent sequence {header.base_sequence}, expected {expected}"
            )
        return None

    def check_epoch(self, producer_id: ProducerId, epoch: int) -> None:
        """Refuse an epoch that is fenced, or that a fence in flight will fence.

        Raises:
            FencedError: not done; the producer has begun a later epoch.
        """
        in_flight = self._unsettled(producer_id)
        will_be_fenced = bool(in_flight) and in_flight[-1].epoch > epoch
        if will_be_fenced or self._producers.next_sequence(producer_id, epoch) is None:
            raise fenced(producer_id, epoch)

    def expected_sequence(self, producer_id: ProducerId, epoch: int) -> int:
        """Return the next sequence expected from a producer, after everything in flight."""
        in_flight = self._unsettled(producer_id)
        if in_flight:
            return in_flight[-1].end_sequence
        return self._producers.next_sequence(producer_id, epoch) or 0

    def add_batch(self, header: BatchHeader, done: ProposalOutcome) -> None:
        """Track a proposed batch until it has an outcome."""
        if header.producer_id != NO_PRODUCER:
            end_sequence = header.base_sequence + header.record_count
            sent = _InFlight(header.producer_epoch, header.base_sequence, end_sequence, done)
            self._in_flight.setdefault(header.producer_id, []).append(sent)

    def add_fence(self, fence: FenceEntry, done: ProposalOutcome, *, next_sequence: int) -> None:
        """Track a proposed fence until it has an outcome; `next_sequence` is the one expected when it was proposed."""
        self._in_flight.setdefault(fence.producer_id, []).append(
            _InFlight(fence.epoch, next_sequence, next_sequence, done)
        )

    def clear(self) -> None:
        """Forget everything in flight: a new term decides about it."""
        self._in_flight.clear()

    def _unsettled(self, producer_id: ProducerId) -> list[_InFlight]:
        """Return a producer's proposals without an outcome; the others are in the table already, or were refused.

        A refused proposal takes down all that were queued after it, so no gap is left here.
        """
        known = self._in_flight.get(producer_id)
        if known is None:
            return []
        in_flight = [sent for sent in known if not sent.done.is_done]
        if in_flight:
            self._in_flight[producer_id] = in_flight
        else:
            del self._in_flight[producer_id]
        return in_flight


def fenced(producer_id: ProducerId, epoch: int) -> FencedError:
    """Return the error for a batch or fence of an epoch that its producer has left."""
    return FencedError(f"not done: epoch {epoch} of producer {producer_id} is fenced; a newer instance has taken over")

"""Deduplication: makes a retried batch land once (R20).

Every data batch carries (producer id, epoch, sequence of its first record). Sequences continue across epochs; an epoch
only decides which producer instance may send.

- `ProducerTable` is replicated state: per producer the epoch, the next sequence and the last few batches. It is a pure
  function of the committed log, so every replica has the same table at the same index and evicts the same producer when
  the table is full. A retry gets the offset of the first send, also from a new leader and also in a later epoch.
- `Deduplicator` exists on the leader only: it adds the batches and fences that are proposed but not yet committed.

A new or forgotten producer must start at sequence 0. A retry older than the window, or a batch after a gap, is refused
rather than appended: refusing is always safe, guessing is not. `client_cleaner` decides which producers are forgotten.

Rows are immutable and replaced, so that a copy of the table is a snapshot that another thread can encode.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice, takewhile

import msgspec

from quiver.errors import FencedError, OutOfSequenceError
from quiver.model import NO_PRODUCER, Index, Offset, ProducerId
from quiver.partition.entries import FenceEntry, ProducerSnapshot, SentBatch
from quiver.partition.proposal_gate import ProposalOutcome
from quiver.record import BatchHeader

WINDOW_BATCHES = 8
"""Batches remembered per producer; a client has at most five in flight."""
NEARLY_FULL_SHARE = 0.9
"""Share of the table beyond which idle producers are forgotten."""
PRODUCERS_MAX = 100_000
"""Producers remembered per partition: about 50 MB at most. The leader refuses more."""


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


class ProducerTable:
    """The producers of one partition, least recently active first."""

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers: dict[ProducerId, ProducerSnapshot] = {}
        self._producers_max = producers_max

    def __len__(self) -> int:
        return len(self._producers)

    def __contains__(self, producer_id: ProducerId) -> bool:
        return producer_id in self._producers

    def is_full_with(self, more: int) -> bool:
        """Return whether another producer, after `more` others, would evict one."""
        return len(self._producers) + more >= self._producers_max

    @property
    def is_nearly_full(self) -> bool:
        """Return whether idle producers should be forgotten, to make room."""
        return len(self._producers) >= self._producers_max * NEARLY_FULL_SHARE

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
        known = self._producers.get(header.producer_id)
        end_sequence = header.base_sequence + header.record_count
        sent = SentBatch(header.base_sequence, end_sequence, header.base_offset)
        window = (sent,) if known is None else (*known.sent[1 - WINDOW_BATCHES :], sent)
        self._put(
            ProducerSnapshot(header.producer_id, header.producer_epoch, end_sequence, window, header.index),
        )

    def fence(self, producer_id: ProducerId, epoch: int, index: Index) -> None:
        """Record a committed fence; a fence older than the known epoch changes nothing."""
        known = self._producers.get(producer_id)
        if known is None:
            self._put(ProducerSnapshot(producer_id, epoch, last_index=index))
        elif epoch >= known.epoch:
            self._put(ProducerSnapshot(producer_id, epoch, known.next_sequence, known.sent, index))

    def forget(self, producer_ids: Iterable[ProducerId]) -> None:
        """Drop producers; unknown ones are ignored."""
        for producer_id in producer_ids:
            self._producers.pop(producer_id, None)

    def ids(self) -> list[ProducerId]:
        """Return all producers, least recently active first."""
        return list(self._producers)

    def find_idle(self, last_index: Index, *, ids_max: int) -> list[ProducerId]:
        """Return the producers that were not active after an index, least recently active first."""
        idle = takewhile(lambda row: row.last_index <= last_index, islice(self._producers.values(), ids_max))
        return [row.producer_id for row in idle]

    def rows(self) -> tuple[ProducerSnapshot, ...]:
        """Return the table for a snapshot: the same rows, in the same order, on every replica."""
        return tuple(self._producers.values())

    def replace(self, rows: Iterable[ProducerSnapshot]) -> None:
        """Replace the table with the rows of a snapshot."""
        self.adopt({row.producer_id: row for row in rows})

    def adopt(self, rows: dict[ProducerId, ProducerSnapshot]) -> None:
        """Replace the table, without a copy."""
        self._producers = rows

    def _put(self, row: ProducerSnapshot) -> None:
        """Put a row as the most recently active one.

        Evicts the least recently active producer if the table is full: only entries of leaders that did not refuse new
        producers yet get that far.
        """
        producers = self._producers
        producers.pop(row.producer_id, None)  # re-inserted last: the dict's order is the order of activity
        producers[row.producer_id] = row
        if len(producers) > self._producers_max:
            del producers[next(iter(producers))]


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

    @property
    def is_full(self) -> bool:
        """Return whether another producer, after those in flight, would evict one."""
        known = self._producers
        return known.is_full_with(len(self._in_flight)) and known.is_full_with(
            sum(producer_id not in known for producer_id in self._in_flight)
        )

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
            self._add(header.producer_id, _InFlight(header.producer_epoch, header.base_sequence, end_sequence, done))

    def add_fence(self, fence: FenceEntry, done: ProposalOutcome, *, next_sequence: int) -> None:
        """Track a proposed fence until it has an outcome; `next_sequence` is the one expected when it was proposed."""
        self._add(fence.producer_id, _InFlight(fence.epoch, next_sequence, next_sequence, done))

    def clear(self) -> None:
        """Forget everything in flight: a new term decides about it."""
        self._in_flight.clear()

    def _add(self, producer_id: ProducerId, sent: _InFlight) -> None:
        self._in_flight.setdefault(producer_id, []).append(sent)
        # Without this, a producer that never sends again would stay here until the term ends.
        sent.done.add_done_callback(lambda _: self._drop_settled(producer_id))

    def _drop_settled(self, producer_id: ProducerId) -> None:
        self._unsettled(producer_id)

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

"""Which batches of which producers are in the log: what makes a retry land once (R20).

Every data batch carries (producer id, epoch, sequence of its first record). Sequences go on across epochs: an epoch
only says who may send. The table remembers for each producer its epoch, the number that must come next and its last
few batches, so that a retry is answered with the offset that the first send got, also by a leader that was a follower
then, and also in a later epoch than it was first sent in. It is a pure function of the committed log: every replica
has the same one at the same index, in the same order, so that all forget the same producer when there are too many.

A producer that was forgotten, or that is new, must begin with sequence 0: a retry older than the window or a
batch after a gap is refused rather than appended. Refusing is always safe, guessing is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from quiver.model import NO_PRODUCER, Offset, ProducerId
from quiver.partition.entries import ProducerRow, Sent
from quiver.record import BatchHeader

WINDOW_BATCHES = 8
"""How many batches of a producer are remembered; clients may have no more than five unanswered."""
PRODUCERS_MAX = 100_000
"""How many producers one partition remembers: some 50 MB at the most."""


class Kind(StrEnum):
    """What a batch is to the table."""

    NEW = "new"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FENCED = "fenced"


class SequenceDecision(msgspec.Struct, frozen=True):
    """What is to be done with a batch; `base_offset` is set for a duplicate: what the batch got before."""

    kind: Kind
    base_offset: Offset | None = None


NEW = SequenceDecision(Kind.NEW)
GAP = SequenceDecision(Kind.GAP)
FENCED = SequenceDecision(Kind.FENCED)


class ProducerState:
    """What is known of one producer."""

    __slots__ = ("epoch", "next_sequence", "sent")

    def __init__(self, epoch: int, next_sequence: int = 0, sent: Iterable[Sent] = ()) -> None:
        self.epoch = epoch
        self.next_sequence = next_sequence
        self.sent = deque(sent, maxlen=WINDOW_BATCHES)


class ProducerTable:
    """The producers of one partition, the one that was silent longest first."""

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers: dict[ProducerId, ProducerState] = {}
        self._producers_max = producers_max

    def __len__(self) -> int:
        return len(self._producers)

    def judge(self, header: BatchHeader) -> SequenceDecision:
        """Tell what a batch is, by what is committed; changes nothing."""
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
                return SequenceDecision(Kind.DUPLICATE, sent.base_offset)
        return GAP

    def next_sequence(self, producer_id: ProducerId, epoch: int) -> int | None:
        """Return the number that must come next in an epoch; None if the epoch is fenced."""
        known = self._producers.get(producer_id)
        if known is None:
            return 0
        return known.next_sequence if epoch >= known.epoch else None

    def apply(self, header: BatchHeader) -> None:
        """Take note of a committed batch. One that should not be in the log changes nothing."""
        if header.producer_id == NO_PRODUCER or header.is_control or self.judge(header).kind is not Kind.NEW:
            return
        known = self._hear(header.producer_id, header.producer_epoch)
        end_sequence = header.base_sequence + header.record_count
        known.sent.append(Sent(header.base_sequence, end_sequence, header.base_offset))
        known.next_sequence = end_sequence

    def fence(self, producer_id: ProducerId, epoch: int) -> None:
        """Take note of a committed fence; an older one than is known changes nothing."""
        known = self._producers.get(producer_id)
        if known is None or epoch >= known.epoch:
            self._hear(producer_id, epoch)

    def rows(self) -> tuple[ProducerRow, ...]:
        """Return the table for a snapshot: the same rows, in the same order, on every replica."""
        return tuple(
            ProducerRow(producer_id, known.epoch, known.next_sequence, tuple(known.sent))
            for producer_id, known in self._producers.items()
        )

    def replace(self, rows: Iterable[ProducerRow]) -> None:
        """Become the table that these rows came from."""
        self._producers = {row.producer_id: ProducerState(row.epoch, row.next_sequence, row.sent) for row in rows}

    def _hear(self, producer_id: ProducerId, epoch: int) -> ProducerState:
        """Return a producer that has just been heard of in an epoch; others may have to be forgotten for it."""
        known = self._producers.pop(producer_id, None) or ProducerState(epoch)
        known.epoch = epoch
        self._producers[producer_id] = known  # last: it was silent shortest
        if len(self._producers) > self._producers_max:
            del self._producers[next(iter(self._producers))]
        return known

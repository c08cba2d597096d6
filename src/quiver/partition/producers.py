"""Who has sent what: the table that makes a send land once, however often it is retried (R20).

Pure. It is fed the headers of committed batches in order, so that every replica has the same table at
the same index; it lives in snapshots as bytes. A producer numbers its records from 0 in each epoch, with no
gap; a batch says the number of its first one. For each producer the last `WINDOW_BATCHES` batches are
remembered with the offset they got: a retry of one of them is answered with that offset.

Invariants: a producer's remembered batches are consecutive and end at `next_sequence`; epochs never go back;
at most `PRODUCERS_MAX` producers are remembered, and the one that was silent longest goes first. One that was
forgotten must begin a new epoch: refusing is always safe, guessing is not.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import msgspec

from quiver.errors import DecodeError
from quiver.model import NO_PRODUCER, Offset, ProducerId
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


class Verdict(msgspec.Struct, frozen=True):
    """What is to be done with a batch; `base_offset` is set for a duplicate: what the batch got before."""

    kind: Kind
    base_offset: Offset | None = None


NEW = Verdict(Kind.NEW)
GAP = Verdict(Kind.GAP)
FENCED = Verdict(Kind.FENCED)


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One remembered batch: its sequence numbers, half-open, and the offset of its first record."""

    first_sequence: int
    end_sequence: int
    base_offset: Offset


class Producer:
    """What is known of one producer."""

    __slots__ = ("epoch", "sent")

    def __init__(self, epoch: int, sent: deque[Sent]) -> None:
        self.epoch = epoch
        self.sent = sent

    @property
    def next_sequence(self) -> int:
        """Return the number that the producer's next record must have."""
        return self.sent[-1].end_sequence


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One producer in a snapshot."""

    producer_id: ProducerId
    epoch: int
    sent: tuple[Sent, ...]


_decoder = msgspec.msgpack.Decoder(list[Row])


class ProducerTable:
    """The producers of one partition, the one that was silent longest first."""

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers: dict[ProducerId, Producer] = {}
        self._producers_max = producers_max

    def __len__(self) -> int:
        return len(self._producers)

    def judge(self, header: BatchHeader) -> Verdict:
        """Tell what a batch is, by what is committed; changes nothing."""
        if header.producer_id == NO_PRODUCER:
            return NEW
        known = self._producers.get(header.producer_id)
        if known is None or header.producer_epoch > known.epoch:
            return NEW if header.base_sequence == 0 else GAP
        if header.producer_epoch < known.epoch:
            return FENCED
        if header.base_sequence == known.next_sequence:
            return NEW
        end_sequence = header.base_sequence + header.record_count
        for sent in known.sent:
            if (sent.first_sequence, sent.end_sequence) == (header.base_sequence, end_sequence):
                return Verdict(Kind.DUPLICATE, sent.base_offset)
        return GAP

    def next_sequence(self, producer_id: ProducerId, epoch: int) -> int | None:
        """Return the number that must come next in an epoch; None if the epoch is fenced."""
        known = self._producers.get(producer_id)
        if known is None or epoch > known.epoch:
            return 0
        return known.next_sequence if epoch == known.epoch else None

    def apply(self, header: BatchHeader) -> None:
        """Take note of a committed batch. One that should not be in the log changes nothing."""
        if header.producer_id == NO_PRODUCER or header.is_control or self.judge(header).kind is not Kind.NEW:
            return
        end_sequence = header.base_sequence + header.record_count
        sent = Sent(header.base_sequence, end_sequence, header.base_offset)
        known = self._producers.pop(header.producer_id, None)
        if known is None or header.producer_epoch > known.epoch:
            known = Producer(header.producer_epoch, deque(maxlen=WINDOW_BATCHES))
        known.sent.append(sent)
        self._producers[header.producer_id] = known  # last: it has just been heard of
        if len(self._producers) > self._producers_max:
            del self._producers[next(iter(self._producers))]

    def rows(self) -> list[Row]:
        """Return the table for a snapshot: the same rows, in the same order, on every replica."""
        return [Row(producer_id, known.epoch, tuple(known.sent)) for producer_id, known in self._producers.items()]

    def replace(self, rows: list[Row]) -> None:
        """Become the table that these rows came from."""
        self._producers = {row.producer_id: Producer(row.epoch, deque(row.sent, maxlen=WINDOW_BATCHES)) for row in rows}

    def snapshot(self) -> bytes:
        """Return the table as bytes; equal tables give equal bytes."""
        return msgspec.msgpack.encode(self.rows())

    def restore(self, data: bytes) -> None:
        """Become the table that `snapshot` was called on.

        Raises:
            DecodeError: the bytes are something else; nothing was changed.
        """
        try:
            self.replace(_decoder.decode(data))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DecodeError(f"a producer table that cannot be read: {error}") from None

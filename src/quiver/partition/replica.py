"""One replica of a partition: appends that land once, and reads that are current.

The leader checks a batch before it proposes it, against what is applied *and* against its own proposals that
are not committed yet. It does so only after everything that earlier leaders committed is applied here (R10):
before that, a retry of a batch that its predecessor took would look new. Check and proposal are one step in
the event loop, so that nothing comes between them.

What it never does: answer a retry of a batch that is still on its way by proposing it again; go on checking
in a term other than the one it caught up in.
"""

from __future__ import annotations

import asyncio

import msgspec

from quiver.errors import DecodeError, FencedError, OutOfSequenceError
from quiver.model import NO_PRODUCER, Buffer, Offset, ProducerId, Term
from quiver.partition.producers import Kind
from quiver.partition.state import PartitionState
from quiver.record import Batch, BatchHeader, decode_header, verify_payload
from quiver.replication import Member


class Appended(msgspec.Struct, frozen=True):
    """Where a batch is; `is_duplicate` if an earlier send of it put it there."""

    base_offset: Offset
    is_duplicate: bool = False


class _InFlight(msgspec.Struct, frozen=True):
    """A batch that this leader has proposed."""

    epoch: int
    first_sequence: int
    end_sequence: int
    done: asyncio.Future[list[BatchHeader]]


class Replica:
    """One replica of a partition, over its member of the Raft group."""

    def __init__(self, member: Member, state: PartitionState) -> None:
        self._member = member
        self._state = state
        self._term: Term | None = None
        self._in_flight: dict[ProducerId, list[_InFlight]] = {}

    @property
    def member(self) -> Member:
        """Return the replica's part in its group."""
        return self._member

    @property
    def state(self) -> PartitionState:
        """Return what the committed batches have led to; only the driver changes it."""
        return self._state

    @property
    def high_watermark(self) -> Offset:
        """Return the first offset not known here to be committed; perhaps not the newest one there is."""
        return self._state.end_offset

    async def append(self, data: Buffer) -> Appended:
        """Append a batch as its producer built it, once; return where it is when it is committed.

        Takes the buffer over. At most five batches of one producer may be unanswered at a time.

        Raises:
            DecodeError: not done; the bytes are not one batch of records.
            OutOfSequenceError: not done; it does not follow the producer's last batch.
            FencedError: not done; the producer has begun a later epoch.
            UnavailableError: not done; this replica does not lead, or is overloaded.
            OutcomeUnknownError: perhaps done; send the very same batch again.
        """
        header = _checked_header(data)
        await self._catch_up()
        try:
            known = self._find_known(header)
        except OutOfSequenceError:
            # A leader that was replaced, and does not know it yet, must not say so to a producer that is in order.
            await self._member.read_barrier()
            await self._catch_up()
            known = self._find_known(header)
        if isinstance(known, Appended):
            return known
        if known is not None:
            headers = await asyncio.shield(known)
            return Appended(headers[0].base_offset, is_duplicate=True)
        headers = await asyncio.shield(self._propose(header, data))
        return Appended(headers[0].base_offset)

    async def read_end_offset(self) -> Offset:
        """Return the high watermark, no older than this call.

        Raises:
            UnavailableError: this replica does not lead, or is overloaded.
        """
        await self._member.read_barrier()
        return self._state.end_offset

    async def read(self, first_offset: Offset, *, bytes_max: int) -> list[Batch]:
        """Return committed batches from the one that holds `first_offset`; see `Log.read_records` for errors."""
        return await self._member.log.read_records(first_offset, end_offset=self._state.end_offset, bytes_max=bytes_max)

    async def _catch_up(self) -> None:
        """Wait, once in each term, until all that earlier leaders committed is applied here."""
        raft = self._member.raft
        while self._term != raft.term or not raft.is_leader:
            term = raft.term
            await self._member.read_barrier()
            if raft.term == term != self._term:
                self._term = term
                self._in_flight.clear()

    def _find_known(self, header: BatchHeader) -> Appended | asyncio.Future[list[BatchHeader]] | None:
        """Return where a batch is, or who is bringing it there; None if it is to be proposed now."""
        verdict = self._state.producers.judge(header)
        if verdict.kind is Kind.FENCED:
            raise FencedError(f"not done: producer {header.producer_id} has left epoch {header.producer_epoch}")
        if verdict.base_offset is not None:
            return Appended(verdict.base_offset, is_duplicate=True)
        if header.producer_id == NO_PRODUCER:
            return None
        in_flight = self._unsettled(header.producer_id)
        end_sequence = header.base_sequence + header.record_count
        for sent in in_flight:
            if (sent.epoch, sent.first_sequence, sent.end_sequence) == (
                header.producer_epoch,
                header.base_sequence,
                end_sequence,
            ):
                return sent.done
        self._check_follows(header, in_flight)
        return None

    def _check_follows(self, header: BatchHeader, in_flight: list[_InFlight]) -> None:
        """Refuse a batch that does not follow its producer's last one, committed or on its way."""
        expected = self._state.producers.next_sequence(header.producer_id, header.producer_epoch)
        if in_flight:
            newest = in_flight[-1]
            if newest.epoch > header.producer_epoch:
                raise FencedError(f"not done: producer {header.producer_id} has left epoch {header.producer_epoch}")
            expected = newest.end_sequence if newest.epoch == header.producer_epoch else 0
        if header.base_sequence != expected:
            raise OutOfSequenceError(
                f"not done: producer {header.producer_id} sent sequence {header.base_sequence}, expected {expected}"
            )

    def _unsettled(self, producer_id: ProducerId) -> list[_InFlight]:
        """Return a producer's proposals without an outcome; the others are in the table by now, or were refused.

        Proposals are refused together with all that were queued behind them, so that no gap is left here.
        """
        in_flight = [sent for sent in self._in_flight.pop(producer_id, ()) if not sent.done.done()]
        if in_flight:
            self._in_flight[producer_id] = in_flight
        return in_flight

    def _propose(self, header: BatchHeader, data: Buffer) -> asyncio.Future[list[BatchHeader]]:
        assert self._term is not None, "a replica proposes after it has caught up"
        done = self._member.propose_nowait([data], term=self._term)
        if header.producer_id != NO_PRODUCER:
            end_sequence = header.base_sequence + header.record_count
            sent = _InFlight(header.producer_epoch, header.base_sequence, end_sequence, done)
            self._in_flight.setdefault(header.producer_id, []).append(sent)
        return done


def _checked_header(data: Buffer) -> BatchHeader:
    header = decode_header(data)
    if header.is_control or header.batch_bytes != len(data):
        raise DecodeError("an append takes exactly one batch of records")
    verify_payload(data, header)
    return header

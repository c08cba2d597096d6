"""Appends that land once: a batch is checked against what is applied *and* against what is on its way.

Check and proposal are one step in the event loop, so that nothing comes between them. What it never does: answer a
retry of a batch that is still on its way by proposing it again; let a batch follow the fence that shuts it out.
"""

from __future__ import annotations

import asyncio

import msgspec

from quiver.errors import DecodeError, FencedError, OutOfSequenceError
from quiver.model import NO_PRODUCER, Buffer, Offset, ProducerId
from quiver.partition.entries import Fence, build_entry
from quiver.partition.producers import Kind
from quiver.partition.proposal_gate import ProposalGate, Proposed
from quiver.partition.state import PartitionState
from quiver.record import BatchHeader, decode_header, verify_payload
from quiver.storage import DiskSpace


class Appended(msgspec.Struct, frozen=True):
    """Where a batch is; `is_duplicate` if an earlier send of it put it there."""

    base_offset: Offset
    is_duplicate: bool = False


class _InFlight(msgspec.Struct, frozen=True):
    """A batch of a producer, or a fence (of no sequence numbers), that this leader has proposed."""

    epoch: int
    first_sequence: int
    end_sequence: int
    done: Proposed


class Appender:
    """The appends to one partition, on its leader."""

    def __init__(self, leading: ProposalGate, state: PartitionState, space: DiskSpace | None = None) -> None:
        self._leading = leading
        self._space = space
        self._state = state
        self._in_flight: dict[ProducerId, list[_InFlight]] = {}
        leading.on_new_term.append(self._in_flight.clear)

    async def append(self, data: Buffer) -> Appended:
        """Append a batch; see `Replica.append`."""
        header = _checked_header(data)
        await self._leading.wait_ready()
        try:
            known = self._find_known(header)
        except OutOfSequenceError:
            # A leader that was replaced, and does not know it yet, must not say so to a producer that is in order.
            await self._leading.wait_confirmed()
            known = self._find_known(header)
        if isinstance(known, Appended):
            return known
        if known is not None:
            headers = await asyncio.shield(known)
            return Appended(headers[0].base_offset, is_duplicate=True)
        headers = await asyncio.shield(self._propose(header, data))
        return Appended(headers[0].base_offset)

    async def begin_epoch(self, producer_id: ProducerId, epoch: int) -> int:
        """Fence off a producer's earlier epochs; see `Replica.begin_epoch`."""
        await self._leading.wait_ready()
        self._check_epoch(producer_id, epoch)
        end_sequence = self._expected(producer_id, epoch)
        done = self._leading.propose(build_entry(Fence(producer_id, epoch)))
        self._note(producer_id, _InFlight(epoch, end_sequence, end_sequence, done))
        await asyncio.shield(done)
        next_sequence = self._state.producers.next_sequence(producer_id, epoch)
        if next_sequence is None:
            raise _fenced(producer_id, epoch)
        return next_sequence

    def _find_known(self, header: BatchHeader) -> Appended | Proposed | None:
        """Return where a batch is, or who is bringing it there; None if it is to be proposed now."""
        verdict = self._state.producers.judge(header)
        if verdict.kind is Kind.FENCED:
            raise _fenced(header.producer_id, header.producer_epoch)
        if verdict.base_offset is not None:
            return Appended(verdict.base_offset, is_duplicate=True)
        if header.producer_id == NO_PRODUCER:
            return None
        self._check_epoch(header.producer_id, header.producer_epoch)
        end_sequence = header.base_sequence + header.record_count
        for sent in self._unsettled(header.producer_id):
            if (sent.first_sequence, sent.end_sequence) == (header.base_sequence, end_sequence):
                return sent.done
        expected = self._expected(header.producer_id, header.producer_epoch)
        if header.base_sequence != expected:
            raise OutOfSequenceError(
                f"not done: producer {header.producer_id} sent sequence {header.base_sequence}, expected {expected}"
            )
        return None

    def _check_epoch(self, producer_id: ProducerId, epoch: int) -> None:
        """Refuse what is of an epoch that its producer has left, or will have when all on its way has arrived."""
        in_flight = self._unsettled(producer_id)
        is_left = bool(in_flight) and in_flight[-1].epoch > epoch
        if is_left or self._state.producers.next_sequence(producer_id, epoch) is None:
            raise _fenced(producer_id, epoch)

    def _expected(self, producer_id: ProducerId, epoch: int) -> int:
        """Return the number that must come next, behind all that is on its way."""
        in_flight = self._unsettled(producer_id)
        if in_flight:
            return in_flight[-1].end_sequence
        return self._state.producers.next_sequence(producer_id, epoch) or 0

    def _unsettled(self, producer_id: ProducerId) -> list[_InFlight]:
        """Return a producer's proposals without an outcome; the others are in the table by now, or were refused.

        Proposals are refused together with all that were queued behind them, so that no gap is left here.
        """
        in_flight = [sent for sent in self._in_flight.pop(producer_id, ()) if not sent.done.done()]
        if in_flight:
            self._in_flight[producer_id] = in_flight
        return in_flight

    def _propose(self, header: BatchHeader, data: Buffer) -> Proposed:
        if self._space is not None:
            self._space.admit(len(data))
        done = self._leading.propose(data)
        if header.producer_id != NO_PRODUCER:
            end_sequence = header.base_sequence + header.record_count
            self._note(header.producer_id, _InFlight(header.producer_epoch, header.base_sequence, end_sequence, done))
        return done

    def _note(self, producer_id: ProducerId, sent: _InFlight) -> None:
        self._in_flight.setdefault(producer_id, []).append(sent)


def _checked_header(data: Buffer) -> BatchHeader:
    header = decode_header(data)
    if header.is_control or header.batch_bytes != len(data):
        raise DecodeError("an append takes exactly one batch of records")
    verify_payload(data, header)
    return header


def _fenced(producer_id: ProducerId, epoch: int) -> FencedError:
    return FencedError(f"not done: producer {producer_id} has left epoch {epoch}")

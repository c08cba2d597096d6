"""Reads that move a cursor: records and the new place of their consumer, in one replicated step.

Nothing is returned before the move is committed; if its outcome is unknown, nothing is. Without an offset, the calls
of one consumer take turns until each has planned its move, so that no record is returned twice. With an offset a
call may be repeated: it returns what it returned before, and means that everything before the offset is done.

Consumers that take one record at a time are served together (`take_each`): their moves are planned in one turn of the
loop and go into one entry, from batches that are kept decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from quiver.errors import OutOfRangeError, OverloadedError, TrimmedError
from quiver.model import ConsumerId, Offset
from quiver.partition.cursors import CursorMoves
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.recent import RecentBatches
from quiver.partition.repair import repairing
from quiver.partition.state import PartitionState
from quiver.record import Batch, Record
from quiver.replication import Member

Start = Literal["earliest", "latest"]
TURNS_MAX = 10_000
"""How many calls may wait for their turn in one partition."""
TAKEN_BYTES_MAX = 4 * 1024 * 1024
"""About how many bytes of values are taken in one step; a record that is larger comes alone."""

Taker = tuple[ConsumerId, Start]
"""A consumer, and where it begins if it has no cursor."""


class Consumed(msgspec.Struct, frozen=True):
    """Batches for a consumer: the records from `first_offset` up to `cursor` are meant, none if they are equal."""

    batches: list[Batch]
    first_offset: Offset
    cursor: Offset
    end_offset: Offset
    """The high watermark."""


class ConsumeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer asks for."""

    consumer_id: ConsumerId
    offset: Offset | None
    default_start: Start
    records_max: int
    bytes_max: int


class _Plan:
    """What each of some takers gets, in their order, and where that leaves their cursors."""

    __slots__ = ("cursors", "missing", "records", "size_bytes")

    def __init__(self) -> None:
        self.records: list[Record | None] = []
        self.cursors: dict[ConsumerId, Offset] = {}
        self.missing: set[Offset] = set()
        """Offsets of records that must be read first."""
        self.size_bytes = 0


class _Turn:
    """Whose turn it is among the calls of one consumer."""

    __slots__ = ("calls", "lock")

    def __init__(self) -> None:
        self.calls = 0
        self.lock = asyncio.Lock()


class ConsumeHandler:
    """The consumers of one partition, on its leader."""

    def __init__(self, leading: ProposalGate, state: PartitionState, moves: CursorMoves, member: Member) -> None:
        self._leading = leading
        self._state = state
        self._moves = moves
        self._member = member
        self._recent = RecentBatches()
        self._turns: dict[ConsumerId, _Turn] = {}
        self._waiting = 0

    async def consume(self, wish: ConsumeRequest) -> Consumed:
        """Read at the cursor, or at the wish's offset, and move the cursor behind what is returned."""
        if wish.offset is not None:
            consumed, moved = await self._plan(wish)
        else:
            async with self._turn(wish.consumer_id):
                consumed, moved = await self._plan(wish)
        if moved is None:
            await self._leading.wait_confirmed()  # that there is nothing more must be true now, too
        else:
            await asyncio.shield(moved)
        return consumed

    async def _plan(self, wish: ConsumeRequest) -> tuple[Consumed, asyncio.Future[None] | None]:
        """Read, and begin to move the cursor; the future is None if it is there already and nothing was read."""
        while True:
            await self._leading.wait_ready()
            term, planned = self._leading.term, self._moves.planned(wish.consumer_id)
            first_offset = await self._find_start(wish, planned)
            end_offset = self._state.end_offset
            try:
                batches = await self._read(first_offset, end_offset, wish.bytes_max)
            except TrimmedError:
                if wish.offset is not None or self._state.first_offset <= first_offset:
                    raise
                continue  # records were trimmed meanwhile, and the cursor moves up
            await self._leading.wait_ready()
            before, planned = planned, self._moves.planned(wish.consumer_id)
            if self._leading.term != term or (wish.offset is None and planned != before):
                continue  # plans are void, or somebody else has moved the cursor
            batches, cursor = _cut(batches, first_offset, wish.records_max)
            consumed = Consumed(batches, first_offset, cursor, end_offset)
            is_there = cursor == planned and self._moves.settled() is None
            return consumed, None if is_there else self._moves.move({wish.consumer_id: cursor})

    async def _read(self, first_offset: Offset, end_offset: Offset, bytes_max: int) -> list[Batch]:
        with repairing(self._member):
            return await self._member.log.read_records(first_offset, end_offset=end_offset, bytes_max=bytes_max)

    async def _find_start(self, wish: ConsumeRequest, planned: Offset | None) -> Offset:
        if wish.offset is None:
            return self._begin(wish.default_start) if planned is None else planned
        await check_in_range(self._leading, self._state, wish.offset)
        return wish.offset

    def _begin(self, start: Start) -> Offset:
        return self._state.first_offset if start == "earliest" else self._state.end_offset

    # -- one record for each ---------------------------------------------------------------------

    async def take_each(self, takers: Sequence[Taker]) -> list[Record | None]:
        """Take a record for each at its cursor, in one step; who is named twice gets two.

        It may end early if the records are large: nothing was done for the takers behind.
        """
        held: dict[Offset, Batch] = {}
        while True:
            await self._leading.wait_ready()
            plan = self._plan_each(takers, held)
            if not plan.missing:
                break
            # Who comes next finds them, too; but there may be more than are kept, and this call needs them all.
            held |= {batch.header.base_offset: batch for batch in await self._read_each(plan.missing)}
        moves = {taker: cursor for taker, cursor in plan.cursors.items() if cursor != self._moves.planned(taker)}
        moved = self._moves.move(moves) if moves else self._moves.settled()
        if moved is None:
            await self._leading.wait_confirmed()  # that there is nothing more must be true now, too
        else:
            await asyncio.shield(moved)
        return plan.records

    def _plan_each(self, takers: Sequence[Taker], held: dict[Offset, Batch]) -> _Plan:
        plan, end_offset = _Plan(), self._state.end_offset
        for taker, start in takers:
            offset = plan.cursors.get(taker)
            if offset is None:
                planned = self._moves.planned(taker)
                offset = self._begin(start) if planned is None else planned
            record: Record | None = None
            if offset < end_offset:
                batch = self._find_batch(offset, held)
                if batch is None:
                    plan.missing.add(offset)
                    continue
                record = batch.records(offset, Offset(offset + 1))[0]
                plan.size_bytes += len(record.value or b"")
                if plan.records and plan.size_bytes > TAKEN_BYTES_MAX:
                    break
                offset = Offset(offset + 1)
            plan.cursors[taker] = offset
            plan.records.append(record)
        return plan

    def _find_batch(self, offset: Offset, held: dict[Offset, Batch]) -> Batch | None:
        batch = self._recent.find(offset)
        if batch is not None:
            return batch
        batch = self._member.log.peek_record(offset)
        if batch is not None:
            return self._recent.add(batch)
        return next((own for own in held.values() if own.header.base_offset <= offset < own.header.end_offset), None)

    async def _read_each(self, offsets: Iterable[Offset]) -> list[Batch]:
        """Read the batches that hold these offsets, each once."""
        read: list[Batch] = []
        for offset in sorted(offsets):
            if read and offset < read[-1].header.end_offset:
                continue
            try:
                found = await self._read(offset, self._state.end_offset, 1)
            except TrimmedError:
                if self._state.first_offset <= offset:
                    raise
                continue  # records were trimmed meanwhile, and the cursor moves up
            read += map(self._recent.add, found)
        return read

    @asynccontextmanager
    async def _turn(self, consumer_id: ConsumerId) -> AsyncIterator[None]:
        if self._waiting >= TURNS_MAX:
            raise OverloadedError(f"not done: {TURNS_MAX} calls wait for their turn in this partition")
        turn = self._turns.setdefault(consumer_id, _Turn())
        turn.calls += 1
        self._waiting += 1
        try:
            async with turn.lock:
                yield
        finally:
            self._waiting -= 1
            turn.calls -= 1
            if not turn.calls:
                del self._turns[consumer_id]


async def check_in_range(leading: ProposalGate, state: PartitionState, offset: Offset) -> None:
    """Refuse an offset that was trimmed, or that lies behind the end also by the word of a leader that is one.

    Raises:
        TrimmedError: the offset lies below the first record.
        OutOfRangeError: the offset lies behind the high watermark.
    """
    if offset > state.end_offset:
        await leading.wait_confirmed()  # a leader that was replaced may not know the newest records
    if offset > state.end_offset:
        raise OutOfRangeError(f"offset {offset} lies behind the end, {state.end_offset}", code="offset_out_of_range")
    if offset < state.first_offset:
        raise TrimmedError(f"offset {offset} was removed; the records start at {state.first_offset}")


def _cut(batches: list[Batch], first_offset: Offset, records_max: int) -> tuple[list[Batch], Offset]:
    """Return the batches that hold the first `records_max` records, and the offset behind those."""
    end_offset = Offset(first_offset + records_max)
    kept = [batch for batch in batches if batch.header.base_offset < end_offset]
    return kept, min(end_offset, kept[-1].header.end_offset) if kept else first_offset

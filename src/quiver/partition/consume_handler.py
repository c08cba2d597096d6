"""Consuming reads: return records and move the consumer's cursor past them, in one replicated step.

Records are returned only after the move is committed; if its outcome is unknown, none are returned. Without an offset,
the calls of one consumer run one at a time until each has planned its move, so that no record is returned twice. With
an offset a call may be repeated: it returns the same records, and acknowledges everything before the offset.

Consumers that read one record at a time are served together (`consume_many`): their moves are planned in one turn of
the event loop and committed in one entry, from a cache of decoded batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Literal

import msgspec

from quiver.errors import ConflictError, OverloadedError, TrimmedError
from quiver.metrics import now_s
from quiver.model import ConsumerId, Index, Offset
from quiver.partition.cursors import NO_GROUPS, CursorMoves, KnownGroups
from quiver.partition.meters import ConsumeTimings
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.reads import Admit, LargeRecords, admit_all, check_in_range
from quiver.partition.record_batches import READ_BYTES_MAX, HeldBatches, RecordBatches
from quiver.partition.state import PartitionState
from quiver.record import Batch, Record
from quiver.record.decoded import DecodedAllowance, decoded_bytes, record_bytes

DefaultStart = Literal["earliest", "latest"]
TURNS_MAX = 10_000
"""Calls that may wait for an earlier call of the same consumer, per partition."""
CONSUMED_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of values, approximately, that one `consume_many` returns; a larger record is returned alone."""

ConsumerStart = tuple[ConsumerId, DefaultStart]
"""A consumer, and where it starts if it has no cursor."""


class ConsumeResult(msgspec.Struct, frozen=True):
    """Batches for a consumer: its records are those in [`first_offset`, `cursor`), none if the two are equal."""

    batches: list[Batch]
    first_offset: Offset
    cursor: Offset
    end_offset: Offset
    """The high watermark."""


class ConsumeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One consuming read: from `offset`, or from the cursor if that is None.

    `bytes_max` bounds the batches as stored and once decoded; a single larger one is returned whole.
    """

    consumer_id: ConsumerId
    offset: Offset | None
    default_start: DefaultStart
    records_max: int
    bytes_max: int
    checked_index: Index | None = None
    """The metadata index at which the consumer was found to be registered."""
    groups: KnownGroups = NO_GROUPS
    """What that metadata says of the consumer, if it is a group."""
    admit: Admit = admit_all
    """Called before records are read."""
    decoded_bytes_max: int = 0
    """What the batches may take once decoded, also a single one; 0: as much as it is."""


class _Plan:
    """The record for each of several consumers, in order, and their cursors afterwards."""

    __slots__ = ("allowance", "bytes_max", "cursors", "large_bytes", "missing", "records", "size_bytes")

    def __init__(self, admitted: int, bytes_max: int) -> None:
        self.allowance = DecodedAllowance(READ_BYTES_MAX, first_bytes_max=admitted)
        self.bytes_max = bytes_max
        """Bytes of the records; a single larger one is returned alone, unless it has to be admitted."""
        self.large_bytes = 0
        """What has to be admitted first for the first consumer's record, if it is large."""
        self.records: list[Record | None] = []
        self.cursors: dict[ConsumerId, Offset] = {}
        self.missing: dict[Offset, None] = {}
        """Offsets whose batches must be read from the log before the plan is complete, in the consumers' order."""
        self.size_bytes = 0


class _Turn:
    """Serializes the calls of one consumer; `calls` counts those that wait or run."""

    __slots__ = ("calls", "lock")

    def __init__(self) -> None:
        self.calls = 0
        self.lock = asyncio.Lock()


class ConsumeHandler:
    """Handles the consuming reads of one partition, on its leader."""

    def __init__(
        self,
        gate: ProposalGate,
        state: PartitionState,
        moves: CursorMoves,
        batches: RecordBatches,
        timings: ConsumeTimings,
    ) -> None:
        self._gate = gate
        self._state = state
        self._moves = moves
        self._batches = batches
        self._timings = timings
        self._turns: dict[ConsumerId, _Turn] = {}
        self._waiting = 0

    async def consume(self, request: ConsumeRequest) -> ConsumeResult:
        """Read at the offset or the cursor, and move the cursor past the records; see `Replica.consume`."""
        if request.offset is not None:
            consumed, moved = await self._plan(request)
        else:
            async with self._turn(request.consumer_id):
                consumed, moved = await self._plan(request)
        begun_s = now_s()
        # Without a move: a deposed leader must not report that there is nothing.
        await (self._gate.wait_confirmed() if moved is None else asyncio.shield(moved))
        self._timings.commit.observe(now_s() - begun_s)
        return consumed

    async def _plan(self, request: ConsumeRequest) -> tuple[ConsumeResult, asyncio.Future[None] | None]:
        """Read, and start to move the cursor; the future is None if nothing was read and no move is needed."""
        while True:
            await self._gate.wait_ready()
            self._check_no_queue(request.consumer_id, request.groups)
            term, planned = self._gate.term, self._moves.planned(request.consumer_id)
            first_offset = await self._find_start(request, planned)
            has_records = first_offset < self._state.end_offset
            admitted = await request.admit(request.bytes_max) if has_records else 0
            end_offset = self._state.end_offset
            try:
                batches = await self._batches.read(
                    first_offset, end_offset, request.bytes_max, admitted=admitted, admit=request.admit
                )
            except TrimmedError:
                if request.offset is not None or self._state.first_offset <= first_offset:
                    raise
                continue  # trimmed meanwhile: the cursor is now the first offset
            await self._gate.wait_ready()
            before, planned = planned, self._moves.planned(request.consumer_id)
            if self._gate.term != term or (request.offset is None and planned != before):
                continue  # a new term voided the plans, or another call moved the cursor
            self._moves.check_plain(request.consumer_id, request.groups)  # no await from here to the move
            batches, cursor = _cut(batches, first_offset, request.records_max, bytes_max=request.bytes_max)
            size_bytes = sum(map(decoded_bytes, batches)) if request.decoded_bytes_max else 0
            if size_bytes > request.decoded_bytes_max:
                raise LargeRecords(size_bytes)
            consumed = ConsumeResult(batches, first_offset, cursor, end_offset)
            is_there = cursor == planned and self._moves.settled() is None
            return consumed, None if is_there else self._moves.move(
                {request.consumer_id: cursor}, checked_index=request.checked_index
            )

    async def _find_start(self, request: ConsumeRequest, planned: Offset | None) -> Offset:
        if request.offset is None:
            return self._start_offset(request.default_start) if planned is None else planned
        await check_in_range(self._gate, self._state, request.offset)
        return request.offset

    def _check_no_queue(self, consumer_id: ConsumerId, groups: KnownGroups) -> None:
        """Refuse to move the cursor of a work queue past records that its workers have not settled."""
        if consumer_id in self._state.queues or consumer_id in groups.queues:
            raise ConflictError(
                f"not done: group {consumer_id} reads this topic as a work queue; receive from it, or read the records "
                "with another group",
                code="is_queue",
            )

    def _start_offset(self, start: DefaultStart) -> Offset:
        return self._state.first_offset if start == "earliest" else self._state.end_offset

    # -- one record for each of many consumers ---------------------------------------------------

    async def consume_many(
        self,
        consumers: Sequence[ConsumerStart],
        *,
        checked_index: Index | None = None,
        groups: KnownGroups = NO_GROUPS,
        admit: Admit = admit_all,
        bytes_max: int = 0,
    ) -> list[Record | None]:
        """Return the record at each consumer's cursor, in one replicated step; see `Replica.consume_many`."""
        await self._gate.wait_ready()
        plan = await self._plan_admitted(consumers, 0, groups, bytes_max)
        while plan.large_bytes:
            plan = await self._plan_admitted(consumers, await admit(plan.large_bytes), groups, bytes_max)
        for consumer_id in plan.cursors:  # no await from here to the move
            self._moves.check_plain(consumer_id, groups)
        moves = {
            consumer_id: cursor
            for consumer_id, cursor in plan.cursors.items()
            if cursor != self._moves.planned(consumer_id)
        }
        moved = self._moves.move(moves, checked_index=checked_index) if moves else self._moves.settled()
        begun_s = now_s()
        # Without a move: a deposed leader must not report that there is nothing.
        await (self._gate.wait_confirmed() if moved is None else asyncio.shield(moved))
        self._timings.commit.observe(now_s() - begun_s)
        return plan.records

    async def _plan_admitted(
        self, consumers: Sequence[ConsumerStart], admitted: int, groups: KnownGroups, bytes_max: int
    ) -> _Plan:
        """Return a plan that misses nothing, within the memory that is admitted for it."""
        await self._gate.wait_ready()
        for consumer_id, _ in consumers if self._state.queues or groups.queues else ():
            self._check_no_queue(consumer_id, groups)
        plan = self._plan_many(consumers, HeldBatches(), admitted, bytes_max)
        if not plan.missing or plan.large_bytes:
            return plan
        with self._batches.reserve():
            return await self._read_and_plan(consumers, plan, admitted)

    async def _read_and_plan(self, consumers: Sequence[ConsumerStart], plan: _Plan, admitted: int) -> _Plan:
        """Read what a plan misses, until there is a plan that misses nothing.

        The batches are cached, but there may be more than the cache holds, and this call needs all of them.
        """
        held = HeldBatches()
        while plan.missing and not plan.large_bytes:
            await self._batches.read_missing(plan.missing, held)
            await self._gate.wait_ready()
            plan = self._plan_many(consumers, held, admitted, plan.bytes_max)
        return plan

    def _plan_many(self, consumers: Sequence[ConsumerStart], held: HeldBatches, admitted: int, bytes_max: int) -> _Plan:
        """Plan a record for each consumer; for fewer if the records, or the batches that must be read, are large."""
        plan, end_offset = _Plan(admitted, bytes_max), self._state.end_offset
        records_bytes_max = min(bytes_max or CONSUMED_BYTES_MAX, CONSUMED_BYTES_MAX)
        for consumer_id, start in consumers:
            offset = plan.cursors.get(consumer_id)
            if offset is None:
                planned = self._moves.planned(consumer_id)
                offset = self._start_offset(start) if planned is None else planned
            record: Record | None = None
            if offset < end_offset:
                batch = self._batches.find(offset, held)
                if batch is None and held.is_full and plan.records:
                    break
                if batch is None:
                    plan.missing[offset] = None
                    continue
                if not plan.allowance.take(batch):
                    plan.large_bytes = plan.allowance.large_bytes
                    break
                record = batch.records(offset, Offset(offset + 1))[0]
                plan.size_bytes += record_bytes(record)
                if plan.size_bytes > records_bytes_max:
                    if plan.records:
                        break
                    if bytes_max and plan.size_bytes > max(bytes_max, admitted):
                        plan.large_bytes = plan.size_bytes
                        break
                offset = Offset(offset + 1)
            plan.cursors[consumer_id] = offset
            plan.records.append(record)
        return plan

    @asynccontextmanager
    async def _turn(self, consumer_id: ConsumerId) -> AsyncIterator[None]:
        if self._waiting >= TURNS_MAX:
            message = f"not done: {TURNS_MAX} consume calls already wait for this partition; retry later"
            raise OverloadedError(message)
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


def _cut(batches: list[Batch], first_offset: Offset, records_max: int, *, bytes_max: int) -> tuple[list[Batch], Offset]:
    """Return the batches that contain the first `records_max` records, and the offset after those.

    Whoever consumes decodes all of them, and cannot leave any to a later call: their decoded bytes are bounded here.
    """
    end_offset, allowance = Offset(first_offset + records_max), DecodedAllowance(bytes_max)
    kept = list(takewhile(lambda one: one.header.base_offset < end_offset and allowance.take(one), batches))
    return kept, min(end_offset, kept[-1].header.end_offset) if kept else first_offset

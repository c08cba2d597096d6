"""Look at records without a consumer: by offset, time or key, with a search in a bounded range, also as a file.

One call reads at most so many records and bytes of a partition, however many match; `next_offset` says where to go on.
The newest records are read backwards, in ranges of about `STEP_BYTES`: if not all that are wanted fit, those that are
returned are the newest, and `start` says where they begin.

Bytes are counted as they are once decoded, before a batch is decoded, and a batch is dropped before the next one is.
What a call decodes and what it has found are reserved in the node's `DecodedBatchBudget` until its answer begins; then
the records, and a file that is made as a whole, count in the node's `AnswerMemory` until they are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, TypeVar

import msgspec

from quiver.errors import DecodeError, NotFoundError, OutOfRangeError, RequestError, TrimmedError, UnavailableError
from quiver.gateway.codec import record_fields
from quiver.gateway.console import contract
from quiver.gateway.console.record_files import make_file, room_bytes
from quiver.gateway.console.record_scan import (
    ANSWER_BYTES_MAX,
    SCANNED_BYTES_MAX,
    STEP_BYTES,
    FoundRecords,
    KeptRecords,
    Matches,
    NewestScan,
    PartitionRecords,
    PartitionScan,
    make_matcher,
)
from quiver.gateway.contract import MessageItem
from quiver.gateway.http import HttpResponse
from quiver.gateway.record_answers import SMALL_BYTES, Item, respond_with_list
from quiver.model import Offset, PartitionId
from quiver.record import Batch, decode_batches
from quiver.record.decoded import DecodedBatchBudget, Reservation, decoded_bytes
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.security import Principal
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom
from quiver.wire.messages import Fetch, Fetched, FindOffset, TopicInfo

T = TypeVar("T")


class _Call(msgspec.Struct, frozen=True):
    """One call, and what it has found."""

    given: contract.RecordsQuery
    info: TopicInfo
    wanted: int
    matches: Matches | None
    deadline: Deadline
    found: FoundRecords
    memory: Reservation

    @property
    def scan_max(self) -> int:
        """Return how many records of a partition are looked at."""
        default = contract.SCANNED_DEFAULT if self.matches else self.wanted
        return self.given.scan or max(self.wanted, default)


class RecordBrowser:
    """Read records for people."""

    def __init__(self, router: Router, decoded: DecodedBatchBudget, answers: AnswerMemory, *, timeout_ms: int) -> None:
        self._router = router
        self._decoded = decoded
        self._answers = answers
        self._timeout_ms = timeout_ms

    async def browse(self, given: contract.RecordsQuery, principal: Principal) -> contract.RecordsAnswer | HttpResponse:
        """Return records of a topic, or a file with them.

        Raises:
            OverloadedError: the calls in progress use all memory for decoded batches, or other answers that for them.
        """
        room = AnswerRoom(self._answers, principal)
        return await self._find(given, lambda found: _make_answer(given, found, room))

    async def read(self, given: contract.RecordsQuery) -> contract.RecordsAnswer:
        """Return records of a topic for the node itself; raises as `browse` does."""
        return await self._find(given, _make_records)

    async def _find(self, given: contract.RecordsQuery, make_answer: Callable[[FoundRecords], T]) -> T:
        if sum(one is not None for one in (given.from_, given.offset, given.time_ms)) > 1:
            raise RequestError("give at most one of from, offset and time_ms")
        if given.offset is not None and given.partition_id is None:
            raise RequestError("an offset needs a partition_id: offsets of different partitions have nothing in common")
        deadline = self._router.deadline(self._timeout_ms)
        info = await self._router.find_topic(given.topic, deadline=deadline, age_ms_max=0)
        numbers = range(len(info.partitions)) if given.partition_id is None else (given.partition_id,)
        if given.partition_id is not None and given.partition_id >= len(info.partitions):
            message = f"topic {given.topic!r} has no partition {given.partition_id}"
            raise NotFoundError(message, code="unknown_partition")
        wanted = given.max or contract.RECORDS_DEFAULT
        found = FoundRecords(wanted, is_newest=_is_newest(given))
        matches = make_matcher(given.key, given.search)
        with self._decoded.reserve(STEP_BYTES) as memory:
            call = _Call(given, info, wanted, matches, deadline, found, memory)
            # A partition at a time: what is decoded at once stays small, and leaders are asked one after the other.
            for one in numbers:
                found.add(await self._read(call, PartitionId(one)))
            return make_answer(found)

    async def _read(self, call: _Call, partition_id: PartitionId) -> PartitionRecords:
        try:
            return await self._scan(call, partition_id)
        except (UnavailableError, TrimmedError) as error:
            if call.given.partition_id is not None:
                raise
            shown = contract.RecordRangeItem(
                partition_id=partition_id, first_offset=0, end_offset=0, start=0, next_offset=0, error=error.message
            )
            return PartitionRecords(shown, [], 0)

    async def _scan(self, call: _Call, partition_id: PartitionId) -> PartitionRecords:
        given = call.given
        if given.offset is not None:
            return await self._scan_offset(call, partition_id, Offset(given.offset))
        first, end = await self._find_bounds(call, partition_id)
        if _is_newest(given):
            return await self._scan_newest(call, partition_id, first, end)
        start = first if given.time_ms is None else await self._find_offset(call, partition_id, given.time_ms)
        scan = _begin(call, start, end)
        await self._feed(call, partition_id, scan, SCANNED_BYTES_MAX)
        return _result(partition_id, scan, first, end)

    async def _scan_offset(self, call: _Call, partition_id: PartitionId, offset: Offset) -> PartitionRecords:
        """Scan from an offset: the answer with the first records has the bounds, so that following asks once a turn.

        An offset beyond the end is the end.
        """
        try:
            fetched, payload = await self._fetch(call, partition_id, offset)
        except OutOfRangeError:
            first, end = await self._find_bounds(call, partition_id)
            return _result(partition_id, _begin(call, end, end), first, end)
        scan = _begin(call, offset, fetched.end_offset)
        await self._feed(call, partition_id, scan, SCANNED_BYTES_MAX, payload=payload)
        return _result(partition_id, scan, fetched.first_offset, fetched.end_offset)

    async def _scan_newest(
        self, call: _Call, partition_id: PartitionId, first: Offset, end: Offset
    ) -> PartitionRecords:
        """Read ranges from the end backwards, until there are enough records or bytes."""
        count = call.scan_max if call.matches else call.wanted
        newest = NewestScan(Offset(max(first, end - count)), end, call.wanted, call.matches)
        while not newest.is_done:
            scan = newest.begin_range()
            decoded = await self._feed(call, partition_id, scan, newest.range_bytes_max, held_bytes=newest.size_bytes)
            newest.end_range(scan, decoded)
        shown = contract.RecordRangeItem(
            partition_id=partition_id, first_offset=first, end_offset=end, start=newest.start, next_offset=end
        )
        return PartitionRecords(shown, newest.records, end - newest.lowest)

    # -- reading ---------------------------------------------------------------------------------

    async def _feed(
        self,
        call: _Call,
        partition_id: PartitionId,
        scan: PartitionScan,
        bytes_max: int,
        *,
        payload: memoryview | None = None,
        held_bytes: int = 0,
    ) -> int:
        """Read batches for a scan, up to so many bytes once decoded but at least one; return how many it were.

        `payload` has the first ones, if they are there; `held_bytes` are kept of this partition beside those of the
        scan.
        """
        total, turn_bytes = 0, 0
        while not scan.is_done and total < bytes_max:
            held = call.found.size_bytes + held_bytes + scan.kept.size_bytes
            if payload is None:
                call.memory.resize(held + STEP_BYTES)
                _, payload = await self._fetch(call, partition_id, scan.position)
            if not payload:
                break
            for batch in _decode(payload, partition_id):
                if scan.is_done:
                    break
                if batch.header.end_offset <= scan.position:
                    continue
                size_bytes = decoded_bytes(batch)
                if total and total + size_bytes > bytes_max:
                    return total
                held = call.found.size_bytes + held_bytes + scan.kept.size_bytes
                call.memory.resize(held + len(payload) + size_bytes)
                scan.accept(batch)
                total += size_bytes
                turn_bytes += size_bytes
                if turn_bytes >= STEP_BYTES:
                    turn_bytes = 0
                    await asyncio.sleep(0)
            payload = None
        return total

    async def _find_bounds(self, call: _Call, partition_id: PartitionId) -> tuple[Offset, Offset]:
        first = await self._find_offset(call, partition_id, "earliest")
        return first, await self._find_offset(call, partition_id, "latest")

    async def _find_offset(
        self, call: _Call, partition_id: PartitionId, at: Literal["earliest", "latest"] | int
    ) -> Offset:
        found, _ = await self._router.ask_leader(
            call.info.topic,
            partition_id,
            lambda now: FindOffset(topic_id=now.topic_id, partition_id=partition_id, at=at),
            deadline=call.deadline,
        )
        return found.offset

    async def _fetch(self, call: _Call, partition_id: PartitionId, offset: Offset) -> tuple[Fetched, memoryview]:
        return await self._router.ask_leader(
            call.info.topic,
            partition_id,
            lambda now: Fetch(topic_id=now.topic_id, partition_id=partition_id, offset=offset, bytes_max=STEP_BYTES),
            deadline=call.deadline,
        )


def _is_newest(given: contract.RecordsQuery) -> bool:
    """Return whether the last records are wanted, not the first ones from somewhere on."""
    return given.offset is None and given.time_ms is None and given.from_ != "earliest"


def _begin(call: _Call, start: Offset, end: Offset) -> PartitionScan:
    kept = KeptRecords(call.wanted, ANSWER_BYTES_MAX, keeps_last=False)
    return PartitionScan(start, min(end, Offset(start + call.scan_max)), kept, call.matches)


def _result(partition_id: PartitionId, scan: PartitionScan, first: Offset, end: Offset) -> PartitionRecords:
    shown = contract.RecordRangeItem(
        partition_id=partition_id, first_offset=first, end_offset=end, start=scan.start, next_offset=scan.position
    )
    return PartitionRecords(shown, list(scan.kept.records), scan.position - scan.start)


def _decode(payload: memoryview, partition_id: PartitionId) -> Iterator[Batch]:
    """Yield the batches of an answer one by one: none is kept."""
    try:
        yield from (batch for batch in decode_batches(payload) if not batch.header.is_control)
    except DecodeError as error:
        raise _damaged(partition_id, error) from error


def _damaged(partition_id: PartitionId, error: DecodeError) -> UnavailableError:
    return UnavailableError(
        f"not read: the answer of partition {partition_id} is damaged: {error}; retry", code="damaged"
    )


def _make_answer(
    given: contract.RecordsQuery, found: FoundRecords, room: AnswerRoom
) -> contract.RecordsAnswer | HttpResponse:
    chosen, file_format = found.choose(), given.format or "json"
    is_small, is_file = found.size_bytes <= SMALL_BYTES, file_format != "json"
    if not is_small:
        room.reserve_nowait(room_bytes(file_format, chosen, found.size_bytes) if is_file else found.size_bytes)
    if is_file:
        return make_file(given.topic, file_format, chosen, room)
    if is_small:
        return _make_records(found)
    items = [Item(partial(MessageItem, partition_id=at), one) for at, one in chosen]
    return respond_with_list(partial(_describe, found), items, room, found.size_bytes)


def _make_records(found: FoundRecords) -> contract.RecordsAnswer:
    return _describe(found, [MessageItem(partition_id=at, **record_fields(one)) for at, one in found.choose()])


def _describe(found: FoundRecords, records: list[MessageItem]) -> contract.RecordsAnswer:
    return contract.RecordsAnswer(
        records=records,
        partitions=[one.range for one in found.partitions],
        scanned=sum(one.scanned for one in found.partitions),
    )

"""Read and consume records of partitions for one consumer, through the partitions' leaders.

`PartitionReader` sends the requests of one HTTP call. A consume moves the cursor in the replicated step that reads, so
an answer that is lost afterwards has the outcome *unknown*. Memory is therefore reserved before a cursor moves: a
leader does nothing if the records need more than it was told that there is room for, but says how much they need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quiver.errors import DecodeError, OutcomeUnknownError, OverloadedError, QuiverError
from quiver.gateway.registrations import TopicAccess
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.record import Record
from quiver.record.decoded import (
    DecodedBatchBudget,
    DecodedBatchCache,
    Reservation,
    decode_batches_cached,
    record_bytes,
)
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.answer_room import AnswerRoom
from quiver.wire.messages import (
    Consume,
    Consumed,
    Fetch,
    GetCursors,
)

BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Approximate limit of record bytes in one answer; a single larger record is returned whole."""
RECORD_BYTES_ESTIMATE = 1024
"""Estimated record size, from which the first read's byte limit follows: batches beyond it would be read in vain."""

RESERVED_BYTES_MIN = 256 * 1024
"""What a request reserves at least: the batch of a single record is decoded whole."""

BatchCache = DecodedBatchCache[tuple[tuple[TopicId, PartitionId], bytes]]
WAIT_SHARE = 0.8
"""Share of a call's remaining time for which it waits for memory; the rest is for the leader."""
ConsumedRecords = list[tuple[PartitionId, Record]]


REFUSED_WAIT_MS = 100
"""Least time between two looks for a record, if the leader does not wait for it."""


class PartitionReader:
    """Send the requests of one consumer's call to partition leaders."""

    def __init__(
        self,
        router: Router,
        batch_cache: BatchCache,
        decoded: DecodedBatchBudget,
        access: TopicAccess,
        consumer_id: ConsumerId,
        deadline: Deadline,
        room: AnswerRoom,
    ) -> None:
        """Read for one call; `room` counts the records that it has read so far."""
        self.access = access
        self.consumer_id = consumer_id
        self._router = router
        self._batch_cache = batch_cache
        self._decoded = decoded
        self._topic = access.topic.name
        self._deadline = deadline
        self._room = room
        self._records_bytes = 0
        self._cursors: dict[PartitionId, Offset] = {}
        """The consumer's cursors, by partition, as of the last answer."""

    async def consume(self, partition_id: PartitionId, count: int, *, offset: int | None = None) -> ConsumedRecords:
        """Consume up to `count` records of a partition, from the cursor or from an offset.

        Waits, within the call's deadline, while the requests in progress use all memory for decoded batches, or other
        answers that for answers. If the call has records already, it does not wait: the others come with the next one.

        Raises:
            OverloadedError: not done; there was no memory until the deadline.
        """
        bytes_max = 1 if count == 1 else min(BATCH_BYTES_MAX, count * RECORD_BYTES_ESTIMATE)
        records, consumed = await self._request(partition_id, count, offset=offset, bytes_max=bytes_max)
        if records and len(records) < count and consumed.cursor < consumed.end_offset and bytes_max < BATCH_BYTES_MAX:
            # The records are larger than the estimate: read once more with the full limit.
            left, cursor = count - len(records), None if offset is None else consumed.cursor
            more, _ = await self._request(partition_id, left, offset=cursor, bytes_max=BATCH_BYTES_MAX)
            records += more
        return records

    @property
    def _is_full(self) -> bool:
        """Whether the call has enough records for one answer, or others need the memory."""
        return self._records_bytes >= BATCH_BYTES_MAX or (self._records_bytes > 0 and self._room.is_memory_tight)

    async def _request(
        self, partition_id: PartitionId, count: int, *, offset: int | None, bytes_max: int
    ) -> tuple[ConsumedRecords, Consumed]:
        """Send a request, and again with more room if the leader says that its first batch needs more."""
        large_bytes = 0
        if self._room.is_memory_tight and not self._records_bytes:
            await self._room.reserve(RESERVED_BYTES_MIN, timeout_s=self._wait_s)
        while True:
            with await self._reserve(max(bytes_max, RESERVED_BYTES_MIN, large_bytes)):
                room_bytes = max(BATCH_BYTES_MAX, large_bytes)
                consumed, payload = await self._ask(
                    partition_id, count, offset=offset, bytes_max=bytes_max, room_bytes=room_bytes
                )
                if not consumed.large_bytes:
                    return self._decode(partition_id, payload, consumed), consumed
            if self._records_bytes:
                return [], consumed
            large_bytes = consumed.large_bytes
            await self._room.reserve_large(large_bytes, timeout_s=self._wait_s)

    @property
    def _wait_s(self) -> float:
        return self._deadline.remaining_ms / 1000 * WAIT_SHARE

    async def _reserve(self, size_bytes: int) -> Reservation:
        """Reserve memory before the cursor moves: afterwards a refusal would lose records."""
        retry = self._router.retry(self._deadline, is_read=True)
        while True:
            try:
                return self._decoded.reserve(size_bytes)
            except OverloadedError as error:
                await retry.wait_turn(error)

    async def _ask(
        self, partition_id: PartitionId, count: int, *, offset: int | None, bytes_max: int, room_bytes: int
    ) -> tuple[Consumed, memoryview]:
        return await self._router.ask_leader(
            self._topic,
            partition_id,
            lambda info: Consume(
                topic_id=info.topic_id,
                partition_id=partition_id,
                consumer_id=self.consumer_id,
                offset=None if offset is None else Offset(offset),
                records_max=count,
                bytes_max=bytes_max,
                decoded_bytes_max=room_bytes,
            ),
            deadline=self._deadline,
        )

    def _decode(self, partition_id: PartitionId, payload: memoryview, consumed: Consumed) -> ConsumedRecords:
        self._cursors[partition_id] = consumed.cursor
        try:
            partition = (self.access.topic.topic_id, partition_id)
            batches = decode_batches_cached(payload, self._batch_cache, partition=partition)
            first_offset, end_offset = consumed.first_offset, consumed.cursor
            found = [(partition_id, one) for batch in batches for one in batch.records(first_offset, end_offset)]
        except DecodeError as error:
            # Not the client's mistake, and the cursor has moved already: the outcome is unknown.
            message = f"unknown: the answer of partition {partition_id} is damaged: {error}"
            raise OutcomeUnknownError(message, code="damaged") from error
        self._records_bytes += sum(record_bytes(record) for _, record in found)
        self._room.count(self._records_bytes)
        return found

    async def consume_from_any(
        self, order: Sequence[PartitionId], count: int, *, offset: int | None = None
    ) -> ConsumedRecords:
        """Consume up to `count` records, partition by partition.

        An unavailable partition is skipped as long as another one has records.
        """
        records: ConsumedRecords = []
        failure: QuiverError | None = None
        for partition_id in order:
            try:
                records += await self.consume(partition_id, count - len(records), offset=offset)
            except QuiverError as error:
                failure = failure or error
                if error.outcome == "unknown":
                    break  # its records may be consumed but never returned: the client must learn of that
            if len(records) >= count or self._is_full:
                break
        if not records and failure is not None:
            raise failure
        return records

    async def wait_for_any(self, partitions: Sequence[PartitionId], wait_ms: int) -> None:
        """Wait until one of the empty partitions may have a record, or `wait_ms` is over."""
        woken = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(self._watch(one, wait_ms, woken)) for one in partitions]
            await woken.wait()
            for watch in watches:
                watch.cancel()

    async def _watch(self, partition_id: PartitionId, wait_ms: int, woken: asyncio.Event) -> None:
        offset, loop = self._cursors[partition_id], asyncio.get_running_loop()
        begun = loop.time()
        try:
            found, _ = await self._router.ask_leader(
                self._topic,
                partition_id,
                lambda info: Fetch(
                    topic_id=info.topic_id,
                    partition_id=partition_id,
                    offset=offset,
                    bytes_max=0,
                    wait_ms=wait_ms,
                ),
                deadline=self._deadline,
                wait_ms=wait_ms,
            )
            has_record = found.end_offset > offset
        except QuiverError:
            has_record = False  # the consume that follows reports the error
        # A leader that refuses to wait, because too many others do, must not make the caller ask at full speed.
        pause_s = min(wait_ms, REFUSED_WAIT_MS) / 1000 - (loop.time() - begun)
        if not has_record and pause_s > 0:
            await asyncio.sleep(pause_s)
        woken.set()

    async def size(self, partition_id: PartitionId) -> int:
        """Return how many records of a partition the consumer has not consumed yet."""
        found, _ = await self._router.ask_leader(
            self._topic,
            partition_id,
            lambda info: GetCursors(
                topic_id=info.topic_id,
                partition_id=partition_id,
                consumer_ids=(self.consumer_id,),
            ),
            deadline=self._deadline,
        )
        return max(0, found.end_offset - max(found.cursors[0], found.first_offset))

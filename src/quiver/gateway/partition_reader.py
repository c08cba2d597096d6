"""Read and consume records of partitions for one consumer, through the partitions' leaders.

`PartitionReader` sends the requests of one HTTP call. A consume moves the cursor in the replicated step that reads, so
an answer that is lost afterwards has the outcome *unknown*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quiver.errors import DecodeError, OutcomeUnknownError, OverloadedError, QuiverError
from quiver.gateway.registrations import TopicAccess
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.record import Record
from quiver.record.decoded import DecodedBatchBudget, DecodedBatchCache, Reservation, decode_batches_cached
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
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
    ) -> None:
        self.access = access
        self.consumer_id = consumer_id
        self._router = router
        self._batch_cache = batch_cache
        self._decoded = decoded
        self._topic = access.topic.name
        self._deadline = deadline
        self._cursors: dict[PartitionId, Offset] = {}
        """The consumer's cursors, by partition, as of the last answer."""

    async def consume(self, partition_id: PartitionId, count: int, *, offset: int | None = None) -> ConsumedRecords:
        """Consume up to `count` records of a partition, from the cursor or from an offset.

        Waits, within the call's deadline, while the requests in progress use all memory for decoded batches.

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

    async def _request(
        self, partition_id: PartitionId, count: int, *, offset: int | None, bytes_max: int
    ) -> tuple[ConsumedRecords, Consumed]:
        reserved = await self._reserve(max(bytes_max, RESERVED_BYTES_MIN))
        with reserved:
            return await self._consume(partition_id, count, offset=offset, bytes_max=bytes_max)

    async def _reserve(self, size_bytes: int) -> Reservation:
        """Reserve memory before the cursor moves: afterwards a refusal would lose records."""
        retry = self._router.retry(self._deadline, is_read=True)
        while True:
            try:
                return self._decoded.reserve(size_bytes)
            except OverloadedError as error:
                await retry.wait_turn(error)

    async def _consume(
        self, partition_id: PartitionId, count: int, *, offset: int | None, bytes_max: int
    ) -> tuple[ConsumedRecords, Consumed]:
        consumed, payload = await self._router.ask_leader(
            self._topic,
            partition_id,
            lambda info: Consume(
                topic_id=info.topic_id,
                partition_id=partition_id,
                consumer_id=self.consumer_id,
                offset=None if offset is None else Offset(offset),
                records_max=count,
                bytes_max=bytes_max,
            ),
            deadline=self._deadline,
        )
        self._cursors[partition_id] = consumed.cursor
        return self._decode(partition_id, payload, consumed), consumed

    def _decode(self, partition_id: PartitionId, payload: memoryview, consumed: Consumed) -> ConsumedRecords:
        try:
            partition = (self.access.topic.topic_id, partition_id)
            batches = decode_batches_cached(payload, self._batch_cache, partition=partition)
            first_offset, end_offset = consumed.first_offset, consumed.cursor
            return [(partition_id, one) for batch in batches for one in batch.records(first_offset, end_offset)]
        except DecodeError as error:
            # Not the client's mistake, and the cursor has moved already: the outcome is unknown.
            message = f"unknown: the answer of partition {partition_id} is damaged: {error}"
            raise OutcomeUnknownError(message, code="damaged") from error

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
            if len(records) >= count:
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

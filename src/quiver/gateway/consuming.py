"""The calls of consumers.

A consumer's cursor is in the partition's own log and is moved in the step that reads. Without a partition, partitions
take turns; which one is next is remembered here as long as there is room, and is no promise. Plain calls for the next
message are the hot ones: they take no task, and are answered together (`taking`). A long poll over several partitions
watches all of them without moving anything, and takes from the first that gets something.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from quiver.clock import Clock, Rng
from quiver.config import GatewaySettings
from quiver.errors import DecodeError, NotAllowedError, NotFoundError, OutcomeUnknownError, QuiverError, RequestError
from quiver.gateway import contract
from quiver.gateway.consume_coalescer import Call, ConsumeCoalescer
from quiver.gateway.fanout import ask_all
from quiver.gateway.http import HttpResponse
from quiver.gateway.messages import show_record
from quiver.gateway.metrics import Metrics
from quiver.gateway.producing import Hear
from quiver.gateway.registrations import Allowed, Registrations
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.record import Record
from quiver.record.batch_cache import DecodedBatchCache, decode_batches_cached
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import (
    Consume,
    Consumed,
    Fetch,
    GetCursors,
    MoveCursor,
    RegisterConsumerRequest,
    Selection,
)

NOTHING = HttpResponse(status=204)
_encode = msgspec.json.Encoder().encode
BATCH_DEFAULT = 100
BATCH_BYTES_MAX = 4 * 1024 * 1024
"""About how many bytes of records one call takes; a record that is larger comes whole."""
RECORD_BYTES_GUESSED = 1024
"""By which a leader is told how far to look at first: it reads whole batches, and those that are too many in vain."""
TURNS_MAX = 100_000
"""How many consumers' turns are remembered; one that is forgotten begins at its first partition."""

CACHED_BYTES_MAX = 32 * 1024 * 1024
"""Limit of the cache of decoded batches."""

Taken = list[tuple[PartitionId, Record]]
BatchCache = DecodedBatchCache[tuple[tuple[TopicId, PartitionId], bytes]]


class ConsumerCalls:
    """Carry out the calls of consumers."""

    def __init__(
        self,
        router: Router,
        registrations: Registrations,
        metrics: Metrics,
        *,
        clock: Clock,
        rng: Rng,
        hear: Hear,
        settings: GatewaySettings,
    ) -> None:
        self._router = router
        self._registrations = registrations
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._hear = hear
        self._settings = settings
        self._turns: dict[tuple[int, TopicId], PartitionId] = {}
        """Which partition gave something last."""
        self._batches: BatchCache = DecodedBatchCache(bytes_max=CACHED_BYTES_MAX)
        self._taking = ConsumeCoalescer(router, self._show, nothing=NOTHING)

    async def close(self) -> None:
        """End what is under way; idempotent."""
        await self._taking.close()

    # -- register --------------------------------------------------------------------------------

    async def register(self, given: contract.RegisterConsumerBody) -> contract.ConsumerRegisteredAnswer:
        """Register a consumer; one that begins at the end has its cursors set there before it is told its id."""
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        partitions = () if given.partition_id is None else (PartitionId(given.partition_id),)
        request = RegisterConsumerRequest(
            topics=(Selection(topic=given.topic, partitions=partitions),),
            consumer_id=None if given.consumer_id is None else ConsumerId(given.consumer_id),
            start=given.from_ or "earliest",
            request_id=f"http-{self._rng.randrange(1 << 62):016x}",
        )
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.see(registered.index)
        if given.from_ == "latest":
            await self._begin_at_end(given, registered.consumer_id, deadline)
        return contract.ConsumerRegisteredAnswer(consumer_id=registered.consumer_id)

    async def _begin_at_end(
        self, given: contract.RegisterConsumerBody, consumer_id: ConsumerId, deadline: Deadline
    ) -> None:
        topic = await self._router.find_topic(given.topic, deadline=deadline)
        numbers = range(len(topic.partitions)) if given.partition_id is None else (given.partition_id,)

        async def begin(partition_id: PartitionId) -> None:
            await self._router.ask_leader(
                given.topic,
                partition_id,
                lambda info: MoveCursor(
                    topic_id=info.topic_id,
                    partition_id=partition_id,
                    cursors=((consumer_id, "latest"),),
                    only_new=True,
                ),
                deadline=deadline,
            )

        await ask_all(begin(PartitionId(number)) for number in numbers)

    # -- consume ---------------------------------------------------------------------------------

    def consume(
        self, given: contract.ConsumeBody
    ) -> asyncio.Future[HttpResponse] | Coroutine[Any, Any, contract.ConsumedAnswer | HttpResponse]:
        """Take a consumer's next message."""
        if given.offset is not None or given.wait_ms:
            return self._consume(given)
        try:
            allowed = self._registrations.consumer_nowait(given.consumer_id, given.topic)
        except (NotFoundError, NotAllowedError):
            return self._consume_next(given)  # it may have registered with another node
        return self._take_next(given, allowed)

    async def _consume(self, given: contract.ConsumeBody) -> contract.ConsumedAnswer | HttpResponse:
        """Take a message from an offset on, or wait for one."""
        taken = await self._take(given, count=1)
        if not taken:
            return NOTHING
        partition_id, record = taken[0]
        return contract.ConsumedAnswer(partition_id=partition_id, **show_record(record))

    async def _consume_next(self, given: contract.ConsumeBody) -> HttpResponse:
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        return await self._take_next(given, await self._allowed(given, deadline))

    def _take_next(self, given: contract.ConsumeBody, allowed: Allowed) -> asyncio.Future[HttpResponse]:
        partitions = allowed.choose(given.partition_id)
        self._hear("consumer", given.consumer_id)
        order = self._order((given.consumer_id, allowed.topic.topic_id), partitions)
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        return self._taking.take(allowed.topic, given.consumer_id, order, deadline=deadline)

    def _show(self, call: Call, partition_id: PartitionId, record: Record) -> HttpResponse:
        """Return the response of a call that got a record."""
        self._remember((call.consumer_id, call.topic.topic_id), partition_id)
        self._metrics.count_consumed(records=1, size_bytes=len(record.value or b""))
        return HttpResponse(
            status=200, body=_encode(contract.ConsumedAnswer(partition_id=partition_id, **show_record(record)))
        )

    async def consume_batch(self, given: contract.ConsumeBatch) -> contract.BatchConsumed | HttpResponse:
        """Take a consumer's next messages."""
        taken = await self._take(given, count=given.max or BATCH_DEFAULT)
        if not taken:
            return NOTHING
        messages = [
            contract.Message(partition_id=partition_id, **show_record(record)) for partition_id, record in taken
        ]
        return contract.BatchConsumed(messages=messages)

    async def _take(self, given: contract.ConsumeBody, *, count: int) -> Taken:
        if given.offset is not None and given.partition_id is None:
            raise RequestError("not done: an offset is per partition: give partition_id, too")
        wait_ms = min(given.wait_ms or 0, self._settings.wait_ms_max)
        deadline = self._router.deadline(self._settings.request_timeout_ms + wait_ms)
        allowed = await self._allowed(given, deadline)
        partitions = allowed.choose(given.partition_id)
        reading = self._read(allowed, given.consumer_id, deadline)
        self._hear("consumer", given.consumer_id)
        if len(partitions) == 1:
            taken = await reading.take(partitions[0], count, offset=given.offset, wait_ms=wait_ms)
        else:
            taken = await self._take_turns(reading, partitions, count, wait_ms=wait_ms)
        size_bytes = sum(len(record.value or b"") for _, record in taken)
        self._metrics.count_consumed(records=len(taken), size_bytes=size_bytes)
        return taken

    async def _take_turns(
        self, reading: _Reading, partitions: Sequence[PartitionId], count: int, *, wait_ms: int
    ) -> Taken:
        until_ms = self._clock.monotonic_ms() + wait_ms
        key = (reading.consumer_id, reading.allowed.topic.topic_id)
        while True:
            taken = await reading.take_from_any(self._order(key, partitions), count)
            if taken:
                self._remember(key, taken[-1][0])
                return taken
            left_ms = until_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                return []
            await reading.wait_for_any(partitions, left_ms)

    def _order(self, key: tuple[int, TopicId], partitions: Sequence[PartitionId]) -> Sequence[PartitionId]:
        """Return the partitions from the one on whose turn it is."""
        if len(partitions) == 1:
            return partitions
        turn = bisect_right(partitions, self._turns.get(key, -1))
        return (*partitions[turn:], *partitions[:turn])

    def _remember(self, key: tuple[int, TopicId], partition_id: PartitionId) -> None:
        self._turns.pop(key, None)
        self._turns[key] = partition_id
        if len(self._turns) > TURNS_MAX:
            del self._turns[next(iter(self._turns))]

    def _read(self, allowed: Allowed, consumer_id: int, deadline: Deadline) -> _Reading:
        return _Reading(self._router, self._batches, allowed, ConsumerId(consumer_id), deadline)

    async def _allowed(self, given: contract.ConsumeBody | contract.GetSize, deadline: Deadline) -> Allowed:
        return await self._registrations.consumer(given.consumer_id, given.topic, deadline=deadline)

    # -- size ------------------------------------------------------------------------------------

    async def get_size(self, given: contract.GetSize) -> contract.Size:
        """Count what a consumer has left: the sum over partitions, each as its leader knows it now."""
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        allowed = await self._allowed(given, deadline)
        reading = self._read(allowed, given.consumer_id, deadline)
        self._hear("consumer", given.consumer_id)
        return contract.Size(size=sum(await ask_all(reading.size(one) for one in allowed.choose(given.partition_id))))


class _Reading:
    """One call of one consumer: what it asks of partitions' leaders."""

    def __init__(
        self,
        router: Router,
        batches: BatchCache,
        allowed: Allowed,
        consumer_id: ConsumerId,
        deadline: Deadline,
    ) -> None:
        self.allowed = allowed
        self.consumer_id = consumer_id
        self._router = router
        self._batches = batches
        self._topic = allowed.topic.name
        self._deadline = deadline
        self._cursors: dict[PartitionId, Offset] = {}
        """Where the consumer was in partitions that had nothing for it."""

    async def take(
        self, partition_id: PartitionId, count: int, *, offset: int | None = None, wait_ms: int = 0
    ) -> Taken:
        """Take up to so many records of a partition; from the cursor on, or from an offset."""
        bytes_max = 1 if count == 1 else min(BATCH_BYTES_MAX, count * RECORD_BYTES_GUESSED)
        taken, consumed = await self._take(partition_id, count, offset=offset, bytes_max=bytes_max, wait_ms=wait_ms)
        if taken and len(taken) < count and consumed.cursor < consumed.end_offset and bytes_max < BATCH_BYTES_MAX:
            # They are larger than was guessed.
            left, cursor = count - len(taken), None if offset is None else consumed.cursor
            more, _ = await self._take(partition_id, left, offset=cursor, bytes_max=BATCH_BYTES_MAX)
            taken += more
        return taken

    async def _take(
        self, partition_id: PartitionId, count: int, *, offset: int | None, bytes_max: int, wait_ms: int = 0
    ) -> tuple[Taken, Consumed]:
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
                wait_ms=wait_ms,
            ),
            deadline=self._deadline,
            wait_ms=wait_ms,
        )
        self._cursors[partition_id] = consumed.cursor
        return self._decode(partition_id, payload, consumed), consumed

    def _decode(self, partition_id: PartitionId, payload: memoryview, consumed: Consumed) -> Taken:
        try:
            partition = (self.allowed.topic.topic_id, partition_id)
            batches = decode_batches_cached(payload, self._batches, partition=partition)
            records = (batch.records(consumed.first_offset, consumed.cursor) for batch in batches)
            return [(partition_id, record) for some in records for record in some]
        except DecodeError as error:
            # Not the client's mistake; and its cursor has moved.
            message = f"perhaps done: what partition {partition_id} sent is damaged: {error}"
            raise OutcomeUnknownError(message, code="damaged") from error

    async def take_from_any(self, order: Sequence[PartitionId], count: int) -> Taken:
        """Take up to so many records, partition by partition.

        A partition that cannot be asked is passed over as long as another has something.
        """
        taken: Taken = []
        failure: QuiverError | None = None
        for partition_id in order:
            try:
                taken += await self.take(partition_id, count - len(taken))
            except QuiverError as error:
                failure = failure or error
                if error.outcome == "unknown":
                    break  # its records may be lost to the client, who must learn of it
            if len(taken) >= count:
                break
        if not taken and failure is not None:
            raise failure
        return taken

    async def wait_for_any(self, partitions: Sequence[PartitionId], wait_ms: int) -> None:
        """Wait until one of the partitions that had nothing may have something, or time is over."""
        woken = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(self._watch(one, wait_ms, woken)) for one in partitions]
            await woken.wait()
            for watch in watches:
                watch.cancel()

    async def _watch(self, partition_id: PartitionId, wait_ms: int, woken: asyncio.Event) -> None:
        offset = self._cursors[partition_id]
        try:
            await self._router.ask_leader(
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
        except QuiverError:
            pass  # taking will say what is wrong
        finally:
            woken.set()

    async def size(self, partition_id: PartitionId) -> int:
        """Return how many records of a partition the consumer has left."""
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

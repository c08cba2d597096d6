"""Handlers of the consumer routes.

A consumer's cursor is in the partition's own log and moves in the replicated step that reads. Without a partition in
the call, partitions are consumed round robin; the gateway remembers the last one in a bounded cache and promises no
order. Plain calls for the next message are the hot path: they create no task and are coalesced (`consume_coalescer`). A
long poll over several partitions watches all of them without moving a cursor, and consumes from the first that gets a
record.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from quiver.clock import Clock, Rng
from quiver.config import GatewaySettings
from quiver.errors import NotAllowedError, NotFoundError, RequestError
from quiver.gateway import contract
from quiver.gateway.codec import record_fields
from quiver.gateway.consume_coalescer import ConsumeCoalescer, PendingConsume
from quiver.gateway.http import HttpResponse
from quiver.gateway.metrics import Metrics
from quiver.gateway.partition_reader import BatchCache, ConsumedRecords, PartitionReader
from quiver.gateway.produce_handlers import OnClientSeen
from quiver.gateway.record_answers import SMALL_BYTES, Item, respond_with_list, respond_with_one
from quiver.gateway.registrations import Registrations, TopicAccess
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.record import Record
from quiver.record.decoded import DecodedBatchBudget, DecodedBatchCache, record_bytes
from quiver.routing.retry import Deadline
from quiver.routing.router import Router, gather_or_raise
from quiver.security import ANONYMOUS, Principal
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom
from quiver.wire.messages import (
    MoveCursor,
    RegisterConsumerRequest,
    Selection,
)

NOTHING = HttpResponse(status=204)
_encode = msgspec.json.Encoder().encode
BATCH_DEFAULT = 100
CACHED_BYTES_MAX = 32 * 1024 * 1024
"""Limit of the cache of decoded batches."""
LAST_PARTITIONS_MAX = 100_000
"""Consumers whose last partition is remembered; an evicted one starts again at its first partition."""


class ConsumeHandlers:
    """Handle the calls of consumers."""

    def __init__(
        self,
        router: Router,
        registrations: Registrations,
        metrics: Metrics,
        *,
        clock: Clock,
        rng: Rng,
        on_client_seen: OnClientSeen,
        settings: GatewaySettings,
        decoded: DecodedBatchBudget,
        answers: AnswerMemory,
    ) -> None:
        self._router = router
        self._registrations = registrations
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._on_client_seen = on_client_seen
        self._settings = settings
        self._last_partitions: dict[tuple[int, TopicId], PartitionId] = {}
        """By consumer and topic, the partition that returned a record last."""
        self._decoded = decoded
        self._batch_cache: BatchCache = DecodedBatchCache(bytes_max=CACHED_BYTES_MAX, budget=decoded)
        self._answers = answers
        self._coalescer = ConsumeCoalescer(router, self._respond, answers, nothing=NOTHING)

    async def close(self) -> None:
        """End all pending calls; idempotent."""
        await self._coalescer.close()

    # -- register --------------------------------------------------------------------------------

    async def register(
        self, given: contract.RegisterConsumerBody, on_behalf_of: str
    ) -> contract.ConsumerRegisteredAnswer:
        """Register a consumer, or find that of a group; with `from=latest` new cursors are set before it returns."""
        if given.group is not None and given.consumer_id is not None:
            raise RequestError("not done: give group or consumer_id, not both")
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        partitions = () if given.partition_id is None else (PartitionId(given.partition_id),)
        request = RegisterConsumerRequest(
            topics=(Selection(topic=given.topic, partitions=partitions),),
            consumer_id=None if given.consumer_id is None else ConsumerId(given.consumer_id),
            start=given.from_ or "earliest",
            request_id=given.group or f"http-{self._rng.randrange(1 << 62):016x}",
            on_behalf_of=on_behalf_of,
        )
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.record_index(registered.index)
        if given.from_ == "latest":
            await self._set_cursors_to_end(given, registered.consumer_id, deadline)
        return contract.ConsumerRegisteredAnswer(consumer_id=registered.consumer_id)

    async def _set_cursors_to_end(
        self, given: contract.RegisterConsumerBody, consumer_id: ConsumerId, deadline: Deadline
    ) -> None:
        topic = await self._router.find_topic(given.topic, deadline=deadline)
        numbers = range(len(topic.partitions)) if given.partition_id is None else (given.partition_id,)

        async def set_cursor(partition_id: PartitionId) -> None:
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

        await gather_or_raise(set_cursor(PartitionId(number)) for number in numbers)

    # -- consume ---------------------------------------------------------------------------------

    def consume(
        self, given: contract.ConsumeQuery, principal: Principal
    ) -> asyncio.Future[HttpResponse] | Coroutine[Any, Any, contract.ConsumedAnswer | HttpResponse]:
        """Consume a consumer's next message."""
        if given.offset is not None or given.wait_ms:
            return self._consume_at_or_wait(given, principal)
        try:
            access = self._registrations.consumer_nowait(given.consumer_id, given.topic)
        except (NotFoundError, NotAllowedError):
            return self._consume_after_catch_up(given, principal)  # it may have registered through another node
        return self._consume_next(given, access, principal)

    async def _consume_at_or_wait(
        self, given: contract.ConsumeQuery, principal: Principal
    ) -> contract.ConsumedAnswer | HttpResponse:
        """Consume the message at an offset, or wait for the next one."""
        room = AnswerRoom(self._answers, principal)
        records = await self._consume_records(given, room, count=1)
        if not records:
            return NOTHING
        partition_id, record = records[0]
        if room.held_bytes > SMALL_BYTES:
            return respond_with_one(_consumed_item(partition_id, record), room, room.held_bytes)
        return contract.ConsumedAnswer(partition_id=partition_id, **record_fields(record))

    async def _consume_after_catch_up(self, given: contract.ConsumeQuery, principal: Principal) -> HttpResponse:
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        return await self._consume_next(given, await self._access(given, deadline), principal)

    def _consume_next(
        self, given: contract.ConsumeQuery, access: TopicAccess, principal: Principal
    ) -> asyncio.Future[HttpResponse]:
        partitions = access.partitions if given.partition_id is None else access.choose(given.partition_id)
        self._on_client_seen("consumer", given.consumer_id)
        order = self._order((given.consumer_id, access.topic.topic_id), partitions)
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        return self._coalescer.consume(access.topic, given.consumer_id, order, deadline=deadline, principal=principal)

    def _respond(self, call: PendingConsume, partition_id: PartitionId, record: Record) -> HttpResponse:
        """Return the response of a call that got a record."""
        self._remember((call.consumer_id, call.topic.topic_id), partition_id)
        self._metrics.count_consumed(records=1, size_bytes=len(record.value or b""))
        size_bytes = record_bytes(record)
        if size_bytes > SMALL_BYTES:
            room = AnswerRoom(self._answers, call.principal)
            room.count(size_bytes)
            return respond_with_one(_consumed_item(partition_id, record), room, size_bytes)
        return HttpResponse(
            status=200, body=_encode(contract.ConsumedAnswer(partition_id=partition_id, **record_fields(record)))
        )

    async def consume_batch(
        self, given: contract.ConsumeBatchQuery, principal: Principal
    ) -> contract.BatchConsumedAnswer | HttpResponse:
        """Consume a consumer's next messages."""
        room = AnswerRoom(self._answers, principal)
        records = await self._consume_records(given, room, count=given.max or BATCH_DEFAULT)
        if not records:
            return NOTHING
        if room.held_bytes > SMALL_BYTES:
            items = [_message_item(partition_id, record) for partition_id, record in records]
            return respond_with_list(_make_batch, items, room, room.held_bytes)
        messages = [
            contract.MessageItem(partition_id=partition_id, **record_fields(record)) for partition_id, record in records
        ]
        return contract.BatchConsumedAnswer(messages=messages)

    async def _consume_records(self, given: contract.ConsumeQuery, room: AnswerRoom, *, count: int) -> ConsumedRecords:
        if given.offset is not None and given.partition_id is None:
            raise RequestError("not done: an offset is per partition; give partition_id as well")
        wait_ms = min(given.wait_ms or 0, self._settings.wait_ms_max)
        deadline = self._router.deadline(self._settings.request_timeout_ms + wait_ms)
        access = await self._access(given, deadline)
        partitions = access.choose(given.partition_id)
        reader = self._reader(access, given.consumer_id, deadline, room)
        self._on_client_seen("consumer", given.consumer_id)
        records = await self._consume_round_robin(reader, partitions, count, offset=given.offset, wait_ms=wait_ms)
        size_bytes = sum(len(record.value or b"") for _, record in records)
        self._metrics.count_consumed(records=len(records), size_bytes=size_bytes)
        return records

    async def _consume_round_robin(
        self,
        reader: PartitionReader,
        partitions: Sequence[PartitionId],
        count: int,
        *,
        offset: int | None,
        wait_ms: int,
    ) -> ConsumedRecords:
        """Consume from the partitions in turn; if they are empty, watch them, which holds no memory for batches."""
        until_ms = self._clock.monotonic_ms() + wait_ms
        key = (reader.consumer_id, reader.access.topic.topic_id)
        while True:
            records = await reader.consume_from_any(self._order(key, partitions), count, offset=offset)
            if records:
                self._remember(key, records[-1][0])
                return records
            remaining_ms = until_ms - self._clock.monotonic_ms()
            if remaining_ms <= 0:
                return []
            await reader.wait_for_any(partitions, remaining_ms)

    def _order(self, key: tuple[int, TopicId], partitions: Sequence[PartitionId]) -> Sequence[PartitionId]:
        """Return the partitions, rotated so that the one after the last used comes first."""
        if len(partitions) == 1:
            return partitions
        turn = bisect_right(partitions, self._last_partitions.get(key, -1))
        return (*partitions[turn:], *partitions[:turn])

    def _remember(self, key: tuple[int, TopicId], partition_id: PartitionId) -> None:
        self._last_partitions.pop(key, None)
        self._last_partitions[key] = partition_id
        if len(self._last_partitions) > LAST_PARTITIONS_MAX:
            del self._last_partitions[next(iter(self._last_partitions))]

    def _reader(self, access: TopicAccess, consumer_id: int, deadline: Deadline, room: AnswerRoom) -> PartitionReader:
        return PartitionReader(
            self._router, self._batch_cache, self._decoded, access, ConsumerId(consumer_id), deadline, room
        )

    async def _access(self, given: contract.ConsumeQuery | contract.SizeQuery, deadline: Deadline) -> TopicAccess:
        return await self._registrations.consumer(given.consumer_id, given.topic, deadline=deadline)

    # -- size ------------------------------------------------------------------------------------

    async def get_size(self, given: contract.SizeQuery) -> contract.SizeAnswer:
        """Count a consumer's unread messages: the sum over partitions, each as its leader reports it now."""
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        access = await self._access(given, deadline)
        reader = self._reader(access, given.consumer_id, deadline, AnswerRoom(self._answers, ANONYMOUS))
        self._on_client_seen("consumer", given.consumer_id)
        sizes = await gather_or_raise(reader.size(one) for one in access.choose(given.partition_id))
        return contract.SizeAnswer(size=sum(sizes))


def _consumed_item(partition_id: PartitionId, record: Record) -> Item:
    return Item(partial(contract.ConsumedAnswer, partition_id=partition_id), record)


def _message_item(partition_id: PartitionId, record: Record) -> Item:
    return Item(partial(contract.MessageItem, partition_id=partition_id), record)


def _make_batch(messages: list[contract.MessageItem]) -> contract.BatchConsumedAnswer:
    return contract.BatchConsumedAnswer(messages=messages)

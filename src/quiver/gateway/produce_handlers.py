"""Handlers of the producer routes.

`produce` without a sequence is the hot path: it creates no task and waits only for its batch. With a sequence, a
message is its own batch under the client's producer id, so that a repeated call returns the first call's offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Literal

from quiver.client.batching import StoredHeaders, partition_of
from quiver.client.delivery import Delivery
from quiver.client.producer import ProducerCore
from quiver.clock import Clock
from quiver.errors import FencedError, NotAllowedError, NotFoundError, RequestError
from quiver.gateway import contract
from quiver.gateway.cluster_handlers import GATEWAY_PRODUCER_PREFIX
from quiver.gateway.codec import (
    BatchColumns,
    decode_batch,
    decode_delay,
    decode_headers,
    decode_key,
    decode_value,
    delay_headers,
    error_response,
)
from quiver.gateway.http import HttpResponse
from quiver.gateway.metrics import Metrics
from quiver.gateway.registrations import Registrations, TopicAccess
from quiver.gateway.topic_producers import TopicProducers
from quiver.metadata import TopicRow
from quiver.model import PartitionId, ProducerId
from quiver.record import Batch, build_batch
from quiver.routing.retry import Deadline
from quiver.routing.router import Router, gather_or_raise
from quiver.wire.messages import BeginEpoch, Produce, Produced, RegisterProducerRequest, Selection, TopicInfo

OnClientSeen = Callable[[Literal["producer", "consumer"], int], None]
"""Record that a client is alive."""


class ProduceHandlers:
    """Handle the calls of producers."""

    def __init__(
        self,
        router: Router,
        registrations: Registrations,
        topic_producers: TopicProducers,
        metrics: Metrics,
        *,
        clock: Clock,
        on_client_seen: OnClientSeen,
        timeout_ms: int,
    ) -> None:
        self._router = router
        self._registrations = registrations
        self._topic_producers = topic_producers
        self._metrics = metrics
        self._clock = clock
        self._on_client_seen = on_client_seen
        self._timeout_ms = timeout_ms
        self._loop = asyncio.get_running_loop()
        self._next_turn = count()

    # -- register --------------------------------------------------------------------------------

    async def register(
        self, given: contract.RegisterProducerBody, on_behalf_of: str
    ) -> contract.ProducerRegisteredAnswer:
        """Register a producer; a known name gets its id and next sequences, and its earlier epoch is fenced."""
        if given.prod_name is not None and given.prod_name.startswith(GATEWAY_PRODUCER_PREFIX):
            raise NotAllowedError(f"not done: producer names with the prefix {GATEWAY_PRODUCER_PREFIX} are reserved")
        deadline = self._deadline()
        partitions = () if given.partition_id is None else (PartitionId(given.partition_id),)
        selection = Selection(topic=given.topic, partitions=partitions)
        request = RegisterProducerRequest(topics=(selection,), name=given.prod_name or "", on_behalf_of=on_behalf_of)
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.record_index(registered.index)
        sequences: dict[str, int] = {}
        if registered.epoch > 0:
            sequences = await self._begin_epoch(given, registered.producer_id, registered.epoch, deadline)
        return contract.ProducerRegisteredAnswer(
            producer_id=registered.producer_id, epoch=registered.epoch, sequences=sequences
        )

    async def _begin_epoch(
        self, given: contract.RegisterProducerBody, producer_id: ProducerId, epoch: int, deadline: Deadline
    ) -> dict[str, int]:
        """Start a producer's new epoch in every partition; return the next sequence of each."""
        topic = await self._router.find_topic(given.topic, deadline=deadline)
        numbers = range(len(topic.partitions)) if given.partition_id is None else (given.partition_id,)
        partitions = [PartitionId(number) for number in numbers]

        async def begin(partition_id: PartitionId) -> int:
            begun, _ = await self._router.ask_leader(
                given.topic,
                partition_id,
                lambda info: BeginEpoch(
                    topic_id=info.topic_id,
                    partition_id=partition_id,
                    producer_id=producer_id,
                    epoch=epoch,
                ),
                deadline=deadline,
            )
            return begun.next_sequence

        sequences = await gather_or_raise(begin(partition_id) for partition_id in partitions)
        return {str(partition_id): next_ for partition_id, next_ in zip(partitions, sequences, strict=True)}

    # -- produce ---------------------------------------------------------------------------------

    def produce(
        self, given: contract.ProduceBody
    ) -> asyncio.Future[HttpResponse] | Coroutine[Any, Any, contract.ProducedAnswer | HttpResponse]:
        """Append a message."""
        if given.sequence is not None:
            return self._produce_sequenced(given)
        value = decode_value(given.message, given.message_b64)
        try:
            access = self._registrations.producer_nowait(given.producer_id, given.topic)
        except (NotFoundError, NotAllowedError):
            return self._produce_slowly(given, value)
        producer = self._topic_producers.find(access.topic)
        if producer is None:
            return self._produce_slowly(given, value)
        return self._send(access, producer, given, value)

    async def _produce_slowly(self, given: contract.ProduceBody, value: bytes) -> HttpResponse:
        """Append a message when this node does not know the client yet, or the topic has no open producer here."""
        deadline = self._deadline()
        access = await self._registrations.producer(given.producer_id, given.topic, deadline=deadline)
        producer = await self._topic_producers.open(access.topic, deadline=deadline)
        return await self._send(access, producer, given, value)

    def _send(
        self, access: TopicAccess, producer: ProducerCore, given: contract.ProduceBody, value: bytes
    ) -> asyncio.Future[HttpResponse]:
        key, partition, headers = None, None, None
        if given.key is not None or given.key_b64 is not None:
            key = decode_key(given.key, given.key_b64)
        if given.partition_id is not None or not access.is_whole_topic:
            partition = self._choose_partition(access, given.partition_id, key)
        if given.epoch is not None:
            _check_epoch(access, given.epoch)
        if given.headers or given.headers_b64:
            headers = decode_headers(given.headers, given.headers_b64)
        if given.deliver_at is not None or given.delay_ms is not None:
            headers = self._delay(given, headers)
        delivery = self._topic_producers.send(
            access.topic, producer, value, key=key, partition=partition, timestamp=given.timestamp, headers=headers
        )
        self._on_client_seen("producer", given.producer_id)
        response: asyncio.Future[HttpResponse] = self._loop.create_future()

        def settle(done: Delivery) -> None:
            if not response.done():  # the client may have disconnected
                response.set_result(self._respond(access.topic, done, len(value)))

        delivery.add_done_callback(settle)
        return response

    def _respond(self, topic: TopicRow, done: Delivery, size_bytes: int) -> HttpResponse:
        offset = done.offset
        if offset is None:
            assert done.error is not None  # it is settled
            return error_response(self._topic_producers.translate_error(topic, done.error))
        self._metrics.count_produced(records=1, size_bytes=size_bytes)
        body = b'{"status":"success","partition_id":%d,"offset":%d}' % (done.partition, offset)
        return HttpResponse(status=200, body=body)

    async def _produce_sequenced(self, given: contract.ProduceBody) -> contract.ProducedAnswer:
        headers, key = decode_headers(given.headers, given.headers_b64), decode_key(given.key, given.key_b64)
        headers = self._delay(given, headers)
        columns = BatchColumns(
            [decode_value(given.message, given.message_b64)],
            None if key is None else [key],
            None,
            None if headers is None else [headers],
        )
        partition_id, offset = await self._append_sequenced(given, columns)
        return contract.ProducedAnswer(partition_id=partition_id, offset=offset)

    async def produce_batch(self, given: contract.ProduceBatchBody) -> contract.BatchProducedAnswer:
        """Append messages to one partition."""
        columns = decode_batch(given, self._clock.wall_ms())
        if given.sequence is None:
            partition_id, offset = await self._append_unsequenced(given, columns)
        else:
            partition_id, offset = await self._append_sequenced(given, columns)
        return contract.BatchProducedAnswer(partition_id=partition_id, offset=offset, count=len(columns.values))

    async def _append_unsequenced(self, given: contract.ProduceBatchBody, columns: BatchColumns) -> tuple[int, int]:
        """Append messages through the gateway's own producer, in one batch."""
        deadline = self._deadline()
        access = await self._registrations.producer(given.producer_id, given.topic, deadline=deadline)
        key = _find_key(columns, is_chosen_by_key=given.partition_id is None)
        partition = self._choose_partition(access, given.partition_id, key)
        _check_epoch(access, given.epoch)
        producer = await self._topic_producers.open(access.topic, deadline=deadline)
        self._on_client_seen("producer", given.producer_id)
        messages: list[bytes | None] | Batch = columns.values
        if given.records is not None or given.timestamp is not None or columns.headers is not None:
            timestamp = self._clock.wall_ms() if given.timestamp is None else given.timestamp
            messages = Batch.decode(build_batch(timestamp=timestamp, **columns._asdict()), verify=False)
        position = await self._topic_producers.send_batch(
            access.topic, producer, messages, key=key, partition=partition
        )
        self._count_produced(columns)
        return position

    async def _append_sequenced(
        self,
        given: contract.ProduceBody | contract.ProduceBatchBody,
        columns: BatchColumns,
    ) -> tuple[PartitionId, int]:
        """Append a batch under the client's own id and sequence; the leader deduplicates repeated calls."""
        if given.partition_id is None:
            raise RequestError("not done: a sequence is per partition; give partition_id as well")
        deadline = self._deadline()
        access = await self._registrations.producer(given.producer_id, given.topic, deadline=deadline)
        (partition_id,) = access.choose(given.partition_id)
        _check_epoch(access, given.epoch)
        batch = build_batch(
            timestamp=self._clock.wall_ms() if given.timestamp is None else given.timestamp,
            **columns._asdict(),
            producer_id=ProducerId(given.producer_id),
            producer_epoch=access.epoch if given.epoch is None else given.epoch,
            base_sequence=given.sequence or 0,
        )
        self._on_client_seen("producer", given.producer_id)
        produced = await self._send_batch(given.topic, partition_id, batch, deadline)
        if not produced.is_duplicate:
            self._count_produced(columns)
        return partition_id, produced.base_offset

    def _delay(self, given: contract.ProduceBody, headers: StoredHeaders | None) -> StoredHeaders | None:
        """Return the headers of a message with the time at which it is due, if it has one."""
        return delay_headers(headers, decode_delay(given.deliver_at, given.delay_ms, self._clock.wall_ms()))

    def _count_produced(self, columns: BatchColumns) -> None:
        size_bytes = sum(len(value) for value in columns.values if value is not None)
        self._metrics.count_produced(records=len(columns.values), size_bytes=size_bytes)

    async def _send_batch(self, topic: str, partition_id: PartitionId, batch: bytes, deadline: Deadline) -> Produced:
        def build(info: TopicInfo) -> Produce:
            return Produce(topic_id=info.topic_id, partition_id=partition_id)

        produced, _ = await self._router.ask_leader(topic, partition_id, build, (batch,), deadline=deadline)
        return produced

    def _choose_partition(self, access: TopicAccess, partition_id: int | None, key: bytes | None) -> int | None:
        """Return the partition of a message; None lets the topic's producer choose."""
        if partition_id is not None:
            return access.choose(partition_id)[0]
        if access.is_whole_topic:
            return None
        turn = next(self._next_turn) if key is None else partition_of(key, len(access.partitions))
        return access.partitions[turn % len(access.partitions)]

    def _deadline(self) -> Deadline:
        return self._router.deadline(self._timeout_ms)


def _find_key(columns: BatchColumns, *, is_chosen_by_key: bool) -> bytes | None:
    """Return the key of the messages, by which their partition is chosen if none is given.

    Raises:
        RequestError: they have different keys, so that they belong to different partitions.
    """
    if columns.keys is None:
        return None
    if is_chosen_by_key and len(set(columns.keys)) > 1:
        raise RequestError(
            "not done: the messages have different keys, and a batch is for one partition; give partition_id, or a "
            "batch for each key",
            code="several_keys",
        )
    return columns.keys[0]


def _check_epoch(access: TopicAccess, epoch: int | None) -> None:
    if epoch is not None and epoch < access.epoch:
        raise FencedError(f"not done: epoch {epoch} is fenced; the current epoch is {access.epoch}")

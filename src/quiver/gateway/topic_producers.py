"""One SDK producer per topic, which packs the single messages of many HTTP clients into batches.

Messages that arrive for a partition while one of its batches is in flight go into the next batch, so that many clients
share one replication round and one fsync. The producers belong to this gateway and have names that survive a restart,
so the broker drops what is sent twice after a lost answer. Handlers check a client's own producer id before; it is not
part of the batch.

Bounds: `TOPICS_MAX` open producers, beyond which the one that was opened first is closed; `BUFFER_BYTES` in flight for
each topic, beyond which messages are refused.
"""

from __future__ import annotations

import asyncio

from quiver.client.batching import StoredHeaders
from quiver.client.delivery import Delivery
from quiver.client.options import ProducerOptions
from quiver.client.producer import ProducerCore
from quiver.errors import FencedError, OverloadedError, QuiverError, UnavailableError
from quiver.gateway.cluster_handlers import GATEWAY_PRODUCER_PREFIX
from quiver.metadata import TopicRow
from quiver.model import NodeId, Offset, PartitionId, TopicId
from quiver.record import Batch
from quiver.routing.retry import Deadline
from quiver.routing.router import Router

TOPICS_MAX = 1_000
"""Topics with an open producer."""
BUFFER_BYTES = 64 * 1024 * 1024
"""Bytes in flight for one topic; messages beyond it are refused."""


class TopicProducers:
    """The producers of a gateway. `close` delivers what was accepted."""

    def __init__(self, router: Router, node: NodeId, *, timeout_ms: int) -> None:
        self._router = router
        self._node = node
        self._options = ProducerOptions(buffer_bytes=BUFFER_BYTES, delivery_timeout_ms=timeout_ms)
        self._producers: dict[TopicId, ProducerCore] = {}
        # Opening the same producer twice would begin a new epoch and fence the first.
        self._opening = asyncio.Lock()

    def find(self, topic: TopicRow) -> ProducerCore | None:
        """Return a topic's producer if it is open."""
        producer = self._producers.get(topic.topic_id)
        if producer is not None and topic.partitions > producer.accumulator.partition_count:
            producer.grow(topic.partitions)
        return producer

    async def open(self, topic: TopicRow, *, deadline: Deadline) -> ProducerCore:
        """Return a topic's producer; open it if needed."""
        async with self._opening:
            return self.find(topic) or await self._open(topic, deadline)

    async def _open(self, topic: TopicRow, deadline: Deadline) -> ProducerCore:
        if len(self._producers) >= TOPICS_MAX:
            await self._producers.pop(next(iter(self._producers))).close()
        producer = await ProducerCore.open(
            self._router,
            topic=topic.name,
            name=f"{GATEWAY_PRODUCER_PREFIX}{self._node}/{topic.topic_id}",
            partitions=(),
            options=self._options,
            deadline=deadline,
        )
        self._producers[topic.topic_id] = producer
        return producer

    def send(
        self,
        topic: TopicRow,
        producer: ProducerCore,
        value: bytes,
        *,
        key: bytes | None,
        partition: int | None,
        timestamp: int | None = None,
        headers: StoredHeaders | None = None,
    ) -> Delivery:
        """Accept a message; raise `OverloadedError` if the buffer is full."""
        try:
            delivery = producer.add(value, key, partition, timestamp, headers)
        except FencedError as error:
            raise self.translate_error(topic, error) from None
        if delivery is None:
            raise _buffer_full(topic)
        return delivery

    async def send_batch(
        self,
        topic: TopicRow,
        producer: ProducerCore,
        messages: list[bytes | None] | Batch,
        *,
        key: bytes | None,
        partition: int | None,
    ) -> tuple[PartitionId, Offset]:
        """Accept messages into one batch and wait for it; return the first one's position. Raises as `send`.

        A `Batch` has keys, timestamps and headers already; `key` then only chooses the partition.
        """
        try:
            if isinstance(messages, Batch):
                ((put, _, _),) = producer.chunks(messages, None, producer.choose(key, partition))
                placed = put()
            else:
                placed = producer.add_batch(messages, key, partition)
            if placed is None:
                raise _buffer_full(topic)
            outcome, index = placed
            return outcome.partition, Offset(await outcome + index)
        except FencedError as error:
            raise self.translate_error(topic, error) from None

    def translate_error(self, topic: TopicRow, error: QuiverError) -> QuiverError:
        """Return the error that a client gets for a failure of the gateway's own producer.

        A `FencedError` means that another process runs with this node's id. The next message opens a new producer,
        which in turn fences that process. `unknown_producer` means that the gateway's producer was forgotten. The
        client's own epoch is still valid, so it is told to retry.
        """
        if isinstance(error, FencedError) or error.code == "unknown_producer":
            self._producers.pop(topic.topic_id, None)
            if error.outcome == "unknown":
                return error
            return UnavailableError("not done: this gateway's producer was replaced; try again", code="replaced")
        return error

    async def close(self) -> None:
        """Deliver what was accepted, then close all producers."""
        while self._producers:
            _, producer = self._producers.popitem()
            await producer.close()


def _buffer_full(topic: TopicRow) -> OverloadedError:
    return OverloadedError(f"not done: {BUFFER_BYTES} bytes are in flight to topic {topic.name!r}; try again later")

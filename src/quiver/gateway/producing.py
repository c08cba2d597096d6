"""The calls of producers.

`produce` without a sequence is the hot one: it takes no task and waits for nothing but its batch. With a sequence a
message is a batch of its own under the client's id, so that a repeated call finds the first one's offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Literal

from quiver.client.chunks import partition_of
from quiver.client.delivery import Delivery
from quiver.client.producer import ProducerCore
from quiver.clock import Clock
from quiver.errors import FencedError, NotAllowedError, NotFoundError, RequestError
from quiver.gateway import contract
from quiver.gateway.cluster import INTERNAL_PREFIX
from quiver.gateway.failures import failure_of
from quiver.gateway.fanout import ask_all
from quiver.gateway.http import HttpResponse
from quiver.gateway.messages import read_value, read_values
from quiver.gateway.metrics import Metrics
from quiver.gateway.registrations import Allowed, Registrations
from quiver.gateway.topic_producers import TopicProducers
from quiver.metadata import TopicRow
from quiver.model import PartitionId, ProducerId
from quiver.record import build_batch
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import BeginEpoch, Produce, Produced, RegisterProducerRequest, Selection, TopicInfo

Hear = Callable[[Literal["producer", "consumer"], int], None]
"""Take note that a client lives."""


class ProducerCalls:
    """Carry out the calls of producers."""

    def __init__(
        self,
        router: Router,
        registrations: Registrations,
        packers: TopicProducers,
        metrics: Metrics,
        *,
        clock: Clock,
        hear: Hear,
        timeout_ms: int,
    ) -> None:
        self._router = router
        self._registrations = registrations
        self._packers = packers
        self._metrics = metrics
        self._clock = clock
        self._hear = hear
        self._timeout_ms = timeout_ms
        self._loop = asyncio.get_running_loop()
        self._turns = count()

    # -- register --------------------------------------------------------------------------------

    async def register(self, given: contract.RegisterProducerBody) -> contract.ProducerRegisteredAnswer:
        """Register a producer; one that was known is told how far it had come, and its earlier self is fenced off."""
        if given.prod_name is not None and given.prod_name.startswith(INTERNAL_PREFIX):
            raise NotAllowedError(f"not done: names that begin with {INTERNAL_PREFIX} are gateways' own")
        deadline = self._deadline()
        partitions = () if given.partition_id is None else (PartitionId(given.partition_id),)
        selection = Selection(topic=given.topic, partitions=partitions)
        request = RegisterProducerRequest(topics=(selection,), name=given.prod_name or "")
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.see(registered.index)
        sequences: dict[str, int] = {}
        if registered.epoch > 0:
            sequences = await self._begin_epoch(given, registered.producer_id, registered.epoch, deadline)
        return contract.ProducerRegisteredAnswer(
            producer_id=registered.producer_id, epoch=registered.epoch, sequences=sequences
        )

    async def _begin_epoch(
        self, given: contract.RegisterProducerBody, producer_id: ProducerId, epoch: int, deadline: Deadline
    ) -> dict[str, int]:
        """Begin a producer's new epoch in every partition; return the next sequence of each."""
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

        sequences = await ask_all(begin(partition_id) for partition_id in partitions)
        return {str(partition_id): next_ for partition_id, next_ in zip(partitions, sequences, strict=True)}

    # -- produce ---------------------------------------------------------------------------------

    def produce(
        self, given: contract.ProduceBody
    ) -> asyncio.Future[HttpResponse] | Coroutine[Any, Any, contract.ProducedAnswer | HttpResponse]:
        """Append a message."""
        if given.sequence is not None:
            return self._produce_in_sequence(given)
        value = read_value(given.message, given.message_b64)
        try:
            allowed = self._registrations.producer_nowait(given.producer_id, given.topic)
        except (NotFoundError, NotAllowedError):
            return self._produce_later(given, value)
        core = self._packers.find(allowed.topic)
        if core is None:
            return self._produce_later(given, value)
        return self._send(allowed, core, given, value)

    async def _produce_later(self, given: contract.ProduceBody, value: bytes) -> HttpResponse:
        """Append a message of a client that is not known here yet, or to a topic that nobody has produced to yet."""
        deadline = self._deadline()
        allowed = await self._registrations.producer(given.producer_id, given.topic, deadline=deadline)
        core = await self._packers.open(allowed.topic, deadline=deadline)
        return await self._send(allowed, core, given, value)

    def _send(
        self, allowed: Allowed, core: ProducerCore, given: contract.ProduceBody, value: bytes
    ) -> asyncio.Future[HttpResponse]:
        partition = self._target(allowed, given.partition_id, given.key)
        _check_epoch(allowed, given.epoch)
        delivery = self._packers.send(allowed.topic, core, value, key=given.key, partition=partition)
        self._hear("producer", given.producer_id)
        answer: asyncio.Future[HttpResponse] = self._loop.create_future()

        def settle(done: Delivery) -> None:
            if not answer.done():
                answer.set_result(self._respond(allowed.topic, done, len(value)))

        delivery.add_done_callback(settle)
        return answer

    def _respond(self, topic: TopicRow, done: Delivery, size_bytes: int) -> HttpResponse:
        if done.error is not None:
            return failure_of(self._packers.judge(topic, done.error))
        self._metrics.count_produced(records=1, size_bytes=size_bytes)
        body = b'{"status":"success","partition_id":%d,"offset":%d}' % (done.partition, done.offset or 0)
        return HttpResponse(status=200, body=body)

    async def _produce_in_sequence(self, given: contract.ProduceBody) -> contract.ProducedAnswer:
        values = [read_value(given.message, given.message_b64)]
        partition_id, offset = await self._append(given, values)
        return contract.ProducedAnswer(partition_id=partition_id, offset=offset)

    async def produce_batch(self, given: contract.ProduceBatch) -> contract.BatchProduced:
        """Append messages to one partition."""
        values = read_values(given.messages, given.messages_b64)
        if given.sequence is None:
            partition_id, offset = await self._append_packed(given, values)
        else:
            partition_id, offset = await self._append(given, values)
        return contract.BatchProduced(partition_id=partition_id, offset=offset, count=len(values))

    async def _append_packed(self, given: contract.ProduceBatch, values: list[bytes]) -> tuple[int, int]:
        """Append messages through the gateway's own producer, all in one batch."""
        deadline = self._deadline()
        allowed = await self._registrations.producer(given.producer_id, given.topic, deadline=deadline)
        partition = self._target(allowed, given.partition_id, given.key)
        _check_epoch(allowed, given.epoch)
        core = await self._packers.open(allowed.topic, deadline=deadline)
        key = None if given.key is None else given.key.encode()
        self._hear("producer", given.producer_id)
        place = await self._packers.send_together(allowed.topic, core, values, key=key, partition=partition)
        self._metrics.count_produced(records=len(values), size_bytes=sum(map(len, values)))
        return place

    async def _append(
        self, given: contract.ProduceBody | contract.ProduceBatch, values: list[bytes]
    ) -> tuple[PartitionId, int]:
        """Append a batch under the client's own id and sequence: once, however often it is sent."""
        if given.partition_id is None:
            raise RequestError("not done: a sequence is per partition: give partition_id, too")
        deadline = self._deadline()
        allowed = await self._registrations.producer(given.producer_id, given.topic, deadline=deadline)
        (partition_id,) = allowed.choose(given.partition_id)
        _check_epoch(allowed, given.epoch)
        batch = build_batch(
            values,
            timestamp=self._clock.wall_ms(),
            keys=None if given.key is None else [given.key.encode()] * len(values),
            producer_id=ProducerId(given.producer_id),
            producer_epoch=allowed.epoch if given.epoch is None else given.epoch,
            base_sequence=given.sequence or 0,
        )
        self._hear("producer", given.producer_id)
        produced = await self._send_batch(given.topic, partition_id, batch, deadline)
        if not produced.is_duplicate:
            self._metrics.count_produced(records=len(values), size_bytes=sum(map(len, values)))
        return partition_id, produced.base_offset

    async def _send_batch(self, topic: str, partition_id: PartitionId, batch: bytes, deadline: Deadline) -> Produced:
        def build(info: TopicInfo) -> Produce:
            return Produce(topic_id=info.topic_id, partition_id=partition_id)

        produced, _ = await self._router.ask_leader(topic, partition_id, build, (batch,), deadline=deadline)
        return produced

    def _target(self, allowed: Allowed, partition_id: int | None, key: str | None) -> int | None:
        """Return the partition of a message; None if any will do."""
        if partition_id is not None:
            return allowed.choose(partition_id)[0]
        if allowed.is_whole:
            return None  # by key or in turn: the packer's choice
        turn = next(self._turns) if key is None else partition_of(key.encode(), len(allowed.partitions))
        return allowed.partitions[turn % len(allowed.partitions)]

    def _deadline(self) -> Deadline:
        return self._router.deadline(self._timeout_ms)


def _check_epoch(allowed: Allowed, epoch: int | None) -> None:
    if epoch is not None and epoch < allowed.epoch:
        raise FencedError(f"not done: epoch {epoch} is over, {allowed.epoch} has begun")

"""Single messages of many clients, packed into batches: one producer of the SDK for each topic that is produced to.

What arrives for a partition while a batch of it is under way goes into the next one, so that many clients share one
replication round and one sync. The producers are this gateway's own, with names that outlast it: the broker drops what
is sent twice after a lost answer. A client's own id is checked before; it does not show in the batch.

Bounds: so many topics at once, beyond which the one that was opened first is closed; so many bytes under way for each.
"""

from __future__ import annotations

import asyncio

from quiver.client.delivery import Delivery
from quiver.client.options import ProducerOptions
from quiver.client.producer import ProducerCore
from quiver.client.sources import RECORD_BYTES
from quiver.errors import FencedError, OverloadedError, QuiverError, UnavailableError
from quiver.gateway.cluster import INTERNAL_PREFIX
from quiver.metadata import TopicRow
from quiver.model import NodeId, Offset, PartitionId, TopicId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router

TOPICS_MAX = 1_000
"""Topics that are produced to at once."""
BUFFER_BYTES = 64 * 1024 * 1024
"""Bytes under way for one topic; beyond it messages are refused."""


class TopicProducers:
    """The producers of a gateway. `close` lets what was accepted be delivered."""

    def __init__(self, router: Router, node: NodeId, *, timeout_ms: int) -> None:
        self._router = router
        self._node = node
        self._options = ProducerOptions(buffer_bytes=BUFFER_BYTES, delivery_timeout_ms=timeout_ms)
        self._cores: dict[TopicId, ProducerCore] = {}
        # Opening the same one twice would fence off the first.
        self._opening = asyncio.Lock()

    def find(self, topic: TopicRow) -> ProducerCore | None:
        """Return a topic's producer if it is open."""
        core = self._cores.get(topic.topic_id)
        if core is not None and core.accumulator.partition_count < topic.partitions:
            core.accumulator.grow(topic.partitions)
        return core

    async def open(self, topic: TopicRow, *, deadline: Deadline) -> ProducerCore:
        """Return a topic's producer, opened if need be."""
        async with self._opening:
            return self.find(topic) or await self._open(topic, deadline)

    async def _open(self, topic: TopicRow, deadline: Deadline) -> ProducerCore:
        if len(self._cores) >= TOPICS_MAX:
            await self._cores.pop(next(iter(self._cores))).close()
        core = await ProducerCore.open(
            self._router,
            topic=topic.name,
            name=f"{INTERNAL_PREFIX}{self._node}/{topic.topic_id}",
            partitions=(),
            options=self._options,
            deadline=deadline,
        )
        self._cores[topic.topic_id] = core
        return core

    def send(
        self, topic: TopicRow, core: ProducerCore, value: bytes, *, key: str | None, partition: int | None
    ) -> Delivery:
        """Accept a message; raise `OverloadedError` if there is no room."""
        try:
            delivery = core.add(value, key, partition, None, None)
        except FencedError as error:
            raise self.judge(topic, error) from None
        if delivery is None:
            raise _full(topic)
        return delivery

    async def send_together(
        self, topic: TopicRow, core: ProducerCore, values: list[bytes], *, key: bytes | None, partition: int | None
    ) -> tuple[PartitionId, Offset]:
        """Accept messages into one batch and wait for it; return where the first is. Raises as `send`."""
        size_bytes = sum(map(len, values)) + RECORD_BYTES * len(values)
        try:
            placed = core.accumulator.extend(values, core.choose(key, partition), key, size_bytes=size_bytes)
            if placed is None:
                raise _full(topic)
            outcome, index = placed
            return outcome.partition, Offset(await outcome + index)
        except FencedError as error:
            raise self.judge(topic, error) from None

    def judge(self, topic: TopicRow, error: QuiverError) -> QuiverError:
        """Return what a failure of a gateway's own producer means to a client.

        It is fenced off if another process has this node's id; the next message opens a new one, and so fences that
        one off. To the client it is not its own epoch that is over.
        """
        if isinstance(error, FencedError):
            self._cores.pop(topic.topic_id, None)
            return UnavailableError("not done: this gateway's producer was replaced; try again", code="replaced")
        return error

    async def close(self) -> None:
        """Deliver what was accepted, then close all producers."""
        while self._cores:
            _, core = self._cores.popitem()
            await core.close()


def _full(topic: TopicRow) -> OverloadedError:
    return OverloadedError(f"not done: {BUFFER_BYTES} bytes are under way to topic {topic.name!r}")

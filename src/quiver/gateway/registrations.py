"""Check which partitions of a topic a client is registered for, against this node's own copy of the metadata.

For a client that is known here the check is a lookup. An unknown client may have registered through another node a
moment ago: then this node asks the primary for its metadata index, catches up with it, and checks again. A client that
is still unknown does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from quiver.errors import NotAllowedError, NotFoundError
from quiver.metadata import ALL_PARTITIONS, ConsumerRow, ProducerRow, TopicRow, View
from quiver.model import ConsumerId, PartitionId, ProducerId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import GetMetadata

CACHE_MAX = 100_000
"""Cached results; the cache is cleared beyond it."""


class TopicAccess(NamedTuple):
    """The partitions of a topic that a client is registered for."""

    topic: TopicRow
    partitions: tuple[PartitionId, ...]
    is_whole_topic: bool
    """Whether these are all partitions, including those added later."""
    epoch: int
    """A producer's newest epoch; 0 for a consumer."""

    def choose(self, partition_id: int | None) -> tuple[PartitionId, ...]:
        """Return the requested partition, or all that the client is registered for.

        Raises:
            NotFoundError: the topic has no such partition.
            NotAllowedError: the client is not registered for it.
        """
        if partition_id is None:
            return self.partitions
        if partition_id >= self.topic.partitions:
            message = (
                f"not done: topic {self.topic.name!r} has no partition {partition_id}, only {self.topic.partitions}"
            )
            raise NotFoundError(message, code="unknown_partition")
        if partition_id not in self.partitions:
            message = f"not done: not registered for partition {partition_id} of topic {self.topic.name!r}"
            raise NotAllowedError(message, code="not_registered")
        return (PartitionId(partition_id),)


class Registrations:
    """Look up registrations, and cache the results per metadata view."""

    def __init__(self, view: Callable[[], View], router: Router) -> None:
        self._view = view
        self._router = router
        self._seen: View | None = None
        self._cache: dict[tuple[str, int, str], TopicAccess] = {}
        """Results for `_seen`; a view is immutable, so they hold until the next view."""

    def producer_nowait(self, producer_id: int, topic: str) -> TopicAccess:
        """Return a producer's access to a topic, as far as this node knows.

        Raises:
            NotFoundError: there is no such topic or producer.
            NotAllowedError: the producer is not registered for the topic.
        """
        return self._find("producer", producer_id, topic)

    def consumer_nowait(self, consumer_id: int, topic: str) -> TopicAccess:
        """Return a consumer's access to a topic, as far as this node knows; raises as `producer_nowait`."""
        return self._find("consumer", consumer_id, topic)

    async def producer(self, producer_id: int, topic: str, *, deadline: Deadline) -> TopicAccess:
        """Return a producer's access to a topic; raises as `producer_nowait`, after catching up with the primary."""
        return await self._check(lambda: self.producer_nowait(producer_id, topic), deadline)

    async def consumer(self, consumer_id: int, topic: str, *, deadline: Deadline) -> TopicAccess:
        """Return a consumer's access to a topic; raises as `producer_nowait`, after catching up with the primary."""
        return await self._check(lambda: self.consumer_nowait(consumer_id, topic), deadline)

    def _find(self, kind: Literal["producer", "consumer"], id_: int, topic: str) -> TopicAccess:
        view = self._view()
        if view is not self._seen or len(self._cache) > CACHE_MAX:
            self._seen, self._cache = view, {}
        access = self._cache.get((kind, id_, topic))
        if access is None:
            producer, consumer = view.producers.get(ProducerId(id_)), view.consumers.get(ConsumerId(id_))
            client = producer if kind == "producer" else consumer
            access = self._cache[kind, id_, topic] = _resolve(view, topic, client, kind, id_)
        return access

    async def _check(self, find: Callable[[], TopicAccess], deadline: Deadline) -> TopicAccess:
        try:
            return find()
        except (NotFoundError, NotAllowedError):
            await catch_up(self._router, deadline=deadline)
            return find()


async def catch_up(router: Router, *, deadline: Deadline) -> None:
    """Wait until this node has applied all metadata that the primary had committed when this was called."""
    found, _ = await router.ask(GetMetadata(topics=(), is_linearizable=True), deadline=deadline)
    await router.ask(GetMetadata(topics=(), known_index=found.index), deadline=deadline)


def _resolve(view: View, name: str, client: ProducerRow | ConsumerRow | None, kind: str, id_: int) -> TopicAccess:
    topic = view.topic(name)
    if topic is None:
        raise NotFoundError(f"not done: unknown topic {name!r}", code="unknown_topic")
    if client is None:
        raise NotFoundError(f"not done: unknown {kind} {id_}", code=f"unknown_{kind}")
    registered = [item.partition_id for item in client.registrations if item.topic_id == topic.topic_id]
    if not registered:
        raise NotAllowedError(
            f"not done: {kind} {id_} is not registered for topic {name!r}; register it first", code="not_registered"
        )
    epoch = client.epoch if isinstance(client, ProducerRow) else 0
    if ALL_PARTITIONS in registered:
        return TopicAccess(topic, tuple(map(PartitionId, range(topic.partitions))), is_whole_topic=True, epoch=epoch)
    return TopicAccess(topic, tuple(sorted(registered)), is_whole_topic=False, epoch=epoch)

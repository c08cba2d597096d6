"""Who may use which partitions of which topic, by this node's own copy of the metadata.

The answer takes no time as long as the client is known here. A client that is not may have registered with another
node a moment ago: then the primary is asked once how far the metadata goes, this node catches up with that, and
looks again. What is still unknown then does not exist.
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

KNOWN_MAX = 100_000
"""How many answers are remembered."""


class Allowed(NamedTuple):
    """What a client may use of a topic."""

    topic: TopicRow
    partitions: tuple[PartitionId, ...]
    is_whole: bool
    """Whether these are all partitions, those to come included."""
    epoch: int
    """A producer's newest epoch."""

    def choose(self, partition_id: int | None) -> tuple[PartitionId, ...]:
        """Return the one partition that is asked for, or all that are allowed.

        Raises:
            NotFoundError: the topic has no such partition.
            NotAllowedError: the client is registered for others.
        """
        if partition_id is None:
            return self.partitions
        if partition_id >= self.topic.partitions:
            message = f"not done: topic {self.topic.name!r} has no partition {partition_id}"
            raise NotFoundError(message, code="unknown_partition")
        if partition_id not in self.partitions:
            message = f"not done: not registered for partition {partition_id} of topic {self.topic.name!r}"
            raise NotAllowedError(message, code="not_registered")
        return (PartitionId(partition_id),)


class Registrations:
    """Answer whether clients are registered."""

    def __init__(self, view: Callable[[], View], router: Router) -> None:
        self._view = view
        self._router = router
        self._seen: View | None = None
        self._known: dict[tuple[str, int, str], Allowed] = {}
        """What was found in the view that was last seen; views never change."""

    def producer_nowait(self, producer_id: int, topic: str) -> Allowed:
        """Return what a producer may use of a topic, as far as this node knows.

        Raises:
            NotFoundError: there is no such topic or producer.
            NotAllowedError: the producer is not registered for the topic.
        """
        return self._find("producer", producer_id, topic)

    def consumer_nowait(self, consumer_id: int, topic: str) -> Allowed:
        """Return what a consumer may use of a topic, as far as this node knows; raises as `producer_nowait`."""
        return self._find("consumer", consumer_id, topic)

    async def producer(self, producer_id: int, topic: str, *, deadline: Deadline) -> Allowed:
        """Return what a producer may use of a topic; raises as `producer_nowait`, but by the primary's word."""
        return await self._ask(lambda: self.producer_nowait(producer_id, topic), deadline)

    async def consumer(self, consumer_id: int, topic: str, *, deadline: Deadline) -> Allowed:
        """Return what a consumer may use of a topic; raises as `producer_nowait`, but by the primary's word."""
        return await self._ask(lambda: self.consumer_nowait(consumer_id, topic), deadline)

    def _find(self, kind: Literal["producer", "consumer"], id_: int, topic: str) -> Allowed:
        view = self._view()
        if view is not self._seen or len(self._known) > KNOWN_MAX:
            self._seen, self._known = view, {}
        allowed = self._known.get((kind, id_, topic))
        if allowed is None:
            producer, consumer = view.producers.get(ProducerId(id_)), view.consumers.get(ConsumerId(id_))
            client = producer if kind == "producer" else consumer
            allowed = self._known[kind, id_, topic] = _check(view, topic, client, kind, id_)
        return allowed

    async def _ask(self, look: Callable[[], Allowed], deadline: Deadline) -> Allowed:
        try:
            return look()
        except (NotFoundError, NotAllowedError):
            await catch_up(self._router, deadline=deadline)
            return look()


async def catch_up(router: Router, *, deadline: Deadline) -> None:
    """Wait until this node knows all that the primary knew when this was called."""
    found, _ = await router.ask(GetMetadata(topics=(), is_linearizable=True), deadline=deadline)
    await router.ask(GetMetadata(topics=(), known_index=found.index), deadline=deadline)


def _check(view: View, name: str, client: ProducerRow | ConsumerRow | None, kind: str, id_: int) -> Allowed:
    topic = view.topic(name)
    if topic is None:
        raise NotFoundError(f"not done: there is no topic {name!r}", code="unknown_topic")
    if client is None:
        raise NotFoundError(f"not done: there is no {kind} {id_}", code=f"unknown_{kind}")
    registered = [item.partition_id for item in client.registrations if item.topic_id == topic.topic_id]
    if not registered:
        raise NotAllowedError(f"not done: {kind} {id_} is not registered for topic {name!r}", code="not_registered")
    epoch = client.epoch if isinstance(client, ProducerRow) else 0
    if ALL_PARTITIONS in registered:
        return Allowed(topic, tuple(map(PartitionId, range(topic.partitions))), is_whole=True, epoch=epoch)
    return Allowed(topic, tuple(sorted(registered)), is_whole=False, epoch=epoch)

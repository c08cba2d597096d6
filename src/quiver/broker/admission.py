"""Who may do what with a partition, by what this node knows of the metadata.

A client may know more than this node: it has just registered. It says up to which index it knows the metadata, and is
judged no earlier than this node knows as much. The wait ends with the request's own time.
"""

from __future__ import annotations

import asyncio

from quiver.clock import Clock
from quiver.errors import ConflictError, NotAllowedError, NotFoundError, UnavailableError
from quiver.metadata import Consumer, MetadataStore, Producer, Registration, View
from quiver.model import NO_PRODUCER, ConsumerId, Index, PartitionId, ProducerId, TopicId
from quiver.wire.serving import Caller

WAIT_SHARE = 0.8
"""How much of its remaining time a request may wait; the rest is for the answer to arrive in time."""


class Admission:
    """The questions that are asked before a request is carried out."""

    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def wait_known(self, caller: Caller, index: Index) -> View:
        """Return the metadata, once this node knows it up to an index.

        Raises:
            UnavailableError: not done; the caller's time was nearly over before.
        """
        if self._store.applied_index < index:
            wait_ms = caller.remaining_ms(self._clock.monotonic_ms()) * WAIT_SHARE
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._store.wait_applied(index)
            except TimeoutError:
                message = (
                    f"not done: this node knows the metadata up to {self._store.applied_index}, not yet to {index}"
                )
                raise UnavailableError(message, code="metadata_behind") from None
        return self._store.view()


def check_producer(view: View, producer_id: ProducerId, topic_id: TopicId, partition_id: PartitionId) -> None:
    """Let a registered producer send to a partition; a batch without a producer is everybody's.

    Raises:
        NotFoundError: there is no such producer.
        NotAllowedError: it is not registered for the partition.
        ConflictError: records would wait for consumers of which there are none.
    """
    if producer_id != NO_PRODUCER:
        producer = view.producers.get(producer_id)
        if producer is None:
            raise NotFoundError(f"not done: there is no producer {producer_id}", code="unknown_producer")
        _find_registration(producer, producer_id, topic_id, partition_id)
    topic = view.topics.get(topic_id)
    if topic is not None and topic.retention.until_consumed and not view.consumers_of(topic_id):
        message = f"not done: topic {topic.name!r} keeps records until they are consumed and has no consumers"
        raise ConflictError(message, code="no_consumers")


def check_consumer(view: View, consumer_id: ConsumerId, topic_id: TopicId, partition_id: PartitionId) -> Registration:
    """Let a registered consumer read a partition; return its registration, which says where it begins.

    Raises:
        NotFoundError: there is no such consumer.
        NotAllowedError: it is not registered for the partition.
    """
    consumer = view.consumers.get(consumer_id)
    if consumer is None:
        raise NotFoundError(f"not done: there is no consumer {consumer_id}", code="unknown_consumer")
    return _find_registration(consumer, consumer_id, topic_id, partition_id)


def _find_registration(
    client: Producer | Consumer, id_: int, topic_id: TopicId, partition_id: PartitionId
) -> Registration:
    for registration in client.registrations:
        if registration.covers(topic_id, partition_id):
            return registration
    kind = client.table.value.removesuffix("s")
    message = f"not done: {kind} {id_} is not registered for partition {partition_id} of topic {topic_id}"
    raise NotAllowedError(message, code="not_registered")

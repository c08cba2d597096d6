"""Checks that a client is registered for a partition, against this node's metadata."""

from __future__ import annotations

from quiver.broker.replica_table import PartitionKey
from quiver.errors import ConflictError, NotAllowedError, NotFoundError
from quiver.metadata import ConsumerRow, ProducerRow, Registration, StartFrom, View
from quiver.model import ConsumerId, ProducerId, TopicId
from quiver.partition import DefaultStart


def start_of(registration: Registration) -> DefaultStart:
    """Return where a client without a cursor starts."""
    return "latest" if registration.start is StartFrom.LATEST else "earliest"


def check_producer(view: View, producer_id: ProducerId, epoch: int, *, key: PartitionKey) -> None:
    """Check that a producer may write to a partition.

    Raises:
        NotFoundError: the producer is unknown.
        NotAllowedError: it is not registered for the partition, or the epoch was never assigned to it.
    """
    producer = view.producers.get(producer_id)
    if producer is None:
        raise NotFoundError(_unknown("producer", producer_id), code="unknown_producer")
    _find_registration(producer, producer_id, key)
    if epoch > producer.epoch:
        message = f"not done: epoch {epoch} was never assigned to producer {producer_id}; its epoch is {producer.epoch}"
        raise NotAllowedError(message, code="unknown_epoch")


def check_has_consumers(view: View, topic_id: TopicId) -> None:
    """Refuse records of a topic that keeps them until they are consumed, if it has no consumers.

    Raises:
        ConflictError: the topic has no consumers: its records would stay forever.
    """
    topic = view.topics.get(topic_id)
    if topic is not None and topic.retention.until_consumed and not view.has_consumers(topic_id):
        message = f"not done: topic {topic.name!r} keeps records until they are consumed, but has no consumers"
        raise ConflictError(f"{message}; register one", code="no_consumers")


def check_consumer(view: View, consumer_id: ConsumerId, *, key: PartitionKey) -> Registration:
    """Check that a consumer may read a partition; return its registration, which contains its start position.

    Raises:
        NotFoundError: the consumer is unknown.
        NotAllowedError: it is not registered for the partition.
    """
    consumer = view.consumers.get(consumer_id)
    if consumer is None:
        raise NotFoundError(_unknown("consumer", consumer_id), code="unknown_consumer")
    return _find_registration(consumer, consumer_id, key)


def _unknown(kind: str, id_: int) -> str:
    return f"not done: unknown {kind} {id_}: it expired, was forgotten, or never existed; register again"


def _find_registration(client: ProducerRow | ConsumerRow, id_: int, key: PartitionKey) -> Registration:
    for registration in reversed(client.registrations):  # one for the partition comes after one for the topic
        if registration.covers(*key):
            return registration
    kind = client.table.value.removesuffix("s")
    message = f"not done: {kind} {id_} is not registered for partition {key[1]} of topic {key[0]}"
    raise NotAllowedError(message, code="not_registered")

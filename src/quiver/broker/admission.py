"""Who may do what with a partition, by what this node knows of the metadata.

A client may know more than this node: it has just registered. It says up to which index it knows the metadata, and is
judged no earlier than this node knows as much. The wait ends with the request's own time.
"""

from __future__ import annotations

from quiver.broker.table import Key
from quiver.errors import ConflictError, NotAllowedError, NotFoundError
from quiver.metadata import ConsumerRow, ProducerRow, Registration, View
from quiver.model import ConsumerId, ProducerId, TopicId


def check_producer(view: View, producer_id: ProducerId, epoch: int, *, key: Key) -> None:
    """Let a registered producer write to a partition.

    Raises:
        NotFoundError: there is no such producer.
        NotAllowedError: it is not registered for the partition, or was never given that epoch.
    """
    producer = view.producers.get(producer_id)
    if producer is None:
        raise NotFoundError(f"not done: there is no producer {producer_id}", code="unknown_producer")
    _find_registration(producer, producer_id, key)
    if epoch > producer.epoch:
        raise NotAllowedError(f"not done: producer {producer_id} was never given epoch {epoch}", code="unknown_epoch")


def check_is_awaited(view: View, topic_id: TopicId) -> None:
    """Refuse records that would wait for consumers of which there are none.

    Raises:
        ConflictError: the topic keeps records until they are consumed, and has no consumers.
    """
    topic = view.topics.get(topic_id)
    if topic is not None and topic.retention.until_consumed and not view.consumers_of(topic_id):
        message = f"not done: topic {topic.name!r} keeps records until they are consumed and has no consumers"
        raise ConflictError(message, code="no_consumers")


def check_consumer(view: View, consumer_id: ConsumerId, *, key: Key) -> Registration:
    """Let a registered consumer read a partition; return its registration, which says where it begins.

    Raises:
        NotFoundError: there is no such consumer.
        NotAllowedError: it is not registered for the partition.
    """
    consumer = view.consumers.get(consumer_id)
    if consumer is None:
        raise NotFoundError(f"not done: there is no consumer {consumer_id}", code="unknown_consumer")
    return _find_registration(consumer, consumer_id, key)


def _find_registration(client: ProducerRow | ConsumerRow, id_: int, key: Key) -> Registration:
    for registration in client.registrations:
        if registration.covers(*key):
            return registration
    kind = client.table.value.removesuffix("s")
    message = f"not done: {kind} {id_} is not registered for partition {key[1]} of topic {key[0]}"
    raise NotAllowedError(message, code="not_registered")

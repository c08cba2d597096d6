"""Traffic of a node's partitions by topic, and how long the stages of a consume take. For metrics only.

A `TopicMeter` outlives the replicas that count in it, so that a replica that is moved away does not make its topic's
counters fall. `Meters.forget` drops those of topics that are gone.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from quiver.metrics import Histogram
from quiver.model import TopicId
from quiver.record import Batch, Record


class ConsumeTimings:
    """How long the stages of a consume take on this node."""

    __slots__ = ("commit", "read")

    def __init__(self) -> None:
        self.read = Histogram()
        """A read of records, from memory or from the disk."""
        self.commit = Histogram()
        """From a consume's cursor move until it is committed."""


class QueueMeter:
    """The work queues of one topic on this node: records, counted by leaders when they are planned."""

    __slots__ = ("acknowledged", "dead", "leased", "redelivered", "stale")

    def __init__(self) -> None:
        self.leased = 0
        """Delivered to workers, redelivered ones included."""
        self.redelivered = 0
        self.acknowledged = 0
        self.dead = 0
        """Turned into dead letters."""
        self.stale = 0
        """Receipts that were refused."""

    @property
    def is_used(self) -> bool:
        """Return whether a queue of the topic was used on this node."""
        return bool(self.leased or self.acknowledged or self.dead or self.stale)


class TopicMeter:
    """The traffic of one topic on this node; `received` is counted by leaders, once per batch."""

    __slots__ = ("queues", "received_bytes", "received_records", "sent_bytes", "sent_records", "timings")

    def __init__(self, timings: ConsumeTimings) -> None:
        self.timings = timings
        self.received_records = 0
        self.received_bytes = 0
        self.sent_records = 0
        self.sent_bytes = 0
        self.queues = QueueMeter()

    @property
    def bytes(self) -> int:
        """Return the bytes received and sent."""
        return self.received_bytes + self.sent_bytes

    def count_sent(self, batches: Sequence[Batch]) -> None:
        """Count batches that are sent to a client."""
        for batch in batches:
            self.sent_records += batch.header.record_count
            self.sent_bytes += len(batch.data)

    def count_consumed(self, records: Sequence[Record | None]) -> None:
        """Count records that are sent to consumers one by one; None: a consumer got none."""
        for record in records:
            if record is not None:
                self.sent_records += 1
                self.sent_bytes += len(record.value or b"")


class Meters:
    """The traffic of all topics on this node."""

    def __init__(self) -> None:
        self.timings = ConsumeTimings()
        self.topics: dict[TopicId, TopicMeter] = {}
        self._labelled: set[TopicId] = set()

    def of(self, topic_id: TopicId) -> TopicMeter:
        """Return the meter of a topic."""
        meter = self.topics.get(topic_id)
        if meter is None:
            meter = self.topics[topic_id] = TopicMeter(self.timings)
        return meter

    def labelled(self, topics_max: int) -> set[TopicId]:
        """Return the topics with a label of their own: those with the most traffic at first, and from then on the same.

        A topic that lost its label would look as if its counters were reset.
        """
        if len(self._labelled) < topics_max:
            busy = [
                topic_id for topic_id, meter in self.topics.items() if meter.bytes and topic_id not in self._labelled
            ]
            busy.sort(key=lambda topic_id: self.topics[topic_id].bytes, reverse=True)
            self._labelled.update(busy[: topics_max - len(self._labelled)])
        return self._labelled

    def forget(self, known: Container[TopicId]) -> None:
        """Drop the meters of topics that are not in `known`."""
        for topic_id in [topic_id for topic_id in self.topics if topic_id not in known]:
            del self.topics[topic_id]
            self._labelled.discard(topic_id)

"""Bring what was decided into its topics, once, however often it is begun.

A writer has one named producer for each target topic. Its sequences are dense, so that a partition's next sequence says
how many of the writer's records it has: what a decision puts there is there up to that number, and publishing goes on
behind it. That holds only as long as records arrive in order and without a gap, so **one batch at a time** is under
way for each partition: the SDK may go on behind a batch that it has to give up, and this must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pyarrow as pa

from quiver.client.delivery import Deliveries
from quiver.client.sync import Cluster, Producer
from quiver.errors import ConflictError, QuiverError
from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.spark.ledger import PREFIX, Decision, Part

BATCH_BYTES: Final = 4 << 20
"""Size of staged batches, and so of those that are published: large, since they go one by one."""
NO_CUT_BYTES: Final = 32 << 20
"""Size at which the producer would cut what it is given: never, for what was staged as one batch."""


class Publisher:
    """Publish a writer's decisions; a writer without a name is one that nobody goes on for."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        self._cluster, self._ledger, self._writer = cluster, ledger, writer
        self._producers: dict[str, Producer] = {}

    def publish(self, decision: Decision) -> None:
        """Put into its topics what is not there yet; return when all of it is committed.

        Raises:
            ConflictError: a topic was made anew (`topic_recreated`), or has forgotten the writer (`forgotten`).
            FencedError: another process publishes for the writer now.
        """
        lanes = [lane for part in decision.parts if not (lane := self._open_lane(part)).is_done]
        try:
            while lanes:
                lanes = [lane for lane in lanes if lane.step()]
        except BaseException:
            for lane in lanes:
                lane.close()
            raise

    def close(self) -> None:
        """Publish no more; idempotent."""
        for producer in self._producers.values():
            with suppress(QuiverError):
                producer.abort()

    def _open_lane(self, part: Part) -> _Lane:
        producer = self._producers.get(part.topic)
        if producer is None:
            name = f"{PREFIX}publish.{self._writer}.{part.topic}" if self._writer else None
            producer = self._cluster.producer(part.topic, name=name, batch_bytes=NO_CUT_BYTES)
            self._producers[part.topic] = producer
        self._cluster.offsets(part.topic, {}, topic_id=part.topic_id)  # is it still the topic that was decided on?
        there = producer.next_sequence(part.partition) - part.first_sequence
        if not 0 <= there <= part.count:
            place = f"{part.topic!r} partition {part.partition}"
            message = f"{place} has {there} of {part.count} records of {self._writer!r}: it has forgotten this writer"
            raise ConflictError(message, code="forgotten")
        return _Lane(self._cluster, self._ledger, producer, part, skipped=there)


class _Lane:
    """The way into one partition: one batch at a time."""

    def __init__(self, cluster: Cluster, ledger: str, producer: Producer, part: Part, *, skipped: int) -> None:
        self.is_done = skipped == part.count
        self._producer, self._part = producer, part
        self._batches = _staged(cluster, ledger, part, skipped)
        self._sent: Deliveries | None = None

    def step(self) -> bool:
        """Wait for the batch that is under way and send the next; tell whether there was one."""
        if self._sent is not None:
            self._sent.result()
        batch = next(self._batches, None)
        self._sent = None if batch is None else self._producer.send_many(batch, partition=self._part.partition)
        return batch is not None

    def close(self) -> None:
        """Read no further."""
        self._batches.close()  # type: ignore[attr-defined] # a generator


def _staged(cluster: Cluster, ledger: str, part: Part, skipped: int) -> Iterator[Batch | pa.RecordBatch]:
    """Yield what was staged for a partition, without the records that are there already; whole batches as they are."""
    for place, first, end in part.spans:
        begin = min(end, first + skipped)
        skipped -= begin - first
        for batch in cluster.read_range(ledger, place, begin, end):
            is_whole = begin <= batch.header.base_offset and batch.header.end_offset <= end
            yield batch if is_whole else to_arrow(batch, Offset(begin), Offset(end))

"""Bring what was decided into its topics, once, however often it is begun.

A writer has one named producer for each target topic. Its sequences are dense, so that a partition's next sequence says
how many of the writer's records it has: what a decision puts there is there up to that number, and publishing goes on
behind it. That holds only as long as records arrive in order and without a gap, so **one batch at a time** is under
way for each partition: the SDK may go on behind a batch that it has to give up, and this must not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from quiver.client.chunks import cut_columns
from quiver.client.delivery import Deliveries
from quiver.client.sync import Cluster, Producer
from quiver.errors import ConflictError, QuiverError
from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.spark.ledger import PREFIX, PublishDecision, PublishPart

if TYPE_CHECKING:
    from quiver.client.chunks import ArrowColumns

BATCH_BYTES: Final = 4 << 20
"""Size of staged batches, and so of those that are published: large, since they go one by one."""
UNCUT_BYTES_MAX: Final = 32 << 20
"""Size at which the producer would cut what it is given: never, for what was staged as one batch."""


class Publisher:
    """Publish a writer's decisions; a writer without a name is one that nobody goes on for."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        self._cluster, self._ledger, self._writer = cluster, ledger, writer
        self._producers: dict[str, Producer] = {}

    def publish(self, decision: PublishDecision) -> None:
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

    def _open_lane(self, part: PublishPart) -> _PartitionPublisher:
        producer = self._producers.get(part.topic)
        if producer is None:
            name = f"{PREFIX}publish.{self._writer}.{part.topic}" if self._writer else None
            producer = self._cluster.producer(part.topic, name=name, batch_bytes=UNCUT_BYTES_MAX)
            self._producers[part.topic] = producer
        self._cluster.offsets(part.topic, {}, topic_id=part.topic_id)  # is it still the topic that was decided on?
        there = producer.next_sequence(part.partition) - part.first_sequence
        if not 0 <= there <= part.count:
            place = f"{part.topic!r} partition {part.partition}"
            message = f"{place} has {there} of {part.count} records of {self._writer!r}: it has forgotten this writer"
            raise ConflictError(message, code="forgotten")
        return _PartitionPublisher(self._cluster, self._ledger, producer, part, skipped=there)


class _PartitionPublisher:
    """The way into one partition: one batch at a time."""

    def __init__(self, cluster: Cluster, ledger: str, producer: Producer, part: PublishPart, *, skipped: int) -> None:
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


def _staged(cluster: Cluster, ledger: str, part: PublishPart, skipped: int) -> Iterator[Batch | pa.RecordBatch]:
    """Yield what was staged for a partition, without the records that are there already; whole batches as they are."""
    for place, first, end in part.spans:
        begin = min(end, first + skipped)
        skipped -= begin - first
        for batch in cluster.read_range(ledger, place, begin, end):
            is_whole = begin <= batch.header.base_offset and batch.header.end_offset <= end
            yield batch if is_whole else to_arrow(batch, Offset(begin), Offset(end))


class ResumableWriter:
    """Put records into a topic behind those that were put there before."""

    def __init__(self, cluster: Cluster, topic: str, name: str, bases: Mapping[int, int]) -> None:
        """Open the lane; `bases` says how many of its records lie before what is put in now, by partition."""
        self._topic, self._name, self._bases = topic, name, bases
        self._producer = cluster.producer(topic, name=name, batch_bytes=UNCUT_BYTES_MAX)
        self._there: dict[int, int] = {}
        """How many of the records to come each partition has already."""
        self._under_way: dict[int, Deliveries] = {}
        self.counts: Counter[int] = Counter()
        """How many records were put in, by partition, those that were there already among them."""
        self.sent_count = 0

    def put(self, partition: int, columns: ArrowColumns) -> None:
        """Send what the partition does not have of these records; returns before the last of them is acknowledged."""
        count = len(columns["value"])
        self.counts[partition] += count
        skipped = min(count, self._known(partition))
        self._there[partition] -= skipped
        rest: ArrowColumns = {name: column.slice(skipped) for name, column in columns.items()}
        for piece, _ in cut_columns(rest, BATCH_BYTES):
            self._settle(partition)
            self._under_way[partition] = self._producer.send_many(pa.table(piece), partition=partition)

    def finish(self) -> None:
        """Return when everything is committed."""
        for partition in list(self._under_way):
            self._settle(partition)
        self._producer.close()

    def abort(self) -> None:
        """Send nothing more; idempotent."""
        self._producer.abort()

    def _known(self, partition: int) -> int:
        if partition not in self._there:
            base = self._bases.get(partition, 0)
            there = self._producer.next_sequence(partition) - base
            if there < 0:
                message = (
                    f"{self._topic!r} partition {partition} had {base} records of {self._name!r} and knows of "
                    f"{base + there}: it has forgotten them, or was made anew"
                )
                raise ConflictError(message, code="forgotten")
            self._there[partition] = there
        return self._there[partition]

    def _settle(self, partition: int) -> None:
        sent = self._under_way.pop(partition, None)
        if sent is not None:
            sent.result()
            self.sent_count += len(sent)

"""Send a fixed order of records exactly once, across any number of restarts.

Both classes use a named producer whose sequences are dense: a partition's next sequence equals the number of the
producer's records that it stores. A restart asks for that number and skips as many records. Opening the producer
fences the previous process. This holds only if records are appended in order and without a gap, so only **one batch
per partition is in flight**: with several, the SDK could drop a failed batch and still append the next one.

`Publisher` sends the staged records of a sink's decisions. `ResumableWriter` sends records whose source is itself
repeatable: rows of an archive, lines of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from quiver.client.batching import cut_columns
from quiver.client.delivery import Deliveries
from quiver.client.sync import Cluster, Producer
from quiver.errors import ConflictError, QuiverError
from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.spark.ledger import PREFIX, PublishDecision, PublishPart

if TYPE_CHECKING:
    from quiver.client.batching import ArrowColumns

BATCH_BYTES: Final = 4 << 20
"""Size of staged and published batches: large, since only one per partition is in flight."""
UNCUT_BYTES_MAX: Final = 32 << 20
"""The producer's own batch limit: above `BATCH_BYTES`, so that it never splits a batch."""


class Publisher:
    """Publish a writer's decisions; a write without a name is never resumed."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        self._cluster, self._ledger, self._writer = cluster, ledger, writer
        self._producers: dict[str, Producer] = {}

    def publish(self, decision: PublishDecision) -> None:
        """Send the records that the target topics do not store yet; return when all are committed.

        Raises:
            ConflictError: a topic was recreated (`topic_recreated`), or its producer state expired (`forgotten`).
            FencedError: another process publishes for this writer.
        """
        publishers = [publisher for part in decision.parts if not (publisher := self._open_partition(part)).is_done]
        try:
            while publishers:
                publishers = [publisher for publisher in publishers if publisher.step()]
        except BaseException:
            for publisher in publishers:
                publisher.close()
            raise

    def close(self) -> None:
        """Stop all producers; idempotent."""
        for producer in self._producers.values():
            with suppress(QuiverError):
                producer.abort()

    def _open_partition(self, part: PublishPart) -> _PartitionPublisher:
        producer = self._producers.get(part.topic)
        if producer is None:
            name = f"{PREFIX}publish.{self._writer}.{part.topic}" if self._writer else None
            producer = self._cluster.producer(part.topic, name=name, batch_bytes=UNCUT_BYTES_MAX)
            self._producers[part.topic] = producer
        self._cluster.offsets(part.topic, {}, topic_id=part.topic_id)  # raises if the topic was recreated
        stored = producer.next_sequence(part.partition) - part.first_sequence
        if not 0 <= stored <= part.count:
            message = (
                f"topic {part.topic!r} partition {part.partition} reports sequence {part.first_sequence + stored} for "
                f"writer {self._writer!r}; expected {part.first_sequence} to {part.first_sequence + part.count}: its "
                "producer state expired. The batch was not published further; compare the topic with its source"
            )
            raise ConflictError(message, code="forgotten")
        return _PartitionPublisher(self._cluster, self._ledger, producer, part, skipped=stored)


class _PartitionPublisher:
    """Send the staged records of one partition, one batch at a time."""

    def __init__(self, cluster: Cluster, ledger: str, producer: Producer, part: PublishPart, *, skipped: int) -> None:
        self.is_done = skipped == part.count
        self._producer, self._part = producer, part
        self._batches = _staged(cluster, ledger, part, skipped)
        self._sent: Deliveries | None = None

    def step(self) -> bool:
        """Wait for the batch in flight, then send the next; return False if there is none."""
        if self._sent is not None:
            self._sent.result()
        batch = next(self._batches, None)
        self._sent = None if batch is None else self._producer.send_many(batch, partition=self._part.partition)
        return batch is not None

    def close(self) -> None:
        """Stop reading staged records."""
        self._batches.close()  # type: ignore[attr-defined] # a generator


def _staged(cluster: Cluster, ledger: str, part: PublishPart, skipped: int) -> Iterator[Batch | pa.RecordBatch]:
    """Yield a partition's staged records after the first `skipped`; whole batches are passed on without decoding."""
    for place, first, end in part.spans:
        begin = min(end, first + skipped)
        skipped -= begin - first
        for batch in cluster.read_range(ledger, place, begin, end):
            is_whole = begin <= batch.header.base_offset and batch.header.end_offset <= end
            yield batch if is_whole else to_arrow(batch, Offset(begin), Offset(end))


class ResumableWriter:
    """Send a repeatable sequence of records to a topic; skip those that the partitions already store."""

    def __init__(self, cluster: Cluster, topic: str, name: str, bases: Mapping[int, int]) -> None:
        """Open the named producer; `bases` has the number of its records before those sent now, by partition."""
        self._topic, self._name, self._bases = topic, name, bases
        self._producer = cluster.producer(topic, name=name, batch_bytes=UNCUT_BYTES_MAX)
        self._stored: dict[int, int] = {}
        """Records still to come that each partition already stores."""
        self._inflight: dict[int, Deliveries] = {}
        self.counts: Counter[int] = Counter()
        """Records passed to `put` by partition, including those skipped."""
        self.sent_count = 0

    def put(self, partition: int, columns: ArrowColumns) -> None:
        """Send the records that the partition does not store yet; return before the last batch is acknowledged."""
        count = len(columns["value"])
        self.counts[partition] += count
        skipped = min(count, self._count_stored(partition))
        self._stored[partition] -= skipped
        rest: ArrowColumns = {name: column.slice(skipped) for name, column in columns.items()}
        for piece, _ in cut_columns(rest, BATCH_BYTES):
            self._wait_inflight(partition)
            self._inflight[partition] = self._producer.send_many(pa.table(piece), partition=partition)

    def finish(self) -> None:
        """Wait until everything is committed, then close the producer."""
        for partition in list(self._inflight):
            self._wait_inflight(partition)
        self._producer.close()

    def abort(self) -> None:
        """Stop the producer without waiting; idempotent."""
        self._producer.abort()

    def _count_stored(self, partition: int) -> int:
        if partition not in self._stored:
            base = self._bases.get(partition, 0)
            stored = self._producer.next_sequence(partition) - base
            if stored < 0:
                message = (
                    f"topic {self._topic!r} partition {partition} reports {base + stored} records of producer "
                    f"{self._name!r}; expected at least {base}: the topic was recreated, or its producer state "
                    "expired. Nothing was sent to it; run the job under another name to start over"
                )
                raise ConflictError(message, code="forgotten")
            self._stored[partition] = stored
        return self._stored[partition]

    def _wait_inflight(self, partition: int) -> None:
        sent = self._inflight.pop(partition, None)
        if sent is not None:
            sent.result()
            self.sent_count += len(sent)

"""Bring records into a topic once, however often it is begun: a named producer, and an order that never changes.

A lane's records are the same, in the same order, whenever they are put into it: rows of an archive, lines of files. Its
producer's sequences are dense, so that a partition's next sequence says how many of the lane's records it has. Whoever
puts them in again has those left out; whoever still puts them in elsewhere is fenced off. That holds as long as records
arrive without a gap, so **one batch at a time** is under way for each partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from quiver.client.chunks import cut_columns
from quiver.client.delivery import Deliveries
from quiver.client.sync import Cluster
from quiver.errors import ConflictError
from quiver.spark.publishing import BATCH_BYTES, NO_CUT_BYTES

if TYPE_CHECKING:
    from quiver.client.chunks import ArrowColumns


class Lane:
    """Put records into a topic behind those that were put there before."""

    def __init__(self, cluster: Cluster, topic: str, name: str, bases: Mapping[int, int]) -> None:
        """Open the lane; `bases` says how many of its records lie before what is put in now, by partition."""
        self._topic, self._name, self._bases = topic, name, bases
        self._producer = cluster.producer(topic, name=name, batch_bytes=NO_CUT_BYTES)
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

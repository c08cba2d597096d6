"""Counts of log lines in a topic, each batch of a query once: through the ledger of the exactly-once sink.

A count is a record, keyed by what it is the count of; while its window is open it comes again with a larger number, and
the last one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa

from quiver.spark.connections import connection
from quiver.spark.ledger import ledger_of_query
from quiver.spark.options import Servers, WriteOptions
from quiver.spark.pipelines.line_counts import LineCount
from quiver.spark.sink import commit
from quiver.spark.staging import stage


class TopicCounts:
    """The counts of one query in a topic; on the driver."""

    def __init__(self, servers: Servers, topic: str) -> None:
        """Make the topic unless it is there."""
        connection(servers).create_topic(topic, exist_ok=True)
        self._options = WriteOptions(servers=servers, topic=topic)

    def write(self, query_id: str, batch_id: int, counts: Sequence[LineCount]) -> None:
        """Write a batch of a query, unless it was written before."""
        keys = pa.array(["|".join(map(str, own.key)) for own in counts], pa.string())
        values = pa.array([msgspec.json.encode(own) for own in counts], pa.binary())
        rows = pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])
        written = stage(iter([rows]), self._options, ledger=ledger_of_query(query_id), writer=query_id, task=0)
        commit(self._options.servers, [written], batch_id)

"""The writers that Spark sees: tasks stage, the driver decides and publishes, once for each (query, batch) or `txnId`.

What Spark does to a sink, and why it does no harm here: a task that is run again stages again, and only the winner is
decided on; a commit that raises is followed by an abort with the same messages, which must not undo what may be
decided, and by the same batch after a restart, which finds the decision and finishes it; a batch that was published is
not published again, whatever is staged for it. `docs/adr/0013-exactly-once-sink.md` has the argument.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import cache

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from quiver.client.sync import Cluster
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.spark.connections import connection
from quiver.spark.ledger import (
    JOURNAL,
    TRANSACTIONS,
    Decision,
    Journal,
    StagedPart,
    ledger_of_query,
    make_decision,
    release,
)
from quiver.spark.options import Servers, WriteOptions
from quiver.spark.publishing import Publisher
from quiver.spark.staging import Written, send, stage

logger = logging.getLogger(__name__)

_QUERY_ID = "sql.streaming.queryId"


class Sink:
    """One writer's decisions and publications, in the process that commits for it."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        self._cluster, self._ledger, self._writer = cluster, ledger, writer
        self._journal = Journal(cluster, ledger, writer)
        self._publisher = Publisher(cluster, ledger, writer)

    def commit(self, batch: int, staged: Sequence[StagedPart]) -> None:
        """Publish a batch, once: what was staged, or what was decided on when it was committed before."""
        last = self._journal.last
        if last is not None and last.batch > batch:
            logger.info("batch was published before", extra=facts(writer=self._writer, batch=batch, last=last.batch))
            return
        if last is None or last.batch < batch:
            if not staged:
                return
            last = self._journal.decide(batch, staged, _topic_ids(self._cluster, staged))
        self._publisher.publish(last)
        self._release(last)

    def close(self) -> None:
        """Write no more for this writer; idempotent."""
        self._journal.close()
        self._publisher.close()

    def _release(self, decision: Decision) -> None:
        """Let retention take what is published: everything before it, but not the decision itself."""
        if self._ledger == TRANSACTIONS:
            return
        cursors = {JOURNAL: self._journal.last_offset}
        for part in decision.parts:
            for place, _, end in part.spans:
                cursors[place] = max(end, cursors.get(place, 0))
        release(self._cluster, self._ledger, cursors)


def commit(servers: Servers, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
    """Publish what tasks have staged, if they have staged anything; on the driver."""
    written = [message for message in messages if isinstance(message, Written)]
    staged = [part for message in written for part in message.parts]
    if not written or not written[0].ledger:
        return
    ledger, writer = written[0].ledger, written[0].writer
    if not writer:
        publish_unnamed(connection(servers), ledger, staged)
        return
    sink = _sink(servers, ledger, writer, os.getpid())
    try:
        sink.commit(batch, staged)
    except QuiverError:
        # Another process may write for the query now: whoever tries again must look anew.
        sink.close()
        _sink.cache_clear()
        raise


def publish_unnamed(cluster: Cluster, ledger: str, staged: Sequence[StagedPart]) -> None:
    """Publish what tasks have staged for a write that has no `txnId`: nobody would go on with it."""
    ids = _topic_ids(cluster, staged)
    publisher = Publisher(cluster, ledger, "")
    try:
        publisher.publish(make_decision("", 0, staged, topic_ids=ids, totals={}))
    finally:
        publisher.close()


def _topic_ids(cluster: Cluster, staged: Sequence[StagedPart]) -> dict[str, int]:
    return {topic: cluster.offsets(topic, {}).topic_id for topic in {part.topic for part in staged}}


@cache
def _sink(servers: Servers, ledger: str, writer: str, _process: int) -> Sink:
    return Sink(connection(servers), ledger, writer)


class BatchWriter(DataSourceArrowWriter):
    """Write a DataFrame: all of it or, if a task fails for good, nothing; once, under a `txnId`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as Spark's
        """Stage a task's rows; on an executor."""
        if not self._options.is_exactly_once:
            return send(iterator, self._options, task=_task())
        return stage(iterator, self._options, ledger=TRANSACTIONS, writer=self._options.transaction_id, task=_task())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish; on the driver."""
        commit(self._options.servers, messages, 0)


class StreamWriter(DataSourceStreamArrowWriter):
    """Write micro-batches, each of them once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as Spark's
        """Stage a task's rows; on an executor."""
        if not self._options.is_exactly_once:
            return send(iterator, self._options, task=_task())
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY_ID)
        assert query, "Spark did not tell which query this is"
        return stage(iterator, self._options, ledger=ledger_of_query(query), writer=query, task=_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish, unless it was done before; on the driver."""
        commit(self._options.servers, messages, batchId)


def _task() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()

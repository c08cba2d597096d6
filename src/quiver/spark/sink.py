"""The exactly-once sink: tasks stage rows, the driver decides and publishes, once per (query, batch) or `txnId`.

Tasks run on executors, whose processes and producers are reused. Staged records of a failed task attempt are named by
no decision; retention removes them. With `delivery=atLeastOnce` tasks send rows directly to their topics.

The sink tolerates everything that Spark does to it. A task that is retried stages again, and only the winning attempt
is decided on. A commit that raises is followed by an abort with the same messages, which undoes nothing, because the
decision may be stored; the same batch comes again after a restart, finds the decision and finishes it. A published
batch is never published again, whatever is staged for it. `docs/adr/0013-exactly-once-sink.md` has the argument.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Final, Literal

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from quiver.client.batching import cut_columns
from quiver.client.delivery import Deliveries
from quiver.client.sync import Cluster, Producer
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.spark.columns import split_rows
from quiver.spark.connections import Servers, connection
from quiver.spark.ledger import (
    JOURNAL,
    STAGING_PARTITIONS,
    TRANSACTIONS,
    Journal,
    PublishDecision,
    StagedPart,
    ledger_of_query,
    make_decision,
    open_ledger,
    release_before,
)
from quiver.spark.options import WriteOptions
from quiver.spark.publishing import BATCH_BYTES, Publisher

STAGING_BUFFER_BYTES: Final = 128 << 20
"""Maximum bytes in flight per task."""


class TaskCommit(WriterCommitMessage):
    """A task's commit message to the driver: ledger, writer and staged parts; empty if rows were sent directly."""

    def __init__(self, ledger: str, writer: str, parts: tuple[StagedPart, ...]) -> None:
        self.ledger = ledger
        self.writer = writer
        self.parts = parts


def stage_rows(
    rows: Iterator[pa.RecordBatch], options: WriteOptions, *, ledger: str, writer: str, task: int
) -> TaskCommit:
    """Write a task's rows durably into the ledger; return their offsets there. Runs in a task."""
    cluster = connection(options.servers)
    _open_once(options.servers, ledger)
    place = 1 + task % STAGING_PARTITIONS
    sent: dict[tuple[str, int], list[Deliveries]] = {}
    with _producer_for(options, ledger) as producer:
        for target, piece in _RowRouter(cluster, options.topic, task).pieces(rows):
            sent.setdefault(target, []).append(producer.send_many(piece, partition=place))
        parts = tuple(_staged_part(target, deliveries) for target, deliveries in sent.items())
    return TaskCommit(ledger, writer, parts)


def send(rows: Iterator[pa.RecordBatch], options: WriteOptions, *, task: int) -> TaskCommit:
    """Send a task's rows to their topics, at least once: a retried task sends them again. Runs in a task."""
    sent: list[Deliveries] = []
    with ExitStack() as stack:
        producers: dict[str, Producer] = {}
        for (topic, partition), piece in _RowRouter(connection(options.servers), options.topic, task).pieces(rows):
            if topic not in producers:
                producers[topic] = stack.enter_context(_producer_for(options, topic))
            sent.append(producers[topic].send_many(piece, partition=partition))
        for deliveries in sent:
            deliveries.result()
    return TaskCommit("", "", ())


class _RowRouter:
    """Assign a task's rows to topics and partitions."""

    def __init__(self, cluster: Cluster, topic: str, task: int) -> None:
        self._cluster, self._topic = cluster, topic
        self._counts: dict[str, int] = {}
        self._next = task

    def pieces(self, rows: Iterator[pa.RecordBatch]) -> Iterator[tuple[tuple[str, int], pa.Table]]:
        """Yield rows as tables of about one batch, each for one target partition."""
        for batch in rows:
            for (topic, wanted), columns in split_rows(batch, self._topic, self._count):
                for piece, _ in cut_columns(columns, BATCH_BYTES):
                    partition = self._next_partition(topic) if wanted is None else wanted
                    yield (topic, partition), pa.table(piece)

    def _count(self, topic: str) -> int:
        if topic not in self._counts:
            self._counts[topic] = len(self._cluster.offsets(topic, "earliest").offsets)
        return self._counts[topic]

    def _next_partition(self, topic: str) -> int:
        self._next += 1
        return self._next % self._count(topic)


def _staged_part(target: tuple[str, int], deliveries: list[Deliveries]) -> StagedPart:
    spans = (span for one in deliveries for span in one.result())
    places = tuple((span.partition, span.first_offset, span.first_offset + span.count) for span in spans)
    return StagedPart(*target, places)


@contextmanager
def _producer_for(options: WriteOptions, topic: str) -> Iterator[Producer]:
    """Yield this process's producer for a topic; drop cached producers after an error."""
    try:
        yield _producer(options.servers, topic, options.compression, os.getpid())
    except QuiverError:
        _producer.cache_clear()
        raise


@cache
def _producer(servers: Servers, topic: str, compression: Literal["lz4", "zstd"] | None, _process: int) -> Producer:
    return connection(servers).producer(
        topic, batch_bytes=BATCH_BYTES, buffer_bytes=STAGING_BUFFER_BYTES, compression=compression
    )


@cache
def _open_once(servers: Servers, ledger: str) -> None:
    open_ledger(connection(servers), ledger)


logger = logging.getLogger(__name__)

_QUERY_ID = "sql.streaming.queryId"


class ExactlyOnceSink:
    """Decide and publish the batches of one writer, in the driver process."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        self._cluster, self._ledger, self._writer = cluster, ledger, writer
        self._journal = Journal(cluster, ledger, writer)
        self._publisher = Publisher(cluster, ledger, writer)

    def commit(self, batch: int, staged: Sequence[StagedPart]) -> None:
        """Publish a batch once: the stored decision if there is one, else what was staged now."""
        last = self._journal.last
        if last is not None and last.batch > batch:
            logger.info("batch is already published", extra=facts(writer=self._writer, batch=batch, last=last.batch))
            return
        if last is None or last.batch < batch:
            if not staged:
                return
            last = self._journal.decide(batch, staged, _topic_ids(self._cluster, staged))
        self._publisher.publish(last)
        self._release(last)

    def close(self) -> None:
        """Stop the journal and the publisher; idempotent."""
        self._journal.close()
        self._publisher.close()

    def _release(self, decision: PublishDecision) -> None:
        """Allow retention to remove published staged records, and journal entries before this decision."""
        if self._ledger == TRANSACTIONS:
            return
        cursors = {JOURNAL: self._journal.last_offset}
        for part in decision.parts:
            for place, _, end in part.spans:
                cursors[place] = max(end, cursors.get(place, 0))
        release_before(self._cluster, self._ledger, cursors)


def commit(servers: Servers, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
    """Publish what tasks staged, if anything. Runs on the driver."""
    written = [message for message in messages if isinstance(message, TaskCommit)]
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
        # Another process may have taken over the query: a retry must read the journal again.
        sink.close()
        _sink.cache_clear()
        raise


def publish_unnamed(cluster: Cluster, ledger: str, staged: Sequence[StagedPart]) -> None:
    """Publish the staged records of a write without `txnId`, which is never resumed."""
    ids = _topic_ids(cluster, staged)
    publisher = Publisher(cluster, ledger, "")
    try:
        publisher.publish(make_decision("", 0, staged, topic_ids=ids, totals={}))
    finally:
        publisher.close()


def _topic_ids(cluster: Cluster, staged: Sequence[StagedPart]) -> dict[str, int]:
    return {topic: cluster.offsets(topic, {}).topic_id for topic in {part.topic for part in staged}}


@cache
def _sink(servers: Servers, ledger: str, writer: str, _process: int) -> ExactlyOnceSink:
    return ExactlyOnceSink(connection(servers), ledger, writer)


class BatchWriter(DataSourceArrowWriter):
    """Write a DataFrame: all rows, or none if a task fails permanently; exactly once with a `txnId`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as Spark's
        """Stage a task's rows. Runs on an executor."""
        if not self._options.is_exactly_once:
            return send(iterator, self._options, task=_task())
        return stage_rows(
            iterator, self._options, ledger=TRANSACTIONS, writer=self._options.transaction_id, task=_task()
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the staged rows. Runs on the driver."""
        commit(self._options.servers, messages, 0)


class StreamWriter(DataSourceStreamArrowWriter):
    """Write micro-batches, each exactly once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as Spark's
        """Stage a task's rows. Runs on an executor."""
        if not self._options.is_exactly_once:
            return send(iterator, self._options, task=_task())
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY_ID)
        assert query, "Spark did not tell which query this is"
        return stage_rows(iterator, self._options, ledger=ledger_of_query(query), writer=query, task=_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish the batch, unless it is already published. Runs on the driver."""
        commit(self._options.servers, messages, batchId)


def _task() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()

"""A task's side of a write: rows into the ledger, or, at least once, straight into their topics.

Runs on executors, whose processes are reused, and their producers with them. A task attempt that fails leaves staged
records that no decision ever names; retention removes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Final, Literal

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from quiver.client.chunks import cut_columns
from quiver.client.delivery import Deliveries
from quiver.client.sync import Cluster, Producer
from quiver.errors import QuiverError
from quiver.spark.connections import connection
from quiver.spark.ledger import STAGING_PARTITIONS, StagedPart, open_ledger
from quiver.spark.options import Servers, WriteOptions
from quiver.spark.publishing import BATCH_BYTES
from quiver.spark.rows import split_rows

STAGING_BUFFER_BYTES: Final = 128 << 20
"""Bytes of a task that may be on their way at once."""


class Written(WriterCommitMessage):
    """What a task tells the driver: who writes, and what was staged; nothing if its rows are in their topics."""

    def __init__(self, ledger: str, writer: str, parts: tuple[StagedPart, ...]) -> None:
        self.ledger = ledger
        self.writer = writer
        self.parts = parts


def stage(rows: Iterator[pa.RecordBatch], options: WriteOptions, *, ledger: str, writer: str, task: int) -> Written:
    """Write a task's rows into the ledger, durably; return where they are."""
    cluster = connection(options.servers)
    _open_once(options.servers, ledger)
    place = 1 + task % STAGING_PARTITIONS
    sent: dict[tuple[str, int], list[Deliveries]] = {}
    with _producer_for(options, ledger) as producer:
        for target, piece in _Router(cluster, options.topic, task).pieces(rows):
            sent.setdefault(target, []).append(producer.send_many(piece, partition=place))
        parts = tuple(_staged_part(target, deliveries) for target, deliveries in sent.items())
    return Written(ledger, writer, parts)


def send(rows: Iterator[pa.RecordBatch], options: WriteOptions, *, task: int) -> Written:
    """Write a task's rows into their topics: at least once, since a task that is run again writes them again."""
    sent: list[Deliveries] = []
    with ExitStack() as stack:
        producers: dict[str, Producer] = {}
        for (topic, partition), piece in _Router(connection(options.servers), options.topic, task).pieces(rows):
            if topic not in producers:
                producers[topic] = stack.enter_context(_producer_for(options, topic))
            sent.append(producers[topic].send_many(piece, partition=partition))
        for deliveries in sent:
            deliveries.result()
    return Written("", "", ())


class _Router:
    """Decide where a task's rows go."""

    def __init__(self, cluster: Cluster, topic: str, task: int) -> None:
        self._cluster, self._topic = cluster, topic
        self._counts: dict[str, int] = {}
        self._turn = task

    def pieces(self, rows: Iterator[pa.RecordBatch]) -> Iterator[tuple[tuple[str, int], pa.Table]]:
        """Yield rows as tables of about one batch, each for one partition."""
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
        self._turn += 1
        return self._turn % self._count(topic)


def _staged_part(target: tuple[str, int], deliveries: list[Deliveries]) -> StagedPart:
    spans = (span for one in deliveries for span in one.result())
    places = tuple((span.partition, span.first_offset, span.first_offset + span.count) for span in spans)
    return StagedPart(*target, places)


@contextmanager
def _producer_for(options: WriteOptions, topic: str) -> Iterator[Producer]:
    """Give this process's producer for a topic; one that has failed is not used again."""
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

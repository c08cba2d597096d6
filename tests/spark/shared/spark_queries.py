"""What the tests on Spark share: reads, streams that run to the end of what is there, and their results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from quiver.testing import LocalCluster

TRIM_TIMEOUT_S = 120


def reading(spark: SparkSession, local: LocalCluster, topic: str, **options: str) -> DataFrame:
    """Return a batch read of a topic."""
    given = {"subscribe": topic, "servers": ",".join(local.addresses), **options}
    return spark.read.format("quiver").options(**given).load()


def streaming(spark: SparkSession, local: LocalCluster, topic: str, **options: str) -> DataFrame:
    """Return a stream of a topic from its beginning."""
    given = {"subscribe": topic, "servers": ",".join(local.addresses), "startingOffsets": "earliest", **options}
    return spark.readStream.format("quiver").options(**given).load()


def into_files(frame: DataFrame, folder: Path) -> DataStreamWriter:
    """Return a stream into Parquet files, which is yet to be started."""
    writer = frame.writeStream.format("parquet").option("path", str(folder / "out"))
    return writer.option("checkpointLocation", str(folder / "checkpoint"))


def run_to_end(frame: DataFrame, folder: Path) -> StreamingQuery:
    """Write what there is into Parquet files and return when all of it is written."""
    query = into_files(frame, folder).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def batch_sizes(query: StreamingQuery) -> list[int]:
    """Return how many rows each micro-batch had."""
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def values(frame: DataFrame) -> list[tuple[int, int, str]]:
    """Return partition, offset and text of every row, sorted."""
    rows: list[Any] = frame.select("partition", "offset", frame["value"].cast("string")).collect()
    return sorted(tuple(row) for row in rows)


def expected(*counts: int, first: int = 0, text: str = "{partition}-{offset}") -> list[tuple[int, int, str]]:
    """Return what `values` returns of a topic that `fill` filled."""
    return [
        (partition, offset, text.format(partition=partition, offset=offset))
        for partition, count in enumerate(counts)
        for offset in range(first, count)
    ]


def fill(client: Any, topic: str, *counts: int, first: int = 0) -> None:
    """Make a topic with so many records in each partition; each record says where it is."""
    client.create_topic(topic, partitions=len(counts), exist_ok=True)
    with client.producer(topic, batch_bytes=2000) as producer:
        for partition, count in enumerate(counts):
            producer.send_many([f"{partition}-{offset}" for offset in range(first, count)], partition=partition)


def fill_until_trimmed(client: Any, topic: str, *, above: int = 0) -> tuple[int, int]:
    """Send records into partition 0 until retention has removed some beyond an offset; return where they begin, end."""
    deadline_s = time.monotonic() + TRIM_TIMEOUT_S
    with client.producer(topic, batch_bytes=2000) as producer:
        while client.offsets(topic, "earliest").offsets[0] <= above:
            assert time.monotonic() < deadline_s, "nothing was trimmed"
            producer.send_many(["x" * 500] * 50, partition=0).result()
            time.sleep(0.5)
    first = -1
    while first != (first := client.offsets(topic, "earliest").offsets[0]):
        time.sleep(1)
    return first, client.offsets(topic).offsets[0]

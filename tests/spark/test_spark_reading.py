"""Batch reads: exactly what lies between two bounds, in the columns that were asked for."""

from __future__ import annotations

import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from spark_queries import expected, fill, fill_until_trimmed, reading, values

import quiver
from quiver.testing import LocalCluster


def test_batch_read_returns_every_record_of_every_partition(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    fill(client, topic, 500, 0, 300)
    assert values(reading(spark, local, topic)) == expected(500, 0, 300)


def test_empty_topic_has_no_rows(spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str) -> None:
    fill(client, topic, 0, 0)
    assert reading(spark, local, topic).collect() == []
    assert reading(spark, local, topic).count() == 0


def test_rows_carry_all_that_a_record_is(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    with client.producer(topic) as producer:
        producer.send("with", key="k", timestamp=1_700_000_000_123, headers=[("a", b"\x00"), ("b", None)])
        producer.send(None, timestamp=1_700_000_000_124)
    first, second = reading(spark, local, topic, includeHeaders="true").orderBy("offset").collect()
    assert first["topic"] == topic
    assert (first["partition"], first["offset"]) == (0, 0)
    assert first["timestamp"] == datetime.fromtimestamp(1_700_000_000.123)  # noqa: DTZ006 - as Spark shows it
    assert (bytes(first["key"]), bytes(first["value"])) == (b"k", b"with")
    assert [(header["key"], header["value"]) for header in first["headers"]] == [("a", b"\x00"), ("b", None)]
    assert (second["key"], second["value"], second["headers"]) == (None, None, None)


def test_only_the_columns_asked_for_are_read(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    fill(client, topic, 3)
    frame = reading(spark, local, topic, columns="offset,value")
    assert frame.columns == ["offset", "value"]
    assert [row["offset"] for row in frame.collect()] == [0, 1, 2]


@pytest.mark.parametrize("is_pushed", [True, False])
def test_filters_on_places_are_answered_by_reading_less(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, is_pushed: bool
) -> None:
    client.create_topic(topic, partitions=3)
    with client.producer(topic) as producer:
        for partition in range(3):
            for offset in range(10):
                producer.send(f"{partition}-{offset}", partition=partition, timestamp=1000 + offset)
    setting = "spark.sql.python.filterPushdown.enabled"
    assert spark.conf.get(setting) == "true"
    spark.conf.set(setting, str(is_pushed).lower())
    try:
        placed = reading(spark, local, topic).where("partition IN (0, 2) AND offset >= 4 AND offset < 6")
        assert values(placed) == [(0, 4, "0-4"), (0, 5, "0-5"), (2, 4, "2-4"), (2, 5, "2-5")]
        assert placed.rdd.getNumPartitions() == (2 if is_pushed else 3)
        assert ("Filter (" in plan_of(placed)) is not is_pushed
        late = reading(spark, local, topic).where("timestamp >= timestamp_millis(1008) AND partition = 1")
        assert values(late) == [(1, 8, "1-8"), (1, 9, "1-9")]
        assert reading(spark, local, topic).where("offset > 9").count() == 0
    finally:
        spark.conf.set(setting, "true")


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_bounds_are_offsets_words_or_times(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    client.create_topic(topic, partitions=2)
    with client.producer(topic) as producer:
        for offset in range(10):
            for partition in range(2):
                producer.send(f"{partition}-{offset}", partition=partition, timestamp=1000 + offset)
    by_offset = reading(
        spark,
        local,
        topic,
        startingOffsets=f'{{"{topic}": {{"0": 7}}}}',
        endingOffsets=f'{{"{topic}": {{"0": 9, "1": 1}}}}',
    )
    assert values(by_offset) == [(0, 7, "0-7"), (0, 8, "0-8"), (1, 0, "1-0")]
    by_time = reading(
        spark, local, topic, startingTimestamp="1008", endingOffsetsByTimestamp=f'{{"{topic}": {{"0": 1009}}}}'
    )
    assert values(by_time) == [(0, 8, "0-8"), (1, 8, "1-8"), (1, 9, "1-9")]
    assigned = reading(spark, local, topic, subscribe="", assign=f'{{"{topic}": [1]}}')
    assert values(assigned) == [(1, offset, f"1-{offset}") for offset in range(10)]


def test_pattern_reads_all_topics_that_match(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    for suffix in ("a", "b", "c"):
        fill(client, f"{topic}-{suffix}", 2)
    frame = reading(spark, local, topic, subscribe="", subscribePattern=f"{topic}-[ab]")
    counted = {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert counted == {f"{topic}-a": 2, f"{topic}-b": 2}


def test_large_partition_is_read_by_several_tasks(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    with client.producer(topic) as producer:
        producer.send_many([b"%d" % number for number in range(100_000)])
    frame = reading(spark, local, topic, minPartitions="4", columns="offset,value")
    assert frame.rdd.getNumPartitions() == 4
    found = frame.selectExpr(
        "count(*) AS rows", "count(DISTINCT offset) AS offsets", "sum(CAST(CAST(value AS STRING) AS BIGINT)) AS total"
    ).first()
    assert found is not None
    assert tuple(found) == (100_000, 100_000, sum(range(100_000)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bogus": "1"}, "unknown option 'bogus'"),
        ({"startingOffsets": '{"other": {"0": 1}}'}, "which this query does not read"),
        ({"subscribe": "no-such-topic"}, "unknown topic 'no-such-topic'"),
        ({"subscribe": "", "subscribePattern": "nothing-.*"}, "no topic matches"),
    ],
)
def test_bad_options_are_told_in_a_sentence(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, options: dict[str, str], sentence: str
) -> None:
    fill(client, topic, 1)
    with pytest.raises(PySparkException, match=sentence):
        reading(spark, local, topic, **options).collect()


def test_offset_past_the_end_is_an_error(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    fill(client, topic, 3)
    with pytest.raises(PySparkException, match="offset 4 is beyond the end 3 of"):
        reading(spark, local, topic, endingOffsets=f'{{"{topic}": {{"0": 4}}}}').collect()


def test_range_that_retention_removed_is_an_error_or_is_left_out(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    client.create_topic(topic, partitions=1, retention=quiver.RetentionInfo(bytes=20_000))
    first, end = fill_until_trimmed(client, topic)
    start = f'{{"{topic}": {{"0": 0}}}}'
    with pytest.raises(PySparkException, match="retention removed offsets 0 to "):
        reading(spark, local, topic, startingOffsets=start).collect()
    rows = values(reading(spark, local, topic, startingOffsets=start, failOnDataLoss="false"))
    assert [offset for _, offset, _ in rows] == list(range(first, end))


@pytest.mark.slow
def test_task_goes_on_when_its_leader_dies_in_mid_read(spark: SparkSession, topic: str, folder: Path) -> None:
    count, size_bytes = 60, 1_000_000  # more than what lies between a broker and a task that does not read on
    begun, killed = folder / "begun", folder / "killed"
    with LocalCluster(nodes=3) as local, local.connect() as client:
        client.create_topic(topic, partitions=1)
        with client.producer(topic) as producer:
            for number in range(count):
                producer.send(b"%03d" % number + b"x" * size_bytes)

        def pause(row: Row) -> tuple[int, str]:
            if row["offset"] == 1:
                begun.touch()
                while not killed.exists():
                    time.sleep(0.05)
            return row["offset"], bytes(row["value"][:3]).decode()

        def kill_leader() -> None:
            while not begun.exists():
                time.sleep(0.05)
            local.kill(client.describe_topic(topic).partitions[0].leader or 1)
            killed.touch()

        killer = threading.Thread(target=kill_leader)
        killer.start()
        frame = reading(spark, local, topic, minPartitions="1", batchRecords="1")
        rows = frame.select("offset", "value").rdd.map(pause).collect()  # large rows are passed on one by one
        killer.join()
    assert rows == [(number, f"{number:03}") for number in range(count)]

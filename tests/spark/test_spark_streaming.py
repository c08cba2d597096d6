"""Stream reads: every record in exactly one micro-batch, whatever happens to the query, the topic or its leaders."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from spark_queries import batch_sizes, expected, fill, fill_until_trimmed, into_files, run_to_end, streaming, values

import quiver
from quiver.testing import LocalCluster

WAIT_S = 60


def test_stream_goes_on_where_its_checkpoint_is(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 100, 50)
    assert sum(batch_sizes(run_to_end(streaming(spark, local, topic), folder))) == 150
    fill(client, topic, 120, 60)  # 120 and 60 more
    assert sum(batch_sizes(run_to_end(streaming(spark, local, topic), folder))) == 180
    rows = values(spark.read.parquet(str(folder / "out")))
    assert [(partition, offset) for partition, offset, _ in rows] == [
        (partition, offset) for partition, count in enumerate((220, 110)) for offset in range(count)
    ]


def test_limit_per_trigger_holds_and_available_now_reads_all(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 90, 10)
    query = run_to_end(streaming(spark, local, topic, maxOffsetsPerTrigger="40"), folder)
    assert batch_sizes(query) == [40, 40, 20]
    assert values(spark.read.parquet(str(folder / "out"))) == expected(90, 10)


def test_progress_shows_how_far_topics_go(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 10)
    query = run_to_end(streaming(spark, local, topic, maxOffsetsPerTrigger="4"), folder)
    shown = json.loads(query.recentProgress[0]["sources"][0]["latestOffset"])
    assert shown["topics"][topic]["p"] == {"0": 10}


def test_query_with_a_name_is_a_consumer_with_its_lag_to_the_last_batch(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 10)
    name = f"{topic}-report"
    run_to_end(streaming(spark, local, topic, maxOffsetsPerTrigger="4", groupId=name), folder)
    (consumer,) = client.clients("consumer", topic)
    assert consumer.name == name
    assert [(lag.cursor, lag.lag) for lag in client.lag(consumer.id)] == [(10, 0)]
    fill(client, topic, 5)
    assert [lag.lag for lag in client.lag(consumer.id)] == [5]
    address = client.brokers()[0].http_address
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        assert f'quiver_consumer_lag_records{{consumer="{name}",topic="{topic}"}} 5\n' in page.read().decode()
    client.forget("consumer", consumer.id)
    run_to_end(streaming(spark, local, topic, groupId=name), folder)
    (consumer,) = client.clients("consumer", topic)
    assert [lag.lag for lag in client.lag(consumer.id)] == [0]


def test_new_partitions_are_read_from_their_beginning(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 5)
    run_to_end(streaming(spark, local, topic), folder)
    client.add_partitions(topic, 2)
    client.producer(topic).send_many(["1-0", "1-1"], partition=1).result()
    run_to_end(streaming(spark, local, topic), folder)
    assert values(spark.read.parquet(str(folder / "out"))) == expected(5, 2)


def test_new_partitions_are_read_while_the_query_runs(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 5)
    frame = streaming(spark, local, topic)
    query = into_files(frame, folder).start()
    try:
        query.processAllAvailable()
        client.add_partitions(topic, 3)
        client.producer(topic).send_many(["2-0", "2-1"], partition=2).result()
        _wait_for_rows(query, 7)
    finally:
        query.stop()
    assert values(spark.read.parquet(str(folder / "out"))) == expected(5, 0, 2)


def test_records_that_retention_removed_are_an_error_or_are_counted(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    client.create_topic(topic, partitions=1, retention=quiver.RetentionInfo(bytes=20_000))
    fill(client, topic, 5)
    run_to_end(streaming(spark, local, topic), folder)
    first, end = fill_until_trimmed(client, topic, above=5)
    with pytest.raises(StreamingQueryException, match=f"retention removed offsets 5 to .* now begins at {first}"):
        run_to_end(streaming(spark, local, topic), folder)
    query = run_to_end(streaming(spark, local, topic, failOnDataLoss="false"), folder)
    reached = json.loads(query.recentProgress[-1]["sources"][0]["endOffset"])["topics"][topic]
    assert (reached["p"], reached["lost"]) == ({"0": end}, first - 5)
    offsets = [offset for _, offset, _ in values(spark.read.parquet(str(folder / "out")))]
    assert offsets == [*range(5), *range(first, end)]


def test_bytes_per_trigger_are_kept_to_about(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    client.create_topic(topic, partitions=1)
    with client.producer(topic, batch_bytes=5000) as producer:
        producer.send_many([b"x" * 1000] * 200)
    query = run_to_end(streaming(spark, local, topic, maxBytesPerTrigger="50000"), folder)
    sizes = batch_sizes(query)
    assert sum(sizes) == 200
    assert 35 <= max(sizes) <= 50


def test_options_that_mean_nothing_for_a_stream_are_told_in_a_sentence(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 1)
    with pytest.raises(PySparkException, match="option endingOffsets is not valid for a stream read"):
        run_to_end(streaming(spark, local, topic, endingOffsets="latest", groupId="g"), folder)


def test_topic_that_was_made_anew_is_an_error_or_is_read_from_its_beginning(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 5)
    run_to_end(streaming(spark, local, topic), folder)
    client.delete_topic(topic)
    fill(client, topic, 8)
    with pytest.raises(StreamingQueryException, match="was recreated, or is in another cluster"):
        run_to_end(streaming(spark, local, topic), folder)
    query = run_to_end(streaming(spark, local, topic, failOnDataLoss="false"), folder)
    assert batch_sizes(query) == [8]


def test_stream_waits_for_enough_records_but_not_for_ever(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 5)
    frame = streaming(spark, local, topic, minOffsetsPerTrigger="10", maxTriggerDelay="1h")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(folder)).start()
    try:
        time.sleep(3)
        assert batch_sizes(query) == []
        client.producer(topic).send_many(["x"] * 5, partition=0).result()
        query.processAllAvailable()
        assert batch_sizes(query) == [10]
    finally:
        query.stop()


@pytest.mark.slow
def test_stream_survives_the_death_of_leaders(spark: SparkSession, topic: str, folder: Path) -> None:
    with LocalCluster(nodes=3) as local, local.connect() as client:
        fill(client, topic, 4000, 4000)
        frame = streaming(spark, local, topic, maxOffsetsPerTrigger="500")
        query = into_files(frame, folder).start()
        try:
            _wait_for_batches(query, 3)
            local.kill(client.describe_topic(topic).partitions[0].leader or 1)
            query.processAllAvailable()
        finally:
            query.stop()
        assert values(spark.read.parquet(str(folder / "out"))) == expected(4000, 4000)


def _wait_for_batches(query: Any, count: int) -> None:
    while len(query.recentProgress) < count:
        assert query.isActive
        time.sleep(0.2)


def _wait_for_rows(query: Any, count: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while sum(batch_sizes(query)) < count:
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)

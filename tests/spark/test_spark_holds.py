"""Retention waits for running queries: what one has not read stays, and goes once the query has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession
from spark_queries import fill, streaming

import quiver
from quiver.testing import LocalCluster

WAIT_S = 120


def wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_running_query_pins_what_it_has_not_read(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    client.create_topic(topic, partitions=1, retention=quiver.RetentionInfo(bytes=4096))
    fill(client, topic, 200)
    frame = streaming(spark, local, topic, holdTimeout="10m", minOffsetsPerTrigger="1000000", maxTriggerDelay="1h")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(folder)).start()
    try:
        wait(lambda: any(hold.topic == topic for hold in client.holds()))
        (hold,) = [hold for hold in client.status().holds if hold.topic == topic]
        assert dict(hold.offsets) == {0: 0}
        assert hold.owner.startswith("Spark query on ")
        for _ in range(5):
            client.producer(topic).send_many(["x" * 500] * 100, partition=0).result()
            time.sleep(0.5)
        assert client.offsets(topic, "earliest").offsets == {0: 0}
    finally:
        query.stop()
    wait(lambda: not any(hold.topic == topic for hold in client.holds()))
    wait(lambda: client.offsets(topic, "earliest").offsets[0] > 0)


def test_finished_query_leaves_no_hold(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, 20)
    frame = streaming(spark, local, topic, holdTimeout="10m")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(folder)).trigger(availableNow=True)
    query.start().awaitTermination()
    wait(lambda: not any(hold.topic == topic for hold in client.holds()))

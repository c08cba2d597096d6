"""The replay pipeline on Spark, against a real cluster: archived, wiped, replayed, the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_commands import in_topic, run_job
from pyspark.sql import SparkSession
from spark_queries import fill

import quiver
from quiver.spark.pipelines import replay as replay_module
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.replay import Replay
from quiver.testing import LocalCluster


def test_wiped_topic_is_replayed_with_its_content_and_order(
    spark: SparkSession,
    local: LocalCluster,
    client: quiver.Cluster,
    topic: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "BATCH_OFFSETS", 700)
    servers, lake = ",".join(local.addresses), str(folder / "lake")
    fill(client, topic, 2000, 10, 900)
    with client.producer(topic) as producer:
        producer.send(None, key="k", partition=1, timestamp=1_700_000_000_123, headers=[("a", b"\x00"), ("b", None)])
    before = [in_topic(client, topic, partition) for partition in range(3)]
    run_job(spark, Archive(servers=servers, topic=topic, to=lake))
    client.delete_topic(topic)
    for sent in (2911, 0):
        assert run_job(spark, Replay(servers=servers, from_=lake, topic=topic)).facts["sent"] == sent
        assert [in_topic(client, topic, partition) for partition in range(3)] == before

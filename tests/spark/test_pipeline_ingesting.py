"""The ingest pipeline on Spark, and the way round: files in, archived, wiped, replayed; killed in the middle."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest
from pipeline_commands import in_lake, in_topic, kill, run_job, start
from pyspark.sql import SparkSession

import quiver
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.ingest import Ingest
from quiver.spark.pipelines.replay import Replay
from quiver.testing import LocalCluster

END_S = 300


def texts(client: quiver.Cluster, topic: str) -> list[bytes]:
    partitions = range(len(client.offsets(topic).offsets))
    return sorted(value or b"" for partition in partitions for _, _, value, _ in in_topic(client, topic, partition))


def test_files_are_ingested_archived_wiped_and_replayed_with_content_and_order(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    servers, lake, source = ",".join(local.addresses), str(folder / "lake"), folder / "logs"
    source.mkdir()
    lines = [b"".join(b"%d-%d\n" % (file, number) for number in range(3000)) for file in range(4)]
    for number, content in enumerate(lines):
        path = source / f"{number}.log{'.gz' if number % 2 else ''}"
        path.write_bytes(gzip.compress(content) if number % 2 else content)
    ingest = Ingest(servers=servers, paths=(str(source),), topic=topic)
    assert [run_job(spark, ingest).facts["sent"] for _ in range(2)] == [12_000, 0]
    assert texts(client, topic) == sorted(b"".join(lines).splitlines())
    before = [in_topic(client, topic, partition) for partition in range(3)]
    run_job(spark, Archive(servers=servers, topic=topic, to=lake))
    assert [in_lake(lake, topic, partition) for partition in range(3)] == before
    client.delete_topic(topic)
    run_job(spark, Replay(servers=servers, from_=lake, topic=topic))
    assert [in_topic(client, topic, partition) for partition in range(3)] == before


@pytest.mark.slow
def test_killed_ingest_loses_nothing_and_doubles_nothing(
    local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    source = folder / "logs"
    source.mkdir()
    client.create_topic(topic, partitions=2)
    lines = [b"%d-%d %s\n" % (file, number, b"x" * 500) for file in range(3) for number in range(100_000)]
    for file in range(3):
        (source / f"{file}.log").write_bytes(b"".join(lines[file * 100_000 : (file + 1) * 100_000]))
    arguments = ("ingest", str(source), "--topic", topic)
    for _ in range(2):
        process, before = start(local, *arguments), sum(client.offsets(topic).offsets.values())
        try:
            while sum(client.offsets(topic).offsets.values()) == before and process.poll() is None:
                time.sleep(0.01)
        finally:
            kill(process)
    process = start(local, *arguments)
    assert process.wait(END_S) == 0, process.communicate()
    process.communicate()
    assert texts(client, topic) == sorted(line.rstrip() for line in lines)

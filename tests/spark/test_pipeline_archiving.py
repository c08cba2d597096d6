"""The archive pipeline on Spark, against a real cluster: whole, once, readable by everybody, whatever is killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pipeline_commands import in_lake, in_topic, kill, run_job, start
from pyspark.sql import SparkSession
from spark_queries import expected, fill, values

import quiver
from quiver.errors import TrimmedError
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.job import to_quiver_error
from quiver.spark.pipelines.lake import LakeFormat
from quiver.testing import LocalCluster

END_S = 300


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_archive_is_what_the_topic_is_and_spark_reads_it(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path, kind: LakeFormat
) -> None:
    lake = str(folder / "lake")
    job = Archive(servers=",".join(local.addresses), topic=topic, to=lake, format=kind)
    fill(client, topic, 500, 0, 300)
    with client.producer(topic) as producer:
        producer.send(None, key="k", partition=1, timestamp=1_700_000_000_123, headers=[("a", b"\x00"), ("b", None)])
    assert run_job(spark, job).facts["records"] == 801
    for partition in range(3):
        assert in_lake(lake, topic, partition) == in_topic(client, topic, partition)
    client.producer(topic).send_many(["0-500", "0-501"], partition=0).result()
    assert run_job(spark, job).facts["records"] == 2
    if kind == "delta":
        frame = spark.read.option("basePath", lake).parquet(*DeltaTable(lake).file_uris())
        assert DeltaTable(lake, version=1).to_pyarrow_table().num_rows == 801
    else:
        frame = spark.read.parquet(lake)
    assert values(frame.where("partition != 1")) == expected(502, 0, 300)


def test_large_partition_is_archived_by_several_tasks_and_compacted(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    lake = str(folder / "lake")
    client.create_topic(topic, partitions=1)
    with client.producer(topic) as producer:
        producer.send_many([b"%d" % number for number in range(100_000)])
    job = Archive(servers=",".join(local.addresses), topic=topic, to=lake, is_compact=True)
    result = run_job(spark, job)
    assert result.facts["files"] == 2
    assert (result.facts["compacted_files"], result.facts["compacted_into"]) == (2, 1)
    assert in_lake(lake, topic, 0) == in_topic(client, topic, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_killed_archive_loses_nothing_and_doubles_nothing(
    local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path, kind: LakeFormat
) -> None:
    lake = str(folder / "lake")
    arguments = ("archive", "--topic", topic, "--to", lake, "--format", kind)
    fill(client, topic, 3000, 3000)
    commits = folder / "lake" / ("_delta_log" if kind == "delta" else "_quiver")
    for pause_s in (0.0, 0.3):
        before = len(list(commits.glob("*.json")))
        process = start(local, *arguments, "--every", "100ms")
        try:
            # A commit after the one that makes the lake: from here on it is in the middle of its work.
            while len(list(commits.glob("*.json"))) <= max(1, before):
                assert process.poll() is None, process.communicate()
                client.producer(topic).send_many(["more"] * 10, partition=1).result()
                time.sleep(0.01)
            time.sleep(pause_s)
        finally:
            kill(process)
    process = start(local, *arguments, "--once")
    assert process.wait(END_S) == 0, process.communicate()
    process.communicate()
    for partition in range(2):
        assert in_lake(lake, topic, partition) == in_topic(client, topic, partition)


def test_failure_in_a_task_is_told_in_our_own_words(spark: SparkSession) -> None:
    def fail(number: int) -> int:
        if number:
            raise TrimmedError("it begins at 7: by now")
        return number // 0

    with pytest.raises(Exception, match="begins") as told:
        spark.sparkContext.parallelize([1], 1).map(fail).collect()
    found = to_quiver_error(told.value)
    assert isinstance(found, TrimmedError)
    assert str(found) == "it begins at 7: by now"
    with pytest.raises(Exception, match="division") as told:
        spark.sparkContext.parallelize([0], 1).map(fail).collect()
    assert str(to_quiver_error(told.value)).startswith("Spark could not run the job: ZeroDivisionError: ")


@pytest.mark.slow
def test_archive_that_follows_a_topic_ends_in_good_order_on_sigterm(
    local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    lake = str(folder / "lake")
    fill(client, topic, 100)
    job = folder / "job.toml"
    job.write_text(f'job = "archive"\ntopic = "{topic}"\nto = "{lake}"\nevery = "10m"\n')
    process = start(local, "run", str(job), "--json")
    deadline_s = time.monotonic() + END_S
    while len(list((folder / "lake" / "_delta_log").glob("*.json"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    told, progress = process.communicate(timeout=END_S)
    assert process.returncode == 0
    assert '"records": 100' in told
    assert progress.splitlines()[0] == "archive: starting Spark"
    assert "WARN" not in progress

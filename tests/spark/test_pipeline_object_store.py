"""Lakes in an object store, on Spark and a real S3 server: each record once, whatever is killed, lost or concurrent."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from object_store import CREDENTIALS, ObjectStore
from pipeline_commands import in_lake, in_topic, kill, run_job, start
from pyspark.sql import SparkSession
from spark_queries import fill

import quiver
from quiver.errors import ConflictError
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.audit import Audit
from quiver.spark.pipelines.lake import FILE_SCHEMA, ArchivedRanges, Lake, LakeFile, LakeWriter, open_lake
from quiver.spark.pipelines.place import Place
from quiver.spark.pipelines.replay import Replay
from quiver.testing import LocalCluster

END_S = 300


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    server = ObjectStore()
    yield server
    server.close()


@pytest.fixture
def place(store: ObjectStore, topic: str) -> Place:
    return Place(f"s3://lakes/{topic}", store.endpoint)


def test_topic_is_archived_audited_and_replayed_through_an_object_store(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, place: Place
) -> None:
    servers, url, endpoint = ",".join(local.addresses), place.url, place.endpoint
    fill(client, topic, 500, 0, 300)
    archive = Archive(servers=servers, topic=topic, to=url, endpoint=endpoint, is_compact=True, is_vacuum=True)
    assert run_job(spark, archive).facts["records"] == 800
    client.producer(topic).send_many(["0-500", "0-501"], partition=0).result()
    assert [run_job(spark, archive).facts["records"] for _ in range(2)] == [2, 0]
    before = [in_topic(client, topic, partition) for partition in range(3)]
    assert [in_lake(place, topic, partition) for partition in range(3)] == before
    audit = run_job(spark, Audit(servers=servers, topic=topic, archive=url, endpoint=endpoint))
    assert audit.is_clean
    assert f"archive {url}" in audit.sentence
    client.delete_topic(topic)
    run_job(spark, Replay(servers=servers, from_=url, endpoint=endpoint, topic=topic))
    assert [in_topic(client, topic, partition) for partition in range(3)] == before


def write(lake: Lake, topic: str, offset: int) -> list[LakeFile]:
    row = {"offset": offset, "timestamp": 0, "key": None, "value": b"%d" % offset, "headers": None}
    batch = pa.RecordBatch.from_pylist([row], schema=FILE_SCHEMA)
    return LakeWriter(lake.place, topic=topic, partition=0, is_hidden=False).write([batch])


def ranges(topic: str, first: int) -> ArchivedRanges:
    return ArchivedRanges(topic=topic, incarnation="c/1/2", begins={0: first}, ends={0: first + 1})


def test_second_of_two_archivers_is_refused_and_overwrites_nothing(place: Place) -> None:
    first, second = open_lake(place, "delta"), open_lake(place, "delta")
    files = [write(lake, "t", 0) for lake in (first, second)]
    first.commit(files[0], ranges("t", 0))
    with pytest.raises(ConflictError, match="another job archives topic 't'"):
        second.commit(files[1], ranges("t", 0))
    assert open_lake(place).files("t") == files[0]


def test_commits_of_concurrent_archivers_never_replace_each_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")  # must not make commits unsafe
    open_lake(place, "delta")

    def archive(topic: str) -> None:
        lake = open_lake(place)
        for offset in range(4):
            lake.commit(write(lake, topic, offset), ranges(topic, offset))

    topics = ["a", "b"]
    with ThreadPoolExecutor(len(topics)) as threads:
        list(threads.map(archive, topics))
    lake = open_lake(place)
    assert [[file.first_offset for file in lake.files(topic)] for topic in topics] == [[0, 1, 2, 3]] * 2
    assert DeltaTable(place.url, storage_options=place.storage_options()).version() == 8


def test_commit_whose_response_was_lost_is_recognised_and_not_repeated(store: ObjectStore, place: Place) -> None:
    lake = open_lake(place, "delta")
    store.lose_responses(1)
    files = write(lake, "t", 0)
    lake.commit(files, ranges("t", 0))
    lake.commit(write(lake, "t", 1), ranges("t", 1))
    assert [file.first_offset for file in open_lake(place).files("t")] == [0, 1]


@pytest.mark.slow
def test_archive_to_an_object_store_that_is_killed_has_each_record_once(
    local: LocalCluster, client: quiver.Cluster, topic: str, place: Place, folder: Path
) -> None:
    place_options = ("--endpoint", place.endpoint)
    arguments = ("archive", "--topic", topic, "--to", place.url, *place_options)
    fill(client, topic, 3000, 3000)
    for pause_s in (0.0, 0.3):
        before = version(place)
        process = start(local, *arguments, "--every", "100ms")
        try:
            while version(place) <= max(1, before):
                assert process.poll() is None, process.communicate()
                client.producer(topic).send_many(["more"] * 10, partition=1).result()
                time.sleep(0.02)
            time.sleep(pause_s)
        finally:
            kill(process)
    process = start(local, *arguments, "--once")
    told = process.communicate(timeout=END_S)
    assert process.returncode == 0, told
    for partition in range(2):
        assert in_lake(place, topic, partition) == in_topic(client, topic, partition)
    process = start(local, "audit", "--topic", topic, "--archive", place.url, *place_options)
    told = process.communicate(timeout=END_S)
    assert process.returncode == 0, told
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in "".join(told)


def version(place: Place) -> int:
    options = place.storage_options()
    return (
        DeltaTable(place.url, storage_options=options).version() if DeltaTable.is_deltatable(place.url, options) else -1
    )


def test_place_in_a_plan_has_no_credentials(store: ObjectStore, place: Place) -> None:
    place.locate("x")
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in pickle.dumps(place)

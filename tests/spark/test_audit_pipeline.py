"""The audit pipeline on Spark, against a real cluster: what is the same is said to be, and what differs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipeline_commands import run_job
from pyspark.sql import SparkSession
from reading import read_to_end

import quiver
from quiver.cli import main
from quiver.errors import NotFoundError, RequestError
from quiver.spark.pipelines import JobResult
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.audit import Audit
from quiver.spark.pipelines.ingest import Ingest
from quiver.spark.pipelines.replay import Replay
from quiver.testing import LocalCluster

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def audited(client: quiver.Cluster) -> str:
    """A topic of two partitions whose producer and consumer have stated what they saw."""
    name = "t-audited"
    client.create_topic(name, partitions=2)
    with client.producer(name, name="web", digests=True) as producer:
        for number in range(3_000):
            headers = [("source", b"web")] if number % 10 == 0 else None
            producer.send(f"{number:06}", key=f"k{number % 50}", partition=0, timestamp=1000 + number, headers=headers)
        producer.send_many([b"%07d" % number for number in range(150_000)], partition=1)
    with client.consumer(name, name="report", digests=True) as consumer:
        assert len(read_to_end(consumer)) == 153_000
        consumer.commit()
    return name


@pytest.fixture(scope="module")
def archive(spark: SparkSession, local: LocalCluster, audited: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lake")
    run_job(spark, Archive(servers=",".join(local.addresses), topic=audited, to=str(folder)))
    return folder


def audit(spark: SparkSession, local: LocalCluster, topic: str, **options: Any) -> JobResult:
    return run_job(spark, Audit(servers=",".join(local.addresses), topic=topic, **options))


def findings(result: JobResult) -> list[tuple[Any, ...]]:
    found: Any = result.facts["findings"]
    return [(own["partition"], own["kind"], own["offset"], own.get("other")) for own in found]


def test_what_is_the_same_everywhere_is_proven(
    spark: SparkSession, local: LocalCluster, audited: str, archive: Path, folder: Path
) -> None:
    report = folder / "report.md"
    result = audit(spark, local, audited, archive=str(archive), consumers="report", report=str(report))
    assert (result.is_clean, result.facts["verdict"], result.facts["records"]) == (True, "identical", 153_000)
    told: Any = result.facts["witnesses"]
    assert {own["witness"]: own["records"] for own in told} == {
        "the topic as its leaders serve it": 153_000,
        "replica on node 1": 153_000,
        f"archive {archive}": 153_000,
        "producer web": 153_000,
        "consumer report": 153_000,
    }
    assert all(own["identical"] for own in told)
    assert "Verdict: **identical**" in report.read_text()
    assert result.sentence.startswith(f"{audited}: identical; records 153,000, partitions 2")


def lose(rows: Rows) -> Rows:
    return [row for row in rows if row["offset"] != 1234]


def double(rows: Rows) -> Rows:
    return [again for row in rows for again in ([row, row] if row["offset"] == 1234 else [row])]


def alter(rows: Rows) -> Rows:
    return [{**row, "value": b"001235"} if row["offset"] == 1234 else row for row in rows]


def alter_key(rows: Rows) -> Rows:
    return [{**row, "key": None} if row["offset"] == 1234 else row for row in rows]


def alter_headers(rows: Rows) -> Rows:
    return [{**row, "headers": [{"key": "", "value": None}]} if row["offset"] == 1234 else row for row in rows]


def swap(rows: Rows) -> Rows:
    by_offset = {row["offset"]: row for row in rows}
    places = {1234: 2777, 2777: 1234}
    return [{**by_offset[places.get(row["offset"], row["offset"])], "offset": row["offset"]} for row in rows]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lose, (0, "lost", 1234, None)),
        (double, (0, "doubled", 1234, 1234)),
        (alter, (0, "altered", 1234, None)),
        (alter_key, (0, "altered", 1234, None)),
        (alter_headers, (0, "altered", 1234, None)),
        (swap, (0, "swapped", 1234, 2777)),
    ],
)
def test_one_wrong_record_in_an_archive_is_found_and_named(
    spark: SparkSession,
    local: LocalCluster,
    audited: str,
    archive: Path,
    folder: Path,
    fault: Callable[[Rows], Rows],
    expected: tuple[Any, ...],
) -> None:
    wrong = folder / "lake"
    shutil.copytree(archive, wrong)
    (path,) = wrong.glob(f"topic={audited}/partition=0/*/*.parquet")
    table = pq.ParquetFile(path).read()
    pq.write_table(pa.Table.from_pylist(fault(table.to_pylist()), table.schema), path)
    result = audit(spark, local, audited, archive=str(wrong))
    assert not result.is_clean
    assert findings(result) == [expected]
    found: Any = result.facts["findings"]
    assert found[0]["witness"] == f"archive {wrong}"


def test_file_that_is_missing_from_an_archive_is_told(
    spark: SparkSession, local: LocalCluster, audited: str, archive: Path, folder: Path
) -> None:
    wrong = folder / "lake"
    shutil.copytree(archive, wrong)
    (path,) = wrong.glob(f"topic={audited}/partition=0/*/*.parquet")
    path.unlink()
    assert findings(audit(spark, local, audited, archive=str(wrong))) == [(0, "unreadable", 0, None)]


def test_what_came_after_the_archive_was_made_is_no_finding(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    client.create_topic(topic, partitions=1)
    client.producer(topic).send_many([f"{number}" for number in range(100)]).result()
    run_job(spark, Archive(servers=",".join(local.addresses), topic=topic, to=str(folder)))
    client.producer(topic).send_many([f"{number}" for number in range(50)]).result()
    result = audit(spark, local, topic, archive=str(folder))
    assert result.is_clean
    told: Any = result.facts["witnesses"]
    assert {own["records"] for own in told if own["witness"].startswith("archive")} == {100}


def test_topic_that_was_replayed_is_what_was_archived(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, audited: str, archive: Path, topic: str
) -> None:
    servers = ",".join(local.addresses)
    run_job(spark, Replay(servers=servers, from_=str(archive), source=audited, topic=topic))
    assert audit(spark, local, topic, archive=str(archive), source=audited).facts["verdict"] == "identical"
    client.producer(topic).send("one more", partition=0).result()
    result = audit(spark, local, topic, archive=str(archive), source=audited)
    assert result.is_clean  # it is not archived yet: the archive is compared as far as it goes
    with pytest.raises(RequestError, match="source needs archive"):
        audit(spark, local, topic, source=audited)


def test_files_that_went_all_the_way_round_are_still_the_same(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    """Ingested, archived, audited, wiped, replayed, audited."""
    servers, lake = ",".join(local.addresses), str(folder / "lake")
    logs = folder / "app.log"
    logs.write_text("".join(f"INFO line {number}\n" for number in range(5_000)))
    run_job(spark, Ingest(servers=servers, paths=(str(logs),), topic=topic))
    run_job(spark, Archive(servers=servers, topic=topic, to=lake))
    before = audit(spark, local, topic, archive=lake)
    assert (before.facts["verdict"], before.facts["records"]) == ("identical", 5_000)
    client.delete_topic(topic)
    run_job(spark, Replay(servers=servers, from_=lake, topic=topic))
    after = audit(spark, local, topic, archive=lake, source=topic)
    assert after.facts["verdict"] == "identical"
    partitions: list[Any] = [before.facts["partitions"], after.facts["partitions"]]
    held = [[own for own in found if own["count"]] for found in partitions]  # empty ones leave nothing to replay
    assert held[0] == held[1]  # the digests, too


def test_consumer_that_was_given_something_else_or_not_everything_is_found(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    client.producer(topic).send_many([f"{number}" for number in range(5_000)]).result()
    consumer = client.consumer(topic, name="odd", digests=True)
    consumer.poll(100, timeout=60)
    consumer.seek(0, 50)
    consumer.poll(100, timeout=60)
    consumer.seek(0, 3_000)
    consumer.poll(100, timeout=60)
    consumer.close()
    result = audit(spark, local, topic)
    assert findings(result) == [(0, "doubled", 50, 50), (0, "lost", 150, None)]
    found: Any = result.facts["findings"]
    assert [(own["offset"], own["end_offset"], own["witness"]) for own in found] == [
        (50, 100, "consumer odd"),
        (150, 3_000, "consumer odd"),
    ]


def test_empty_topics_and_unknown_names(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    client.create_topic(topic, partitions=2)
    assert audit(spark, local, topic).facts["verdict"] == "identical"
    with pytest.raises(NotFoundError, match="'nobody' has reported no digests"):
        audit(spark, local, topic, consumers="nobody")
    with pytest.raises(NotFoundError, match="has no archive"):
        audit(spark, local, topic, archive=str(folder))
    with pytest.raises(NotFoundError, match="unknown topic"):
        audit(spark, local, "no-such-topic")


def test_command_ends_with_one_if_something_was_found(
    spark: SparkSession,
    local: LocalCluster,
    client: quiver.Cluster,
    topic: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servers = ",".join(local.addresses)
    client.create_topic(topic, partitions=1)
    client.producer(topic).send_many(["a", "b"]).result()
    run_job(spark, Archive(servers=servers, topic=topic, to=str(folder)))
    command = ["pipeline", "audit", "--topic", topic, "--servers", servers, "--archive", str(folder), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "identical"
    (path,) = folder.glob("*/*/*/*.parquet")
    pq.write_table(pq.ParquetFile(path).read().slice(1), path)
    assert main(command[:-1]) == 1
    told = capsys.readouterr().out
    assert f"{topic}: different" in told
    assert f"partition 0, offset 0: lost; archive {folder}" in told


def test_dry_run_tells_what_would_be_compared_and_leaves_no_hold(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, audited: str
) -> None:
    result = audit(spark, local, audited, is_dry_run=True)
    assert result.sentence.startswith(f"would audit {audited}: records 153,000, sources the topic as its leaders")
    assert not [hold for hold in client.holds() if hold.name.startswith("audit-")]

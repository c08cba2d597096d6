"""The parse pipeline on Spark: tables that everybody reads, functions on DataFrames, and drivers that are killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pipeline_commands import kill, run_job, start
from pyspark.sql import SparkSession
from spark_queries import reading

import quiver
from quiver.spark.pipelines.analyze import Analyze
from quiver.spark.pipelines.events import EVENTS, learn_lines, parse_lines
from quiver.spark.pipelines.lake import LakeFormat, open_lake
from quiver.spark.pipelines.model_store import load_model
from quiver.spark.pipelines.parse import Parse
from quiver.spark.pipelines.place import Place
from quiver.testing import LocalCluster

END_S = 300
KINDS = (
    ("INFO", "web.Server", "request {at} of user{user} took {at} ms"),
    ("ERROR", "web.Server", "no route to 10.0.0.{user} after {at} attempts"),
    ("INFO", "web.Session", "session {at} opened"),
    ("WARN", "db.Pool", "connection {at} is slow, waiting for {user} others"),
)


def lines(first: int, count: int) -> list[str]:
    found = []
    for at in range(first, first + count):
        level, source, text = KINDS[at % len(KINDS)]
        clock = f"2026-11-15 {12 + at // 3600 % 12}:{at // 60 % 60:02}:{at % 60:02},123"
        found.append(f"{clock} {level} [pool-{at % 4}] {source}: {text.format(at=at, user=at % 7)}")
    return found


def fill(client: quiver.Cluster, topic: str, *, first: int = 0, count: int = 1000, partition: int = 0) -> None:
    client.create_topic(topic, partitions=2, exist_ok=True)
    client.producer(topic).send_many(lines(first, count), partition=partition).result()


def rows(folder: str, kind: LakeFormat = "delta") -> list[dict[str, Any]]:
    table = DeltaTable(folder).to_pyarrow_table() if kind == "delta" else pq.read_table(folder)
    return sorted(table.to_pylist(), key=lambda row: (int(row["partition"]), row["offset"]))


def assert_whole(folder: str, client: quiver.Cluster, topic: str, kind: LakeFormat = "delta") -> None:
    """Fail unless the table has each record once, with a template that the table's own model knows."""
    table = open_lake(Place(folder), layout=EVENTS)
    model = load_model(table.place, table.model(topic))
    found = rows(folder, kind)
    known = set(model.templates)
    assert all(set(model.resolve(own)) <= known for own in {row["template_id"] for row in found})
    for partition, end in client.offsets(topic).offsets.items():
        own = [row for row in found if int(row["partition"]) == partition]
        assert [row["offset"] for row in own] == list(range(end))
        assert [row["line"] for row in own] == lines(0, end)


def test_topic_is_parsed_and_analyzed(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    table = str(folder / "events")
    job = Parse(servers=",".join(local.addresses), topic=topic, to=table)
    fill(client, topic)
    fill(client, topic, partition=1, count=300)
    assert run_job(spark, job).facts["rows"] == 1300
    fill(client, topic, first=1000, count=50)
    assert run_job(spark, job).facts["rows"] == 50
    assert_whole(table, client, topic)
    found: Any = run_job(spark, Analyze(topic=topic, table=table)).facts
    assert (found["lines"], found["templates"]) == (1350, len(KINDS))
    frame = spark.read.option("basePath", table).parquet(*DeltaTable(table).file_uris())
    assert {row["template"]: row["count"] for row in frame.groupBy("template").count().collect()} == {
        own["message"]: own["count"] for own in found["messages"]
    }


def test_functions_on_dataframes_give_the_rows_of_the_table(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    table = str(folder / "events")
    fill(client, topic, count=400)
    run_job(spark, Parse(servers=",".join(local.addresses), topic=topic, to=table))
    records = reading(spark, local, topic)
    parsed = parse_lines(records, learn_lines(records))
    assert parsed.columns == EVENTS.schema.names
    found = [row.asDict(recursive=True) for row in parsed.orderBy("partition", "offset").collect()]
    wanted = ("offset", "level", "source", "template_id", "template", "parameters", "message", "line", "records")
    assert [{name: row[name] for name in wanted} for row in found] == [
        {name: row[name] for name in wanted} for row in rows(table)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_killed_driver_leaves_table_and_model_in_agreement(
    local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path, kind: LakeFormat
) -> None:
    table = folder / "events"
    arguments = ("parse", "--topic", topic, "--to", str(table), "--table-format", kind)
    fill(client, topic, count=2000)
    sent = 2000
    commits = table / ("_delta_log" if kind == "delta" else "_quiver")
    for pause_s in (0.0, 0.3):
        before = len(list(commits.glob("*.json")))
        process = start(local, *arguments, "--every", "100ms")
        try:
            # A commit after the one that makes the table: from here on it is in the middle of its work.
            while len(list(commits.glob("*.json"))) <= max(1, before):
                assert process.poll() is None, process.communicate()
                fill(client, topic, first=sent, count=10)
                sent += 10
                time.sleep(0.01)
            time.sleep(pause_s)
        finally:
            kill(process)
    process = start(local, *arguments, "--once")
    assert process.wait(END_S) == 0, process.communicate()
    process.communicate()
    assert_whole(str(table), client, topic, kind)

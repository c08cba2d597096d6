"""The analyze pipeline on Spark: lines are read right, counted once, and kept once, whatever is done again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from pipeline_commands import run_job
from postgresql_server import running_server
from pyspark.sql import SparkSession
from reading import read_to_end

import quiver
from quiver.errors import NotFoundError, UnavailableError
from quiver.spark.pipelines import JobResult
from quiver.spark.pipelines.analyze import Analyze
from quiver.spark.pipelines.analyze_checkpoint import AnalyzeState, BatchPlan
from quiver.spark.pipelines.count_sinks import LineCount, PostgresCounts
from quiver.testing import LocalCluster

START_MS = 1_700_000_000_000


# -- the job -----------------------------------------------------------------------------------------


def fill(client: quiver.Cluster, topic: str, *, first: int = 0, count: int = 1000) -> None:
    """Lines a tenth of a second apart; every tenth is an error, and all of those from second 60 on."""
    client.create_topic(topic, partitions=2, exist_ok=True)
    with client.producer(topic) as producer:
        for number in range(first, first + count):
            level = "ERROR" if number % 10 == 0 or number >= 600 else "INFO"
            producer.send(
                f"{level} request {number}",
                key=f"web-{number % 3}",
                partition=number % 2,
                timestamp=START_MS + 100 * number,
            )


def analyze(spark: SparkSession, local: LocalCluster, topic: str, **options: Any) -> JobResult:
    given = {"is_once": True, "window": "10s", **options}
    return run_job(spark, Analyze(servers=",".join(local.addresses), topic=topic, **given))


@contextmanager
def repeated_batch(folder: Path) -> Iterator[None]:
    """Let the next run do the last batch again: the state is that before it, and its plan is still there."""
    path = folder / "state"
    stored = msgspec.msgpack.decode(path.read_bytes(), type=AnalyzeState)
    plan = msgspec.msgpack.decode((folder / "plan").read_bytes(), type=BatchPlan)
    assert plan.batch_id == stored.batch_id
    begin = msgspec.structs.replace(
        stored.offsets,
        topics={topic: msgspec.structs.replace(own, p={}) for topic, own in stored.offsets.topics.items()},
    )
    earlier = msgspec.structs.replace(stored, batch_id=stored.batch_id - 1, offsets=begin, summary=b"")
    path.write_bytes(msgspec.msgpack.encode(earlier))
    yield
    again = msgspec.msgpack.decode(path.read_bytes(), type=AnalyzeState)
    assert again.batch_id == stored.batch_id


def test_lines_are_counted_and_shown_with_a_page(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic)
    page = folder / "report.html"
    result = analyze(spark, local, topic, report=str(page))
    assert result.facts["levels"] == {"ERROR": 460, "INFO": 540}
    assert result.facts["sources"] == {"web-0": 334, "web-1": 333, "web-2": 333}
    assert result.facts["windows"] == 10
    assert result.facts["without_time"] == 1000
    bursts: Any = result.facts["bursts"]
    assert [(own["start_ms"], own["lines"], own["usual"]) for own in bursts] == [(START_MS + 60_000, 400, 40)]
    assert "request &lt;*&gt;" in page.read_text()
    assert f"analyzed {topic}, into the terminal: lines 1,000, windows 10" in result.sentence


def test_job_goes_on_where_its_checkpoint_is(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, count=100)
    options = {"checkpoint": str(folder), "window": "1h"}
    assert analyze(spark, local, topic, **options).facts["lines"] == 100
    fill(client, topic, first=100, count=50)
    # What was counted is remembered: the window's totals grow.
    assert analyze(spark, local, topic, **options).facts["levels"] == {"ERROR": 15, "INFO": 135}


def test_counts_are_written_to_a_topic(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, count=200)
    result = analyze(spark, local, topic, to_topic=f"{topic}-counts", checkpoint=str(folder))
    assert result.sentence.startswith(f"analyzed {topic}, into topic {topic}-counts: lines 200")
    latest: dict[bytes, int] = {}
    for record in read_to_end(client.consumer(f"{topic}-counts")):
        latest[record.key or b""] = json.loads(record.value or b"")["count"]
    assert sum(latest.values()) == 200
    # The last batch is done again, as if its state had not been stored: no record is added.
    ends = client.offsets(f"{topic}-counts").offsets
    with repeated_batch(folder):
        analyze(spark, local, topic, to_topic=f"{topic}-counts", checkpoint=str(folder))
    assert client.offsets(f"{topic}-counts").offsets == ends


def test_unknown_topic_is_told_at_once(spark: SparkSession, local: LocalCluster) -> None:
    with pytest.raises(NotFoundError, match="unknown topic"):
        analyze(spark, local, "no-such-topic")


# -- PostgreSQL --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with running_server() as server:
        yield server.url.replace("+psycopg", "")


def stored(database: str, topic: str) -> dict[str, int]:
    with psycopg.connect(database) as connection:
        rows = connection.execute(
            "SELECT level, sum(count)::bigint FROM quiver_line_counts WHERE topic = %s GROUP BY level", (topic,)
        )
        return dict(rows.fetchall())


def test_counts_are_kept_in_postgresql_once(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path, database: str
) -> None:
    fill(client, topic, count=100)
    options = {"checkpoint": str(folder), "to_postgres": database}
    analyze(spark, local, topic, **options)
    assert stored(database, topic) == {"ERROR": 10, "INFO": 90}
    fill(client, topic, first=100, count=50)
    analyze(spark, local, topic, **options)
    assert stored(database, topic) == {"ERROR": 15, "INFO": 135}
    # The last batch is done again, as if its state had not been stored: nothing is added.
    with psycopg.connect(database) as connection:
        connection.execute("UPDATE quiver_line_counts SET count = count + 1000 WHERE topic = %s", (topic,))
    before = stored(database, topic)
    with repeated_batch(folder):
        analyze(spark, local, topic, **options)
    assert stored(database, topic) == before


def count(number: int, message: str = "a") -> LineCount:
    return LineCount(window_start_ms=0, window_end_ms=1000, level="INFO", source="web", message=message, count=number)


def test_batch_is_written_whole_and_once(database: str, topic: str) -> None:
    counts = PostgresCounts(database, topic)
    assert counts.write("query", 0, [count(1), count(1, "zero \0 byte")])
    assert not counts.write("query", 0, [count(7)])
    assert counts.write("query", 1, [count(2)])
    assert not counts.write("query", 0, [count(7)])
    assert counts.write("another", 0, [])
    assert stored(database, topic) == {"INFO": 3}
    broken = LineCount(window_start_ms=0, window_end_ms=1, level="INFO", source="b", message="b", count=10**30)
    with pytest.raises(psycopg.Error):
        counts.write("query", 2, [count(9), broken])
    assert stored(database, topic) == {"INFO": 3}
    assert counts.write("query", 2, [count(4)])


def test_database_that_is_not_there_is_told() -> None:
    with pytest.raises(UnavailableError, match="PostgreSQL cannot be reached"):
        PostgresCounts("postgresql://127.0.0.1:1/none?connect_timeout=2", "logs")

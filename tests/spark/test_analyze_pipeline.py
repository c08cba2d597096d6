"""The analyze pipeline on Spark: lines are read right, counted once, and kept once, whatever is done again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pipeline_commands import run_job
from postgresql_server import running_server
from pyspark.sql import DataFrame, SparkSession

import quiver
from quiver.errors import NotFoundError, UnavailableError
from quiver.spark.pipelines import JobResult
from quiver.spark.pipelines.analyze import Analyze, PostgresCounts, count_lines, read_lines
from quiver.spark.pipelines.line_counts import LineCount
from quiver.testing import LocalCluster

START_MS = 1_700_000_000_000


def records(spark: SparkSession, *rows: tuple[int, str | None, str | None]) -> DataFrame:
    """Records with a timestamp (ms after the start), a key and a value."""
    frame = spark.createDataFrame(list(rows), "at LONG, key STRING, value STRING")
    return frame.selectExpr(
        "2 AS partition",
        f"timestamp_millis({START_MS} + at) AS timestamp",
        "CAST(key AS BINARY) AS key",
        "CAST(value AS BINARY) AS value",
    )


# -- what lines say ----------------------------------------------------------------------------------


def test_lines_are_read(spark: SparkSession) -> None:
    given = [
        (
            "2026-11-15 12:00:01 INFO user 17 logged in",
            None,
            "INFO",
            "partition 2",
            "#-#-# #:#:# INFO user # logged in",
        ),
        ("warning: disk 0x1F at 93%", "db-1", "WARN", "db-1", "warning: disk # at #%"),
        ("request 3f2504e0-4f89-11d3-9a0c-0305e82c3301 failed", "k", "NONE", "k", "request # failed"),
        ('{"level": "error", "msg": "no route 5", "service": "api"}', None, "ERROR", "api", "no route #"),
        ('{"severity": "CRITICAL", "message": "down", "logger": "core"}', None, "FATAL", "core", "down"),
        ('{"level": "info"', None, "INFO", "partition 2", '{"level": "info"'),
        ("informal words are no level", None, "NONE", "partition 2", "informal words are no level"),
        (None, None, "NONE", "partition 2", ""),
        ("x" * 500, None, "NONE", "partition 2", "x" * 120),
    ]
    lines = read_lines(records(spark, *((number, key, value) for number, (value, key, *_) in enumerate(given))))
    found = [tuple(row) for row in lines.orderBy("timestamp").select("level", "source", "message").collect()]
    assert found == [tuple(rest) for _, _, *rest in given]


def test_latency_is_never_negative(spark: SparkSession) -> None:
    (old, new) = read_lines(records(spark, (0, None, "a"), (10**12, None, "b"))).orderBy("timestamp").collect()
    passed_ms = datetime.now(UTC).timestamp() * 1000 - START_MS
    assert passed_ms - 600_000 < old["latency_ms"] <= passed_ms
    assert new["latency_ms"] == 0


def test_lines_are_counted_by_window_of_their_own_time(spark: SparkSession) -> None:
    frame = records(
        spark,
        *((at, "web", f"ERROR no {at}") for at in (0, 9_999, 10_000)),
        (10_001, "db", "ERROR no 1"),
        (500, "web", "INFO yes"),
    )
    counts = count_lines(read_lines(frame), window="10 seconds", watermark="1 minute")
    rows = sorted(
        (row["window_start_ms"] - START_MS, row["level"], row["source"], row["message"], row["count"])
        for row in counts.collect()
    )
    assert rows == [
        (0, "ERROR", "web", "ERROR no #", 2),
        (0, "INFO", "web", "INFO yes", 1),
        (10_000, "ERROR", "db", "ERROR no #", 1),
        (10_000, "ERROR", "web", "ERROR no #", 1),
    ]
    first = counts.orderBy("window_start_ms", "level").first()
    assert first is not None
    assert first["window_end_ms"] - first["window_start_ms"] == 10_000
    assert first["latency_ms_sum"] >= first["latency_ms_max"] > 0


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
    given = {"is_once": True, "watermark": "10m", **options}
    return run_job(spark, Analyze(servers=",".join(local.addresses), topic=topic, **given))


def test_lines_are_counted_and_shown_with_a_page(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic)
    page = folder / "report.html"
    result = analyze(spark, local, topic, report=str(page))
    assert result.facts["levels"] == {"ERROR": 460, "INFO": 540}
    assert result.facts["sources"] == {"web-0": 334, "web-1": 333, "web-2": 333}
    assert result.facts["windows"] == 10
    bursts: Any = result.facts["bursts"]
    assert (bursts[0].window_start_ms, bursts[0].errors) == (START_MS + 60_000, 100)
    assert "ERROR request #" in page.read_text()
    assert f"analyzed {topic}, into the terminal: lines 1,000, windows 10" in result.sentence


def test_job_goes_on_where_its_checkpoint_is(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, count=100)
    options = {"checkpoint": str(folder), "window": "1h"}
    assert analyze(spark, local, topic, **options).facts["lines"] == 100
    fill(client, topic, first=100, count=50)
    # What was counted is remembered: the window's totals grow. Messages that did not come again are not told again.
    assert analyze(spark, local, topic, **options).facts["levels"] == {"ERROR": 15, "INFO": 135}


def test_counts_are_written_to_a_topic(
    spark: SparkSession, local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    fill(client, topic, count=200)
    result = analyze(spark, local, topic, to_topic=f"{topic}-counts", checkpoint=str(folder))
    assert result.sentence.startswith(f"analyzed {topic}, into topic {topic}-counts: lines 200")
    latest: dict[bytes, int] = {}
    for record in client.consumer(f"{topic}-counts", idle_timeout=0.5):
        latest[record.key or b""] = json.loads(record.value or b"")["count"]
    assert sum(latest.values()) == 200
    # The last batch is done again, as if its commit had not been noted: no record is added.
    max((folder / "commits").glob("[0-9]*"), key=lambda path: int(path.name)).unlink()
    ends = client.offsets(f"{topic}-counts").offsets
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
    # The last batch is done again, as if its commit had not been noted: nothing is added.
    newest = max((folder / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    newest.unlink()
    with psycopg.connect(database) as connection:
        connection.execute("UPDATE quiver_line_counts SET count = count + 1000 WHERE topic = %s", (topic,))
    before = stored(database, topic)
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

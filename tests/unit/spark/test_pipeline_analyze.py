"""The analysis on a cluster in memory: resumes where it ended, and counts each line once in its sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pipeline_world import World
from test_pipeline_parse import KINDS, send, web

from quiver.errors import ConflictError, NotFoundError, StorageError
from quiver.spark.pipelines import JobResult, analyze
from quiver.spark.pipelines.analyze import Analyze
from quiver.spark.pipelines.analyze_checkpoint import AnalyzeCheckpoint
from quiver.spark.pipelines.count_sinks import DeltaCounts, LineCount
from quiver.spark.pipelines.parse import Parse
from quiver.spark.pipelines.place import Place


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def run(world: World, **options: Any) -> JobResult:
    return world.run(Analyze(**{"topic": "logs", "is_once": True, **options}))


def burst() -> list[str]:
    """Nearly an hour of lines, one a second, and a hundred errors in one second of it."""
    lines = web(0, 3500)
    errors = [f"2026-11-15 12:30:00,500 ERROR [pool-1] db.Disk: disk /dev/sd{at % 3} is full" for at in range(100)]
    return [*lines[:1801], *errors, *lines[1801:]]


def test_lines_are_counted_by_their_own_time_and_the_page_shows_the_burst(world: World, tmp_path: Path) -> None:
    send(world, "logs", burst())
    result = run(world, report=str(tmp_path / "page.html"))
    facts: Any = result.facts
    assert (facts["lines"], facts["without_time"], facts["templates"]) == (3600, 0, len(KINDS) + 1)
    assert facts["levels"] == {"ERROR": 800, "WARN": 700, "INFO": 1400, "DEBUG": 700}
    assert facts["sources"] == {"db.Pool": 1400, "web.Server": 1400, "web.Session": 700, "db.Disk": 100}
    assert facts["start_ms"] == 1_794_744_000_000
    assert facts["bursts"][0]["templates"][0].startswith("disk ")
    assert [own["template_id"] for own in facts["new"]] == [facts["bursts"][0]["template_ids"][0]]
    page = (tmp_path / "page.html").read_text()
    assert "<b>2026-11-15 12:30:00,500 ERROR [pool-1] db.Disk: disk /dev/sd0 is full</b>" in page
    assert "2026-11-15 12:29:57,123 INFO" in page


def test_table_says_the_same_as_its_topic(world: World, tmp_path: Path) -> None:
    send(world, "logs", burst())
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    topic: Any = run(world).facts
    page = tmp_path / "page.html"
    table: Any = run(world, table=str(tmp_path / "events"), report=str(page)).facts
    assert table == topic
    assert "<b>2026-11-15 12:30:00,500 ERROR [pool-1] db.Disk: disk /dev/sd0 is full</b>" in page.read_text()
    with pytest.raises(NotFoundError, match="has no lines of topic 'other'; its topics are logs"):
        run(world, topic="other", table=str(tmp_path / "events"))
    with pytest.raises(NotFoundError, match="has no table of parsed lines"):
        run(world, table=str(tmp_path / "nothing"))


def test_what_is_new_since_a_time(world: World) -> None:
    send(world, "logs", [*web(0, 100), "2026-11-15 12:50:00,000 WARN [main] web.Server: certificate 7 expires soon"])
    for since, count in (("10m", 1), ("2026-11-15T12:49:59", 1), ("2026-11-15T12:50:01", 0), ("1d", 0)):
        facts: Any = run(world, since=since).facts
        assert len(facts["new"]) == count, since


def test_analysis_resumes_at_its_checkpoint(world: World, tmp_path: Path) -> None:
    send(world, "logs", web(0, 100))
    options = {"checkpoint": str(tmp_path / "state"), "window": "1h"}
    assert run(world, **options).facts["lines"] == 100
    assert run(world, **options).facts["lines"] == 100
    send(world, "logs", web(100, 50))
    result = run(world, **options)
    assert (result.facts["lines"], result.facts["windows"], result.facts["templates"]) == (150, 1, len(KINDS))
    world.cluster.create_topic("other", partitions=1)
    with pytest.raises(ConflictError, match="is of topic 'logs', not 'other'"):
        run(world, topic="other", **options)


def test_batch_that_is_repeated_after_a_crash_is_written_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = str(tmp_path / "counts")
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "state"), "to_delta": counts, "window": "1m"}
    send(world, "logs", web(0, 100))
    run(world, **options)
    send(world, "logs", web(100, 50))
    before = DeltaTable(counts).version()
    with monkeypatch.context() as patch:
        # The counts are written; the process dies before it has stored its state.
        def die(*_: object) -> None:
            raise RuntimeError("the process was killed")

        patch.setattr(AnalyzeCheckpoint, "save", die)
        with pytest.raises(RuntimeError, match="killed"):
            run(world, **options)
    assert DeltaTable(counts).version() == before + 1
    # Lines that come meanwhile are not part of the batch that is repeated, which would never be written again.
    send(world, "logs", web(150, 10))
    run(world, **options)
    rows = DeltaTable(counts).to_pyarrow_table().to_pylist()
    assert sum(row["count"] for row in rows) == 160
    assert DeltaTable(counts).version() == before + 2
    assert len({(row["window_start"], row["level"], row["source"], row["message"]) for row in rows}) == len(rows)
    assert {row["level"] for row in rows} == {"INFO", "ERROR", "WARN", "DEBUG"}


def test_batch_of_a_delta_table_is_written_whole_and_once(tmp_path: Path) -> None:
    def count(number: int) -> LineCount:
        return LineCount(window_start_ms=0, window_end_ms=1000, level="INFO", source="", message="a", count=number)

    counts = DeltaCounts(Place(str(tmp_path / "counts")), "logs")
    assert counts.write("query", 0, [count(1)])
    assert not counts.write("query", 0, [count(7)])
    assert counts.write("query", 1, [count(2)])
    assert not counts.write("query", 0, [count(7)])
    assert counts.write("another", 0, [])
    assert [row["count"] for row in DeltaTable(str(tmp_path / "counts")).to_pyarrow_table().to_pylist()] == [2]
    DeltaTable.create(str(tmp_path / "other"), pa.schema([("a", pa.int64())]))
    with pytest.raises(StorageError, match="a Delta table of something else"):
        DeltaCounts(Place(str(tmp_path / "other")), "logs")
    with pytest.raises(StorageError, match="cannot be used"):
        DeltaCounts(Place("/dev/null/counts"), "logs")


def test_continuous_analysis_drops_old_windows_and_counts_late_lines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyze, "WINDOWS_KEPT", 5)
    send(world, "logs", web(1000, 100))
    job = Analyze(topic="logs", start="earliest", window="10s", watermark="10s", every="0s")
    sent = False

    def report(_: object) -> None:
        nonlocal sent
        if not sent and "analyzing" in str(world.told[-1].phrase) and world.told[-1].done == 100:
            sent = True
            send(world, "logs", [*web(0, 7), *web(1100, 3)])

    class Told(list[Any]):
        def append(self, progress: Any) -> None:
            super().append(progress)
            report(progress)

    world.told = Told()
    result = world.run(job, stop_after=12)
    facts: Any = result.facts
    assert sent
    assert (facts["windows"], facts["late"]) == (6, 7)
    assert "too late for their window 7" in result.sentence


def test_latest_is_where_a_continuous_analysis_starts(world: World) -> None:
    send(world, "logs", web(0, 10))
    result = world.run(Analyze(topic="logs", every="0s"), stop_after=2)
    assert result.facts["lines"] == 0


def test_checkpoint_of_spark_is_refused(world: World, tmp_path: Path) -> None:
    send(world, "logs", web(0, 10))
    (tmp_path / "offsets").mkdir()
    with pytest.raises(ConflictError, match="one of an earlier release"):
        run(world, checkpoint=str(tmp_path))

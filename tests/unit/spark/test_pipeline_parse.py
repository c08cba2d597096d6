"""The parse pipeline on a cluster in memory: each record once, whatever the edges are, and a model that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pipeline_world import World

from quiver.errors import ConflictError, DamageError, RequestError
from quiver.spark.pipelines import make_job, parse, parsing
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.events import EVENTS
from quiver.spark.pipelines.lake import LakeFormat, open_lake
from quiver.spark.pipelines.model_store import load_model
from quiver.spark.pipelines.parse import Parse
from quiver.spark.pipelines.place import Place


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def send(world: World, topic: str, lines: Sequence[str | bytes], *, partition: int = 0, **options: Any) -> None:
    world.cluster.create_topic(topic, partitions=2, exist_ok=True)
    with world.cluster.producer(topic, batch_bytes=4000) as producer:
        for line in lines:
            producer.send(line, partition=partition, timestamp=1_700_000_000_000, **options)


KINDS = (
    ("INFO", "web.Server", "request {at} of user{user} took {at} ms"),
    ("ERROR", "web.Server", "no route to 10.0.0.{user} after {at} attempts"),
    ("INFO", "web.Session", "session {at} opened"),
    ("WARN", "db.Pool", "connection {at} is slow, waiting for {user} others"),
    ("DEBUG", "db.Pool", "page {at} read from /var/lib/db/{user}.dat"),
)


def web(first: int, count: int) -> list[str]:
    lines = []
    for at in range(first, first + count):
        level, source, text = KINDS[at % len(KINDS)]
        clock = f"2026-11-15 12:{at // 60 % 60:02}:{at % 60:02},123"
        lines.append(f"{clock} {level} [pool-{at % 4}] {source}: {text.format(at=at, user=at % 7)}")
    return lines


def rows(folder: Path, kind: LakeFormat = "delta") -> list[dict[str, Any]]:
    table = DeltaTable(str(folder)).to_pyarrow_table() if kind == "delta" else pq.read_table(str(folder))
    table = table.set_column(table.column_names.index("partition"), "partition", table["partition"].cast(pa.int32()))
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist()


def assert_each_record_once(found: list[dict[str, Any]], *counts: int) -> None:
    for partition, count in enumerate(counts):
        own = [row for row in found if row["partition"] == partition]
        offsets = [at for row in own for at in range(row["offset"], row["offset"] + row["records"])]
        assert offsets == list(range(count))


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_lines_become_rows_each_once_and_runs_go_on(world: World, tmp_path: Path, kind: LakeFormat) -> None:
    job = Parse(topic="logs", to=str(tmp_path / "events"), table_format=kind)
    send(world, "logs", web(0, 300))
    send(world, "logs", web(0, 50), partition=1)
    assert world.run(job).facts["records"] == 350
    assert world.run(job).facts["records"] == 0
    send(world, "logs", web(300, 100))
    assert world.run(job).facts["records"] == 100
    found = rows(tmp_path / "events", kind)
    assert_each_record_once(found, 400, 50)
    first = found[3]
    assert first["time"].isoformat() == "2026-11-15T12:00:03.123000+00:00"
    assert (first["topic"], first["level"], first["source"]) == ("logs", "WARN", "db.Pool")
    assert (first["template"], first["parameters"]) == (
        "connection <*> is slow, waiting for <*> others",
        ["3", "3"],
    )
    assert first["message"] == "connection 3 is slow, waiting for 3 others"
    assert first["line"] == web(3, 1)[0]
    assert len({row["template_id"] for row in found}) == len(KINDS)


def test_table_and_model_agree(world: World, tmp_path: Path) -> None:
    job = Parse(topic="logs", to=str(tmp_path / "events"))
    for first in (0, 100, 200):
        send(world, "logs", [*web(first, 50), f"2026-11-15 13:00:00,000 WARN [x] db.Pool: leak number {first} found"])
        world.run(job)
        table = open_lake(Place(str(tmp_path / "events")), layout=EVENTS)
        model = load_model(table.place, table.model("logs"))
        for row in rows(tmp_path / "events"):
            assert set(model.resolve(row["template_id"])) <= set(model.templates)


def test_batch_that_ends_before_its_commit_has_not_happened(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Parse(topic="logs", to=str(tmp_path / "events"))
    send(world, "logs", web(0, 100))
    world.run(job)
    send(world, "logs", web(100, 100))
    table = open_lake(Place(str(tmp_path / "events")), layout=EVENTS)
    known = table.model("logs")
    with monkeypatch.context() as patch:
        # The files and the model are stored; the process dies before it commits them.
        def die(*_: object) -> None:
            raise RuntimeError("the process was killed")

        patch.setattr(type(table), "commit", die)
        with pytest.raises(RuntimeError, match="killed"):
            world.run(job)
    table.refresh()
    assert table.model("logs") == known
    assert_each_record_once(rows(tmp_path / "events"), 100)
    world.run(job)
    assert_each_record_once(rows(tmp_path / "events"), 200)


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 7, in main', "    run()", "ValueError: no 17"]


@pytest.mark.parametrize("size", [3, 5, 7])
def test_stack_trace_is_one_row_whatever_the_tasks_are(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("quiver.spark.offsets.SPLIT_RECORDS_MIN", 1)
    monkeypatch.setattr(parsing, "TASK_RECORDS_MAX", size)
    monkeypatch.setattr(parse, "BATCH_TASKS_MAX", 100)
    lines = [line for at in range(12) for line in (*web(at, 1), *TRACE)]
    send(world, "logs", lines)
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    found = rows(tmp_path / "events")
    assert_each_record_once(found, len(lines))
    assert [row["records"] for row in found] == [5] * 12
    assert found[4]["line"] == "\n".join((*web(4, 1), *TRACE))


@pytest.mark.parametrize("size", [40, 80])
def test_endless_continuation_is_cut_and_no_record_is_lost(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("quiver.spark.offsets.SPLIT_RECORDS_MIN", 1)
    monkeypatch.setattr(parsing, "TASK_RECORDS_MAX", size)
    monkeypatch.setattr(parsing, "EDGE_RECORDS", 10)
    lines = [*web(0, 5), *(f"    at frame.of({at})" for at in range(300)), *web(5, 5)]
    send(world, "logs", lines)
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    assert_each_record_once(rows(tmp_path / "events"), len(lines))


def test_line_that_is_no_text_keeps_its_bytes(world: World, tmp_path: Path) -> None:
    send(world, "logs", [*web(0, 20), b"\xff\xfe broken", *web(20, 5)])
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    found = rows(tmp_path / "events")
    assert_each_record_once(found, 26)
    assert [row["raw"] for row in found if row["raw"] is not None] == [b"\xff\xfe broken"]
    assert found[20]["template_id"] is not None


def test_format_that_changes_in_the_middle_is_learned_again(world: World, tmp_path: Path) -> None:
    job = Parse(topic="logs", to=str(tmp_path / "events"))
    send(world, "logs", web(0, 200))
    world.run(job)
    texts = ("session {} opened", "session {} closed", "connection from 10.0.0.{} refused", "user u{} is unknown")
    other = [f"Nov 15 14:00:{at % 60:02} host-{at % 3} sshd[{at}]: {texts[at % 4].format(at)}" for at in range(200)]
    send(world, "logs", [*web(200, 50), *other])
    world.run(job)
    found = rows(tmp_path / "events")
    assert_each_record_once(found, 450)
    late = found[250:]
    assert {row["source"] for row in late} == {"sshd"}
    assert {row["host"] for row in late} == {"host-0", "host-1", "host-2"}
    assert all(row["time"] is not None for row in found)
    assert late[7]["time"].isoformat()[4:] == "-11-15T14:00:07+00:00"
    assert len({row["template_id"] for row in late}) == len(texts)


def test_headers_and_keys_name_the_source_where_the_line_does_not(world: World, tmp_path: Path) -> None:
    send(world, "logs", ["no header here 1"], headers=[("file", b"a.log"), ("host", b"h1")])
    send(world, "logs", ["no header here 2"], key="billing")
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    assert [(row["source"], row["host"]) for row in rows(tmp_path / "events")] == [("a.log", "h1"), ("billing", None)]


def test_archive_is_parsed_like_its_topic_and_the_topic_goes_on(world: World, tmp_path: Path) -> None:
    send(world, "logs", web(0, 120))
    world.run(Archive(topic="logs", to=str(tmp_path / "lake")))
    job = Parse(topic="logs", to=str(tmp_path / "events"), from_archive=str(tmp_path / "lake"))
    assert world.run(job).facts["records"] == 120
    send(world, "logs", web(120, 30))
    assert world.run(job).facts["records"] == 0
    assert world.run(Parse(topic="logs", to=str(tmp_path / "events"))).facts["records"] == 30
    assert_each_record_once(rows(tmp_path / "events"), 150)
    with pytest.raises(RequestError, match="has no topic 'other'; its topics are logs"):
        world.run(Parse(topic="other", to=str(tmp_path / "events"), from_archive=str(tmp_path / "lake")))


def test_archive_is_no_table_and_a_table_no_archive(world: World, tmp_path: Path) -> None:
    send(world, "logs", web(0, 10))
    for kind in ("delta", "parquet"):
        place = str(tmp_path / kind)
        world.run(make_job("archive", {"topic": "logs", "to": place, "format": kind}))
        with pytest.raises(ConflictError, match="has a table that is not a table of parsed lines"):
            world.run(make_job("parse", {"topic": "logs", "to": place, "table-format": kind}))


def test_damaged_model_is_told(world: World, tmp_path: Path) -> None:
    job = Parse(topic="logs", to=str(tmp_path / "events"))
    send(world, "logs", web(0, 10))
    world.run(job)
    [model] = (tmp_path / "events" / "_models").iterdir()
    model.write_bytes(model.read_bytes()[:-1])
    send(world, "logs", web(10, 10))
    with pytest.raises(DamageError, match="is damaged: restore it"):
        world.run(job)
    model.unlink()
    with pytest.raises(DamageError, match="cannot be read"):
        world.run(job)


def test_dry_run_tells_what_would_be_parsed(world: World, tmp_path: Path) -> None:
    send(world, "logs", web(0, 10))
    result = world.run(Parse(topic="logs", to=str(tmp_path / "events"), is_dry_run=True))
    assert result.sentence == f"would parse logs into {tmp_path}/events: records 10"
    assert not (tmp_path / "events").exists()


def test_stopped_job_says_how_to_resume(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "TASK_RECORDS_MAX", 10)
    monkeypatch.setattr(parse, "BATCH_TASKS_MAX", 1)
    send(world, "logs", web(0, 100))
    result = world.run(Parse(topic="logs", to=str(tmp_path / "events")), stop_after=3)
    assert not result.is_complete
    assert "run the same command to resume" in result.sentence
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    assert_each_record_once(rows(tmp_path / "events"), 100)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"once": True, "every": "1s"}, "set only one of once"),
        ({"to": "s3://b/x", "table-format": "parquet"}, "renames files"),
        ({"format": ["{time} {nonsense}"]}, "unknown"),
        ({"from-archive": "ftp://x/y"}, "unsupported scheme"),
        ({"every": "often"}, "must be a duration"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make_job("parse", {"topic": "logs", "to": "./events", **options})


def test_level_at_the_beginning_is_read_from_lines_without_a_header(world: World, tmp_path: Path) -> None:
    send(world, "logs", ["ERROR request 1", "INFO request 2", "INFORMAL words", "WARN: 3", "no level"])
    world.run(Parse(topic="logs", to=str(tmp_path / "events")))
    assert [row["level"] for row in rows(tmp_path / "events")] == ["ERROR", "INFO", None, "WARN", None]

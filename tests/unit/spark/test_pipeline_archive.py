"""The archive job on a cluster in memory: everything once, wherever it ends and whoever else is at it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pipeline_world import World

from quiver.client.ranges import TopicOffsets
from quiver.errors import ConflictError, NotFoundError, RequestError, TrimmedError
from quiver.model import TopicId
from quiver.spark.pipelines import archive as archive_module
from quiver.spark.pipelines import make_job
from quiver.spark.pipelines.archive import Archive, start_offsets
from quiver.spark.pipelines.delta_lake import DeltaLake
from quiver.spark.pipelines.lake import LakeFormat, open_lake, read_in_order
from quiver.spark.pipelines.parquet_lake import ParquetLake
from quiver.spark.pipelines.place import Place

KINDS: tuple[LakeFormat, ...] = ("delta", "parquet")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    with world.cluster:
        yield world


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def records(lake: str, topic: str, partition: int) -> list[tuple[Any, ...]]:
    """Return what an archive holds of a partition, as `World.records` returns what the topic holds."""
    opened = open_lake(Place(lake))
    files = [file for file in opened.files(topic) if file.partition == partition]
    rows = pa.Table.from_batches(read_in_order(opened.place, files)).to_pylist() if files else []
    assert [row["offset"] for row in rows] == list(range(len(rows)))
    return [
        (
            round(row["timestamp"].timestamp() * 1000),
            row["key"],
            row["value"],
            tuple((header["key"], header["value"]) for header in row["headers"] or ()),
        )
        for row in rows
    ]


def check_same(world: World, lake: str, topic: str = "logs", partitions: int = 2) -> None:
    for partition in range(partitions):
        assert records(lake, topic, partition) == world.records(topic, partition)


@pytest.mark.parametrize("kind", KINDS)
def test_archive_holds_all_that_records_are_and_goes_on_where_it_was(world: World, lake: str, kind: LakeFormat) -> None:
    world.fill("logs", 100, 30)
    job = Archive(topic="logs", to=lake, format=kind)
    assert world.run(job).facts["records"] == 130
    check_same(world, lake)
    assert world.run(job).facts["records"] == 0
    world.fill("logs", 0, 50)
    world.cluster.add_partitions("logs", 3)
    world.cluster.producer("logs").send("new", partition=2).result()
    assert world.run(job).facts["records"] == 51
    check_same(world, lake, partitions=3)


def test_records_lie_by_hour(world: World, lake: str) -> None:
    world.fill("logs", 10, timestamp=lambda offset: offset * 1_800_000)
    result = world.run(Archive(topic="logs", to=lake))
    assert result.facts["files"] == 5
    assert [file.hour for file in open_lake(Place(lake)).files("logs")] == [f"1970-01-01T0{hour}" for hour in range(5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_committed", [False, True])
def test_archive_that_dies_at_any_commit_loses_nothing_and_doubles_nothing(
    world: World, lake: str, kind: LakeFormat, is_committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its commit the round has not happened, behind it it has: nothing in between is anybody's to see."""
    monkeypatch.setattr(archive_module, "BATCH_RECORDS_MAX", 30)
    world.fill("logs", 70, 40)
    of_kind: Any = DeltaLake if kind == "delta" else ParquetLake
    commit = of_kind.commit
    for death in itertools.count(1):
        left = iter(range(death, -1, -1))

        def die(self: Any, *arguments: Any, left: Iterator[int] = left) -> None:
            is_last = next(left) == 1
            if is_last and not is_committed:
                raise KeyboardInterrupt
            commit(self, *arguments)
            if is_last:
                raise KeyboardInterrupt

        monkeypatch.setattr(of_kind, "commit", die)
        try:
            world.run(Archive(topic="logs", to=lake, format=kind))
            break
        except KeyboardInterrupt:
            world.fill("logs", 20, 20)
    assert death > 2
    check_same(world, lake)


def test_archive_that_is_told_to_stop_ends_its_round(world: World, lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "BATCH_RECORDS_MAX", 30)
    world.fill("logs", 100, 0)
    job = Archive(topic="logs", to=lake)
    result = world.run(job, stop_after=2)
    assert not result.is_complete
    assert result.facts["records"] == 30
    assert "run the same command to resume" in result.sentence
    assert world.run(job).is_complete
    check_same(world, lake)


def test_archive_that_follows_a_topic_ends_when_told(world: World, lake: str) -> None:
    world.fill("logs", 10, 0)
    result = world.run(Archive(topic="logs", to=lake, every="1h"), stop_after=3)
    assert result.is_complete
    assert result.facts["records"] == 10


def test_consumer_shows_how_far_the_archive_is(world: World, lake: str) -> None:
    world.fill("logs", 10, 20)
    world.run(Archive(topic="logs", to=lake, consumer="lake"))
    consumer = world.cluster.consumer("logs", name="lake")
    assert [consumer.position(partition) for partition in range(2)] == [10, 20]


def test_compaction_and_vacuum_are_done_at_the_end(world: World, lake: str) -> None:
    for _ in range(3):
        world.fill("logs", 10, 10)
        world.run(Archive(topic="logs", to=lake))
    result = world.run(Archive(topic="logs", to=lake, is_compact=True, is_vacuum=True))
    assert (result.facts["compacted_files"], result.facts["compacted_into"]) == (6, 2)
    assert result.facts["vacuumed_files"] == 0
    assert "compacted files 6" in result.sentence
    check_same(world, lake)


def test_dry_run_says_what_would_be_done_and_does_nothing(world: World, lake: str) -> None:
    world.fill("logs", 5, 6)
    result = world.run(Archive(topic="logs", to=lake, is_dry_run=True))
    assert (result.facts["records"], world.spark.tasks) == (11, 0)
    assert "would archive logs" in result.sentence
    with pytest.raises(NotFoundError):
        open_lake(Place(lake))
    world.run(Archive(topic="logs", to=lake))
    assert world.run(Archive(topic="logs", to=lake, is_dry_run=True)).facts["records"] == 0


def test_topic_that_was_made_anew_is_not_archived_as_if_it_were_the_old_one(world: World, lake: str) -> None:
    world.fill("logs", 5)
    world.run(Archive(topic="logs", to=lake))
    world.cluster.delete_topic("logs")
    world.fill("logs", 50)
    with pytest.raises(ConflictError, match="use another lake"):
        world.run(Archive(topic="logs", to=lake))


def offsets(*values: int) -> TopicOffsets:
    return TopicOffsets(topic="t", topic_id=TopicId(1), created_ms=1, offsets=dict(enumerate(values)))


def test_place_is_behind_what_is_archived_and_at_the_beginning_of_what_is_new() -> None:
    assert start_offsets(offsets(5, 7), offsets(9, 9, 4), {0: 8}, skips_lost=False) == ({0: 8, 1: 7, 2: 0}, 0)


def test_what_is_gone_before_it_was_archived_is_an_error_or_is_counted() -> None:
    with pytest.raises(TrimmedError, match=r"retention removed offsets 3 to 4 before they were archived.*skip-lost"):
        start_offsets(offsets(5), offsets(9), {0: 3}, skips_lost=False)
    assert start_offsets(offsets(5), offsets(9), {0: 3}, skips_lost=True) == ({0: 5}, 2)


def test_archive_that_has_more_than_the_topic_is_not_added_to() -> None:
    with pytest.raises(ConflictError, match="ends at 9, but the archive has offsets up to 10"):
        start_offsets(offsets(0), offsets(9), {0: 10}, skips_lost=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"once": True, "every": "1s"}, "set only one of once"),
        ({"every": "often"}, "option every must be a duration such as"),
        ({"format": "parquet", "compact": True}, "compact and vacuum need format delta"),
        ({"keep": "10m"}, "keep must be at least 1h"),
        ({"format": "orc"}, "Invalid enum value 'orc'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make_job("archive", {"topic": "logs", "to": "x", **options})


def test_what_is_not_archived_yet_is_held_while_the_job_runs(
    world: World, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "BATCH_RECORDS_MAX", 30)
    world.fill("logs", 60, 0)
    held: list[dict[int, int]] = []
    commit = DeltaLake.commit

    def look(self: Any, *arguments: Any) -> None:
        held.extend(dict(hold.offsets) for hold in world.cluster.holds())
        commit(self, *arguments)

    monkeypatch.setattr(DeltaLake, "commit", look)
    world.run(Archive(topic="logs", to=lake))
    assert held[0][0] == 0
    assert len(held) == 2
    assert world.cluster.holds() == []


@pytest.mark.parametrize("moment", range(1, 6))
def test_two_who_archive_the_same_at_once_double_nothing(
    world: World, lake: str, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them does all of it at some moment of the other, which must notice whenever it looks next."""
    monkeypatch.setattr(archive_module, "BATCH_RECORDS_MAX", 30)
    world.fill("logs", 60, 40)
    refresh, looks = DeltaLake.refresh, itertools.count(1)

    def let_the_other_go_first(self: DeltaLake) -> None:
        if next(looks) == moment:
            world.run(Archive(topic="logs", to=lake))
        refresh(self)

    monkeypatch.setattr(DeltaLake, "refresh", let_the_other_go_first)
    is_noticed = moment not in (1, 5)  # it has not looked yet, or is done
    with pytest.raises(ConflictError, match="another job archives") if is_noticed else nullcontext():
        world.run(Archive(topic="logs", to=lake))
    check_same(world, lake)

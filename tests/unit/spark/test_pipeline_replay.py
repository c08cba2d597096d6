"""The replay job on a cluster in memory: what was archived, in its order, once, wherever it ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pipeline_world import Guillotine, World

from quiver.errors import ConflictError, NotFoundError, RequestError
from quiver.spark.pipelines import make_job
from quiver.spark.pipelines import replay as replay_module
from quiver.spark.pipelines.archive import Archive
from quiver.spark.pipelines.lake import LakeFile
from quiver.spark.pipelines.replay import OFFSET_MAX, Replay, select
from quiver.spark.publishing import ResumableWriter

HOUR_MS = 3_600_000


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(replay_module, "BATCH_OFFSETS", 20)
    world = World(monkeypatch)
    yield world
    world.cluster.close()


@pytest.fixture
def lake(world: World, tmp_path: Path) -> str:
    """An archive of a topic whose hours interleave."""
    world.fill("logs", 70, 30, timestamp=lambda offset: offset % 7 * HOUR_MS)
    path = str(tmp_path / "lake")
    world.run(Archive(topic="logs", to=path))
    return path


def check_same(world: World, topic: str, source: str = "logs") -> None:
    for partition in range(2):
        assert world.records(topic, partition) == world.records(source, partition)


def test_replayed_topic_is_the_archived_one(world: World, lake: str) -> None:
    result = world.run(Replay(from_=lake, topic="again"))
    assert (result.facts["records"], result.facts["sent"], result.is_complete) == (100, 100, True)
    check_same(world, "again")


def test_replay_into_a_topic_that_was_wiped_has_its_name_and_offsets(world: World, lake: str) -> None:
    before = [world.records("logs", partition) for partition in range(2)]
    world.cluster.delete_topic("logs")
    world.run(Replay(from_=lake, topic="logs"))
    assert [world.records("logs", partition) for partition in range(2)] == before


def test_replay_that_is_run_again_adds_what_is_missing_and_under_another_name_everything(
    world: World, lake: str
) -> None:
    job = Replay(from_=lake, topic="again")
    world.run(job)
    assert world.run(job).facts["sent"] == 0
    world.fill("logs", 25, 25)
    world.run(Archive(topic="logs", to=lake, is_compact=True))
    result = world.run(job)
    assert (result.facts["sent"], result.facts["there_before"]) == (50, 100)
    assert "already there 100" in result.sentence
    check_same(world, "again")
    assert world.run(Replay(from_=lake, topic="again", name="once more")).facts["sent"] == 150


def test_replay_ends_between_rounds_when_told_and_goes_on(world: World, lake: str) -> None:
    job = Replay(from_=lake, topic="again")
    result = world.run(job, stop_after=len(world.told) + 3)  # it tells of two rounds, and of the session
    assert (result.is_complete, result.facts["sent"]) == (False, 70)
    assert world.run(job).facts["sent"] == 30
    check_same(world, "again")


@pytest.mark.parametrize("is_last_done", [False, True])
def test_replay_that_dies_at_any_request_loses_nothing_and_doubles_nothing(
    world: World, lake: str, is_last_done: bool
) -> None:
    whole = world.cluster
    for requests in itertools.count(3, 3):
        topic = f"again-{requests}"
        guillotine: Any = Guillotine(world, requests, is_last_done=is_last_done)
        try:
            with world.connect(guillotine) as world.cluster:
                world.run(Replay(from_=lake, topic=topic))
            is_over = True
        except RequestError:
            is_over = False
        finally:
            world.cluster = whole
        world.run(Replay(from_=lake, topic=topic))
        check_same(world, topic)
        if is_over:
            break
    assert requests > 20


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"offsets": "25:45"}, [range(25, 45), range(25, 30)]),
        ({"offsets": ":3"}, [range(3), range(3)]),
        ({"offsets": "0=60:, 1=2:4"}, [range(60, 70), range(2, 4)]),
        ({"offsets": "1=28:"}, [range(0), range(28, 30)]),
        ({"time": "1970-01-01T02:00/1970-01-01T02:59:59"}, [range(2, 70, 7), range(2, 30, 7)]),
        ({"time": "1970-01-01T08:00+02:00/"}, [range(6, 70, 7), range(6, 30, 7)]),
        ({"time": "/1970-01-01T01:00"}, [range(0, 70, 7), range(0, 30, 7)]),
        ({"time": "2000-01-01/"}, [range(0), range(0)]),
    ],
)
def test_only_what_is_selected_is_replayed(
    world: World, lake: str, options: dict[str, Any], expected: list[range]
) -> None:
    job = Replay(from_=lake, topic="again", **options)
    for _ in range(2):
        world.run(job)
    for partition, offsets in enumerate(expected):
        values = [value for _, _, value, _ in world.records("again", partition)]
        assert values == [f"{partition}-{offset}".encode() for offset in offsets]


def test_topic_with_fewer_partitions_is_refused(world: World, lake: str) -> None:
    world.cluster.create_topic("small", partitions=1)
    with pytest.raises(
        ConflictError, match="'small' has 1 partitions, but the archive of 'logs' has 2: add partitions"
    ):
        world.run(Replay(from_=lake, topic="small"))


def test_topic_is_created_with_all_archived_partitions_so_that_keys_hash_the_same(world: World, lake: str) -> None:
    world.cluster.create_topic("sparse", partitions=5)
    with world.cluster.producer("sparse") as producer:
        producer.send("x", key="k", partition=1)
    world.run(Archive(topic="sparse", to=lake))
    world.run(Replay(from_=lake, source="sparse", topic="again"))
    assert len(world.cluster.offsets("again").offsets) == 5
    assert [len(world.records("again", partition)) for partition in range(5)] == [0, 1, 0, 0, 0]


def test_topic_with_more_partitions_is_refused_unless_it_is_wished(world: World, lake: str) -> None:
    world.cluster.create_topic("large", partitions=3)
    with pytest.raises(ConflictError, match="has 3 partitions, but the archive of 'logs' has 2: new records of a key"):
        world.run(Replay(from_=lake, topic="large"))
    assert sum(world.cluster.offsets("large").offsets.values()) == 0
    world.run(Replay(from_=lake, topic="large", is_more_partitions=True))
    assert world.records("large", 1) == world.records("logs", 1)


def test_very_topic_that_was_archived_is_refused_unless_it_is_wished(world: World, lake: str) -> None:
    with pytest.raises(ConflictError, match="is the topic that was archived"):
        world.run(Replay(from_=lake, topic="logs"))
    world.run(Replay(from_=lake, topic="logs", is_same=True))
    once = world.records("logs", 1)
    assert (len(once), once[:30]) == (60, once[30:])


def test_source_is_named_where_it_is_not_clear(world: World, lake: str) -> None:
    world.fill("other", 3)
    world.run(Archive(topic="other", to=lake))
    with pytest.raises(NotFoundError, match=r"has logs, other\. Set source to one of them"):
        world.run(Replay(from_=lake, topic="again"))
    with pytest.raises(NotFoundError, match="cannot determine the archived topic"):
        world.run(Replay(from_=lake, topic="again", source="logz"))
    assert world.run(Replay(from_=lake, topic="again", source="other")).facts["sent"] == 3


def test_dry_run_makes_no_topic(world: World, lake: str) -> None:
    result = world.run(Replay(from_=lake, topic="again", offsets=":5", is_dry_run=True))
    assert "would replay logs" in result.sentence
    assert "again" not in world.cluster.list_topics()


def test_partition_that_has_forgotten_is_an_error_and_no_reason_to_double(world: World) -> None:
    world.fill("logs", 3, 3)
    lane = ResumableWriter(world.cluster, "logs", "lane", {0: 5})
    with pytest.raises(ConflictError, match="reports 0 records of producer 'lane'; expected at least 5"):
        lane.put(0, {"value": pa.array([b"x"])})
    lane.abort()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"offsets": "1:2", "time": "/"}, "set only one of offsets, time"),
        ({"offsets": "7"}, "offsets must be FIRST:END"),
        ({"offsets": "1:2,3:4"}, "offsets must be FIRST:END"),
        ({"offsets": "0=5:5"}, "END must be greater than FIRST"),
        ({"time": "2026-01-01"}, "time must be FROM/TO"),
        ({"time": "soon/"}, "'soon' is not an ISO 8601 time"),
        ({"time": "2026-01-02/2026-01-01"}, "TO must be later than FROM"),
    ],
)
def test_selections_that_cannot_be_are_refused(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make_job("replay", {"from": "x", "topic": "y", **options})


def test_files_that_cannot_hold_what_is_selected_are_left_out() -> None:
    def file(partition: int, first: int, last: int, hour: str) -> LakeFile:
        return LakeFile(
            path=f"{partition}-{first}",
            topic="t",
            partition=partition,
            hour=hour,
            size_bytes=1,
            count=1 + last - first,
            first_offset=first,
            last_offset=last,
        )

    files = [
        file(0, 0, 9, "2026-11-15T09"),
        file(0, 10, 19, "2026-11-15T10"),
        file(1, 0, 5, "2026-11-15T10"),
        file(1, 6, 7, "12026-11-15T10"),
    ]
    assert [one.path for one in select("0=9:10", "").files(files)] == ["0-0"]
    assert [one.path for one in select("", "2026-11-15T10:59/2026-11-15T11:00").files(files)] == ["0-10", "1-0"]
    assert [one.path for one in select("", "2026-11-15T11:00/").files(files)] == ["1-6"]
    assert select("", "").offsets(3) == (0, OFFSET_MAX)

"""Lakes: what is committed is there, with its place, once; files by hour, read back in the order of offsets."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import ConflictError, DamageError, NotFoundError, StorageError
from quiver.spark.pipelines import lake as lakes
from quiver.spark.pipelines.delta_lake import DeltaLake, merge_files, plan_bins
from quiver.spark.pipelines.lake import (
    FILE_SCHEMA,
    ArchivedRanges,
    Lake,
    LakeFile,
    LakeFormat,
    LakeWriter,
    hidden_path,
    hour_name,
    open_lake,
    read_in_order,
    split_hours,
)
from quiver.spark.pipelines.parquet_lake import COMMITS, ParquetLake
from quiver.spark.pipelines.place import Place

HOUR_MS = 3_600_000
KINDS: tuple[LakeFormat, ...] = ("delta", "parquet")


def batch(offsets: list[int], *, hours: list[int] | None = None) -> pa.RecordBatch:
    times = [(hour if hours else 0) * HOUR_MS * 1000 + 7 for hour in hours or offsets]
    columns = [
        pa.array(offsets, pa.int64()),
        pa.array(times, pa.timestamp("us", tz="UTC")),
        pa.array([None if at % 3 else b"k" for at in offsets], pa.binary()),
        pa.array([b"%d" % at for at in offsets], pa.binary()),
        pa.array([[{"key": "h", "value": None}] if at % 2 else None for at in offsets], FILE_SCHEMA.field(4).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=FILE_SCHEMA)


def write(lake: Lake, offsets: list[int], *, partition: int = 0, hours: list[int] | None = None) -> list[LakeFile]:
    writer = LakeWriter(lake.place, topic="t", partition=partition, is_hidden=lake.hides_uncommitted)
    return writer.write([batch(offsets, hours=hours)])


def archived(*ends: int, begin: int | None = None) -> ArchivedRanges:
    """Return what a commit says that archives up to these offsets, from `begin` on, or from wherever the lake is."""
    begins = [end if begin is None else begin for end in ends]
    return ArchivedRanges(topic="t", incarnation="c/1/2", begins=dict(enumerate(begins)), ends=dict(enumerate(ends)))


def offsets_of(lake: Lake, partition: int = 0) -> list[int]:
    files = [file for file in lake.files("t") if file.partition == partition]
    return [at for part in read_in_order(lake.place, files) for at in part["offset"].to_numpy().tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_commit_adds_files_and_moves_the_place(tmp_path: Path, kind: LakeFormat) -> None:
    lake = open_lake(Place(str(tmp_path)), kind)
    assert lake.archived("t", "c/1/2", [0, 1]) is None
    lake.commit([*write(lake, [0, 1, 2]), *write(lake, [5], partition=1)], archived(3, 6))
    for seen in (lake, open_lake(Place(str(tmp_path)))):
        assert seen.archived("t", "c/1/2", [0, 1, 2]) == {0: 3, 1: 6}
        assert (offsets_of(seen, 0), offsets_of(seen, 1)) == ([0, 1, 2], [5])
        assert seen.topics() == ["t"]
        assert [(file.count, file.first_offset, file.last_offset) for file in seen.files("t")] == [(3, 0, 2), (1, 5, 5)]
        assert seen.identity == lake.identity
    assert lake.files("other") == []


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_not_committed_are_not_there(tmp_path: Path, kind: LakeFormat) -> None:
    lake = open_lake(Place(str(tmp_path)), kind)
    write(lake, [0, 1, 2])
    assert offsets_of(open_lake(Place(str(tmp_path)))) == []
    lake.commit(write(lake, [0, 1]), archived(2))
    assert offsets_of(open_lake(Place(str(tmp_path)))) == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_second_of_two_who_archive_the_same_is_refused(tmp_path: Path, kind: LakeFormat) -> None:
    first, second = open_lake(Place(str(tmp_path)), kind), open_lake(Place(str(tmp_path)), kind)
    first.commit(write(first, [0, 1]), archived(2))
    with pytest.raises(ConflictError, match="another job archives topic 't'"):
        second.commit(write(second, [0, 1, 2]), archived(3, begin=0))
    second.refresh()
    assert second.archived("t", "c/1/2", [0]) == {0: 2}
    second.commit(write(second, [2]), archived(3, begin=2))
    assert offsets_of(second) == [0, 1, 2]
    first.refresh()  # it has seen the other's commit, but not planned by it
    with pytest.raises(ConflictError, match="another job archives topic 't'"):
        first.commit(write(first, [2]), archived(3, begin=2))
    assert offsets_of(first) == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_topics_do_not_get_in_the_way_of_each_other(tmp_path: Path, kind: LakeFormat) -> None:
    first, second = open_lake(Place(str(tmp_path)), kind), open_lake(Place(str(tmp_path)), kind)
    first.commit(write(first, [0, 1]), archived(2))
    second.commit([], ArchivedRanges(topic="u", incarnation="x", begins={0: 0}, ends={0: 9}))
    for lake in (second, open_lake(Place(str(tmp_path)))):
        assert lake.archived("t", "c/1/2", [0]) == {0: 2}
        assert lake.archived("u", "x", [0]) == {0: 9}


@pytest.mark.parametrize("kind", KINDS)
def test_topic_that_was_made_anew_is_refused(tmp_path: Path, kind: LakeFormat) -> None:
    lake = open_lake(Place(str(tmp_path)), kind)
    lake.commit(write(lake, [0]), archived(1))
    with pytest.raises(ConflictError, match="it was recreated, or is in another cluster"):
        lake.archived("t", "c/2/3", [0])


def test_lake_is_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no archive"):
        open_lake(Place(str(tmp_path)))
    open_lake(Place(str(tmp_path)), "parquet")
    assert isinstance(open_lake(Place(str(tmp_path))), ParquetLake)
    with pytest.raises(ConflictError, match="format parquet, not delta"):
        open_lake(Place(str(tmp_path)), "delta")


def test_plain_reader_of_a_parquet_lake_sees_what_is_committed_and_nothing_else(tmp_path: Path) -> None:
    lake = open_lake(Place(str(tmp_path)), "parquet")
    write(lake, [7, 8])  # by an attempt that never came to its commit
    lake.commit(write(lake, [0, 1]), archived(2))
    found = pq.read_table(str(tmp_path))
    assert found["offset"].to_pylist() == [0, 1]
    assert found["hour"].to_pylist() == ["1970-01-01T00"] * 2


def test_commit_of_a_parquet_lake_is_finished_by_the_next_one(tmp_path: Path) -> None:
    lake = open_lake(Place(str(tmp_path)), "parquet")
    files = write(lake, [0, 1]) + write(lake, [0], partition=1)
    lake.commit(files, archived(2, 1))
    for file in files:  # as if the author had died right behind the commit
        path = os.path.join(lake.place.url, file.path)
        os.rename(path, hidden_path(path))
    again = open_lake(Place(str(tmp_path)))
    assert offsets_of(again) == [0, 1]
    assert pq.read_table(str(tmp_path)).num_rows == 3


def test_commit_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    open_lake(Place(str(tmp_path)), "parquet")
    commit = tmp_path / COMMITS / f"{1:020d}.json"
    for text, sentence in (("{", "is not a valid commit"), ('{"v": 9, "identity": "x"}', "has version 9")):
        commit.write_text(text)
        with pytest.raises(DamageError, match=sentence):
            open_lake(Place(str(tmp_path)))


def test_delta_lake_is_a_delta_table_with_its_older_versions(tmp_path: Path) -> None:
    lake = open_lake(Place(str(tmp_path)), "delta")
    lake.commit(write(lake, [0, 1]), archived(2))
    lake.commit(write(lake, [2]), archived(3))
    assert set(DeltaTable(str(tmp_path)).to_pyarrow_table()["offset"].to_pylist()) == {0, 1, 2}
    assert DeltaTable(str(tmp_path), version=1).to_pyarrow_table()["offset"].to_pylist() == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_lake_where_no_directory_can_be_is_refused(tmp_path: Path, kind: LakeFormat) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be"):
        open_lake(Place(str(tmp_path / "file" / "lake")), kind)


def test_table_that_is_no_table_any_more_is_told(tmp_path: Path) -> None:
    lake = DeltaLake(Place(str(tmp_path)))
    next((tmp_path / "_delta_log").glob("*.json")).write_text("{")
    with pytest.raises(StorageError, match=r"the Delta table .* cannot be used"):
        DeltaLake(lake.place)


def test_compaction_keeps_records_order_place_and_older_versions(tmp_path: Path) -> None:
    lake = DeltaLake(Place(str(tmp_path)))
    for first in (0, 10, 20):
        offsets = list(range(first, first + 10))
        lake.commit(write(lake, offsets, hours=[at // 15 for at in offsets]), archived(first + 10))
    bins = plan_bins(lake.files("t"))
    assert [[file.first_offset for file in files] for files in bins] == [[0, 10], [15, 20]]
    lake.replace(
        [file for files in bins for file in files], [new for files in bins for new in merge_files(lake.place, files)]
    )
    assert [(file.hour, file.first_offset, file.last_offset) for file in lake.files("t")] == [
        ("1970-01-01T00", 0, 14),
        ("1970-01-01T01", 15, 29),
    ]
    assert offsets_of(lake) == list(range(30))
    assert lake.archived("t", "c/1/2", [0]) == {0: 30}
    assert DeltaTable(str(tmp_path), version=3).to_pyarrow_table().num_rows == 30
    assert plan_bins(lake.files("t")) == []


def test_vacuum_removes_what_no_version_needs_and_what_crashes_left(tmp_path: Path) -> None:
    lake = DeltaLake(Place(str(tmp_path)))
    lake.commit(write(lake, [0]), archived(1))
    lake.commit(write(lake, [1]), archived(2))
    orphan = write(lake, [2])[0]
    old = lake.files("t")
    lake.replace(old, merge_files(lake.place, old))
    assert lake.vacuum(timedelta(hours=2)) == 0
    for file in (*old, orphan):
        os.utime(os.path.join(lake.place.url, file.path), (0, 0))
    assert lake.vacuum(timedelta(hours=2)) == 1  # old files are needed by versions of this very hour
    assert not os.path.exists(os.path.join(lake.place.url, orphan.path))
    assert lake.vacuum(timedelta(0)) == 2
    assert offsets_of(lake) == [0, 1]


def test_bins_hold_neighbours_up_to_a_size() -> None:
    files = [
        LakeFile(
            path=f"{at}", topic="t", partition=0, hour="h", size_bytes=size, count=1, first_offset=at, last_offset=at
        )
        for at, size in enumerate((4, 4, 4, 20, 1, 1))
    ]
    assert [[file.first_offset for file in own] for own in plan_bins(reversed(files), 10)] == [[0, 1], [4, 5]]


def test_hours_are_split_in_order_of_offsets() -> None:
    found = list(split_hours(batch([0, 1, 2, 3], hours=[5, 6, 5, -1])))
    assert [(hour, part["offset"].to_pylist()) for hour, part in found] == [
        ("1970-01-01T05", [0, 2]),
        ("1970-01-01T06", [1]),
        ("1969-12-31T23", [3]),
    ]
    assert hour_name(491_000) == "2026-01-05T08"
    assert list(split_hours(batch([]))) == []


def test_hours_that_jump_about_make_more_files_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakes, "HOURS_OPEN_MAX", 2)
    lake = open_lake(Place(str(tmp_path)), "delta")
    writer = LakeWriter(lake.place, topic="t", partition=0, is_hidden=False)
    files = writer.write(batch([at], hours=[at % 4]) for at in range(40))
    assert len(files) == 40
    lake.commit(files, archived(40))
    assert offsets_of(lake) == list(range(40))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 20))
def test_overlapping_files_are_read_in_order_whatever_their_hours(
    tmp_path_factory: pytest.TempPathFactory, hours: list[int], read_records: int, step: int
) -> None:
    root = Place(str(tmp_path_factory.mktemp("lake")))
    files: list[LakeFile] = []
    for first in range(0, len(hours), step):
        own = list(range(first, min(first + step, len(hours))))
        writer = LakeWriter(root, topic="t", partition=0, is_hidden=False)
        files += writer.write([batch(own, hours=hours[first : first + step])])
    if len(files) > 3:
        files = [*merge_files(root, files[: len(files) // 2]), *files[len(files) // 2 :]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lakes, "READ_RECORDS", read_records)
        found = pa.Table.from_batches(read_in_order(root, files[::-1]), FILE_SCHEMA)
        part = pa.Table.from_batches(read_in_order(root, files, (step, 2 * step)), FILE_SCHEMA)
    assert found.equals(pa.Table.from_batches([batch(list(range(len(hours))), hours=hours)]))
    offsets = part["offset"].to_numpy().tolist()
    assert offsets == sorted(set(offsets))
    assert {at for at in range(step, 2 * step) if at < len(hours)} <= set(offsets)


def test_row_groups_outside_of_the_wanted_offsets_are_not_read(tmp_path: Path) -> None:
    writer = LakeWriter(Place(str(tmp_path)), topic="t", partition=0, is_hidden=False)
    files = writer.write(batch(list(range(first, first + 5))) for first in range(0, 20, 5))
    found = [part["offset"].to_pylist() for part in read_in_order(Place(str(tmp_path)), files, (7, 11))]
    assert found == [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
    assert list(read_in_order(Place(str(tmp_path)), files, (20, 30))) == []

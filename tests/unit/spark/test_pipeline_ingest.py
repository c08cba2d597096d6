"""The ingest job on a cluster in memory: every line once, wherever it ends and whatever becomes of the files."""

from __future__ import annotations

import gzip
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_world import Guillotine, World

from quiver.client.batching import partition_of
from quiver.errors import ConflictError, DecodeError, FencedError, NotFoundError, RequestError, TooLargeError
from quiver.spark.pipelines import ingest as ingest_module
from quiver.spark.pipelines import make_job, source_files
from quiver.spark.pipelines.ingest import Ingest, assign_files, plan_batches
from quiver.spark.pipelines.ingest_ledger import TOPIC, IngestLedger, read_state
from quiver.spark.pipelines.source_files import LineFields, SourceFile, find_files, read_records, scan_file, to_ms


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    world.cluster.create_topic("logs", partitions=2)
    yield world
    world.cluster.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.mkdir()
    return path


def lines(label: str, *numbers: int) -> bytes:
    return b"".join(f"{label} {number}\n".encode() for number in range(*numbers))


def values(world: World, topic: str = "logs") -> list[list[bytes]]:
    return [[value for _, _, value, _ in world.records(topic, partition)] for partition in range(2)]


def texts(world: World, topic: str = "logs") -> list[str]:
    return sorted(value.decode() for own in values(world, topic) for value in own)


def ingest(world: World, *paths: Path, **options: Any) -> Any:
    return world.run(Ingest(paths=tuple(map(str, paths)), topic="logs", **options)).facts


def test_every_line_of_every_kind_of_file_becomes_a_record(world: World, folder: Path) -> None:
    (folder / "a.log").write_bytes(b"one\n\ntwo\r\nlast")
    (folder / "b.log.gz").write_bytes(gzip.compress(b"gz 1\n") + gzip.compress(b"gz 2\n"))
    packed = zstandard.ZstdCompressor().compress
    (folder / "c.zst").write_bytes(packed(b"zst 1\n") + packed(b"zst 2"))
    (folder / "deep").mkdir()
    rows = {"value": ["row"], "key": ["k"], "timestamp": [pa.scalar(7, pa.timestamp("ms"))]}
    pq.write_table(pa.table(rows), folder / "deep" / "d.parquet")
    (folder / ".hidden").write_bytes(b"no")
    (folder / "_done").write_bytes(b"no")
    (folder / "empty").write_bytes(b"")
    facts = ingest(world, folder)
    assert (facts["files"], facts["records"]) == (4, 9)
    assert texts(world) == sorted(["one", "", "two\r", "last", "gz 1", "gz 2", "zst 1", "zst 2", "row"])
    (row,) = [record for part in range(2) for record in world.records("logs", part) if record[2] == b"row"]
    assert row[:2] == (7, b"k")


def test_lines_of_a_file_stay_in_order_in_one_partition_and_files_take_turns(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "BLOCK_BYTES", 16)
    for name in "abcd":
        (folder / name).write_bytes(lines(name, 50))
    ingest(world, folder)
    for number, name in enumerate("abcd"):
        own = [value for value in values(world)[number % 2] if value.startswith(name.encode())]
        assert own == lines(name, 50).splitlines()


def test_file_is_ingested_once_under_whatever_name(world: World, folder: Path) -> None:
    (folder / "a").write_bytes(lines("a", 5))
    (folder / "twin").write_bytes(lines("a", 5))
    facts = ingest(world, folder)
    assert (facts["files"], facts["files_same"]) == (1, {str(folder / "twin"): str(folder / "a")})
    os.utime(folder / "a", (1, 1))
    assert ingest(world, folder / "a")["files_known"] == 1
    os.rename(folder / "a", folder / "a.1")
    (folder / "a").write_bytes(lines("new", 3))
    facts = ingest(world, folder)
    assert (facts["files"], facts["sent"]) == (1, 3)
    assert ingest(world, folder)["sent"] == 0
    assert texts(world) == sorted((lines("a", 5) + lines("new", 3)).decode().splitlines())


def test_what_was_added_to_a_file_is_ingested_also_when_it_was_renamed(world: World, folder: Path) -> None:
    (folder / "app.log").write_bytes(lines("old", 5))
    ingest(world, folder)
    (folder / "app.log").write_bytes(lines("old", 8))
    assert ingest(world, folder)["sent"] == 3
    (folder / "app.log.1").write_bytes(lines("old", 10))
    (folder / "app.log").write_bytes(lines("new", 4))
    assert ingest(world, folder)["sent"] == 6
    assert texts(world) == sorted((lines("old", 10) + lines("new", 4)).decode().splitlines())


def test_file_that_begins_like_another_that_is_still_there_is_a_file_of_its_own(world: World, folder: Path) -> None:
    (folder / "a").write_bytes(b"banner\n")
    ingest(world, folder)
    (folder / "b").write_bytes(b"banner\nmore\n")
    assert ingest(world, folder)["sent"] == 2


def test_growth_that_cannot_be_continued_is_refused_before_anything_is_sent(world: World, folder: Path) -> None:
    (folder / "a").write_bytes(b"begun")
    ingest(world, folder)
    (folder / "a").write_bytes(b"begun and done\n")
    with pytest.raises(ConflictError, match="its last ingested line was incomplete"):
        ingest(world, folder / "a")
    first = gzip.compress(b"1\n", mtime=0)
    (folder / "c.gz").write_bytes(first)
    ingest(world, folder / "c.gz")
    (folder / "c.gz").write_bytes(first + gzip.compress(b"2\n"))
    with pytest.raises(ConflictError, match="only uncompressed text files can be resumed"):
        ingest(world, folder / "c.gz")


def test_keys_and_times_stand_in_fields_of_lines(world: World, folder: Path) -> None:
    rows = [
        b'{"user": "ann", "at": 1700000000123, "x": 1}',
        b'{"user": 7, "at": "2023-11-14T22:13:20.124Z"}',
        b'{"user": {"deep": 1}, "at": "yesterday"}',
        b"no JSON",
    ]
    (folder / "events.jsonl").write_bytes(b"\n".join(rows))
    ingest(world, folder, key="user", time="at")
    found = {
        value: (time, key, partition)
        for partition in range(2)
        for time, key, value, _ in world.records("logs", partition)
    }
    assert found[rows[0]] == (1_700_000_000_123, b"ann", partition_of(b"ann", 2))
    assert found[rows[1]] == (1_700_000_000_124, b"7", partition_of(b"7", 2))
    assert found[rows[2]][1] is found[rows[3]][1] is None
    assert found[rows[2]][0] > 1_700_000_000_124


@pytest.mark.parametrize("is_last_done", [False, True])
def test_ingest_that_dies_at_any_request_loses_nothing_and_doubles_nothing(
    world: World, folder: Path, is_last_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "BATCH_FILES_MAX", 2)
    monkeypatch.setattr(source_files, "BLOCK_BYTES", 64)
    whole, expected = world.cluster, b""
    for requests in itertools.count(4, 4):
        for name in "abc":
            own = b"".join(b'{"k": %d, "n": "%s %d"}\n' % (n, name.encode(), requests) for n in range(20))
            (folder / f"{name}-{requests}").write_bytes(own)
            expected += own
        guillotine: Any = Guillotine(world, requests, is_last_done=is_last_done)
        try:
            with world.connect(guillotine) as world.cluster:
                ingest(world, folder, key="k")
            is_over = True
        except RequestError:
            is_over = False
        finally:
            world.cluster = whole
        ingest(world, folder)  # without the key: what was begun with it is finished with it
        assert texts(world) == sorted(expected.decode().splitlines())
        if is_over:
            break
    assert requests > 30


def test_round_that_was_begun_is_finished_with_the_same_files_or_not_at_all(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").write_bytes(lines("a", 30))
    with monkeypatch.context() as patch:
        patch.setattr(IngestLedger, "end", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            ingest(world, folder)
    (folder / "a").write_bytes(lines("b", 30))
    with pytest.raises(ConflictError, match="changed while its batch was partly ingested"):
        ingest(world, folder)
    (folder / "a").write_bytes(lines("a", 31))
    facts = ingest(world, folder)
    assert (facts["files_resumed"], facts["sent"]) == (1, 1)
    assert texts(world) == sorted(lines("a", 31).decode().splitlines())


def test_second_process_of_an_ingest_fences_off_the_first(world: World, folder: Path) -> None:
    writer = Ingest(paths=("x",), topic="logs").writer(world.cluster)
    first = IngestLedger(world.cluster, writer)
    with world.connect(world.memory) as other:
        IngestLedger(other, writer)
        with pytest.raises(FencedError):
            first.begin(((),), partitions=2, fields=LineFields())


def test_each_name_and_each_topic_has_its_own_memory(world: World, folder: Path) -> None:
    (folder / "a").write_bytes(lines("a", 3))
    assert [ingest(world, folder, name=name)["sent"] for name in ("one", "two", "one")] == [3, 3, 0]
    world.cluster.delete_topic("logs")
    world.cluster.create_topic("logs", partitions=2)
    assert ingest(world, folder, name="one")["sent"] == 3


def test_ingest_ends_between_rounds_when_told_and_goes_on(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "BATCH_FILES_MAX", 1)
    for name in "abc":
        (folder / name).write_bytes(lines(name, 10))
    job = Ingest(paths=(str(folder),), topic="logs")
    result = world.run(job, stop_after=4)
    assert not result.is_complete
    assert "run the same command to resume" in result.sentence
    again = world.run(job)
    assert again.is_complete
    assert result.facts["sent"] + again.facts["sent"] == 30  # type: ignore[operator] # numbers
    assert len(texts(world)) == 30


def test_dry_run_sends_nothing_and_remembers_nothing(world: World, folder: Path) -> None:
    (folder / "a").write_bytes(lines("a", 10))
    for topic in ("logs", "new"):
        result = world.run(Ingest(paths=(str(folder),), topic=topic, is_dry_run=True))
        assert result.sentence == f"would ingest into {topic}: files 1, bytes 40"
    assert world.cluster.list_topics() == ["logs"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.gz", gzip.compress(b"x" * 1000)[:-9], "cannot be decompressed"),
        ("a.gz", b"plain", "cannot be decompressed"),
        ("a.zst", b"plain", "cannot be decompressed"),
        ("a.parquet", b"plain", "is not a Parquet file"),
    ],
    ids=["cut off", "no gzip", "no zstd", "no Parquet"],
)
def test_file_that_cannot_be_read_is_refused_before_anything_is_sent(
    world: World, folder: Path, name: str, content: bytes, sentence: str
) -> None:
    (folder / "0.log").write_bytes(lines("good", 3))
    (folder / name).write_bytes(content)
    with pytest.raises(RequestError, match=sentence):
        ingest(world, folder)
    assert texts(world) == []
    (folder / name).unlink()
    assert ingest(world, folder)["sent"] == 3


def test_parquet_file_with_other_columns_is_refused(folder: Path) -> None:
    pq.write_table(pa.table({"value": ["a"], "level": ["b"]}), folder / "a.parquet")
    with pytest.raises(RequestError, match="has the columns level, value"):
        scan_file(str(folder / "a.parquet"))


def test_line_without_an_end_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "PAYLOAD_BYTES_MAX", 100)
    monkeypatch.setattr(source_files, "BLOCK_BYTES", 30)
    (folder / "a").write_bytes(b"ok\n" + b"x" * 200)
    with pytest.raises(TooLargeError, match="exceeds the maximum of 100 bytes"):
        scan_file(str(folder / "a"))


def test_what_is_added_or_cut_off_while_a_file_is_read_is_not_mixed_in(folder: Path) -> None:
    path = folder / "a"
    path.write_bytes(lines("a", 10))
    file = scan_file(str(path)).file
    path.write_bytes(lines("a", 20))
    assert [len(columns["value"]) for columns in read_records(file, LineFields())] == [10]
    path.write_bytes(b"a 0\n")
    with pytest.raises(ConflictError, match="was truncated while it was ingested"):
        list(read_records(file, LineFields()))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    st.integers(1, 20),
    st.sampled_from(["", ".gz", ".zst"]),
)
def test_lines_are_what_stands_before_line_feeds_however_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], block_bytes: int, suffix: str
) -> None:
    content = b"".join(row + b"\n" for row in rows)
    packed = {"": content, ".gz": gzip.compress(content), ".zst": zstandard.compress(content)}[suffix]
    path = tmp_path_factory.mktemp("lines") / f"a{suffix}"
    path.write_bytes(packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "BLOCK_BYTES", block_bytes)
        file = scan_file(str(path)).file
        found = [line for columns in read_records(file, LineFields()) for line in columns["value"].to_pylist()]
    assert found == rows


def test_paths_that_name_nothing_are_refused(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file or directory"):
        find_files([str(folder / "nothing")])
    with pytest.raises(RequestError, match="name the files or directories"):
        make_job("ingest", {"paths": [], "topic": "logs"})


def source(path: str, size_bytes: int) -> SourceFile:
    return SourceFile(path=path, size_bytes=size_bytes, mtime_ns=0, digest=path)


def test_files_are_shared_out_by_size_and_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [source("a", 10), source("b", 9), source("c", 1), source("d", 1)]
    senders = assign_files(files, 2, partitions=3, first_partition=5)
    assert [[assigned.file.path for assigned in sender] for sender in senders] == [["a", "d"], ["b", "c"]]
    assert {assigned.file.path: assigned.partition for sender in senders for assigned in sender} == {
        "a": 2,
        "b": 0,
        "c": 1,
        "d": 2,
    }
    assert len(assign_files(files[:1], 8, partitions=1, first_partition=0)) == 1
    monkeypatch.setattr(ingest_module, "BATCH_BYTES", 15)
    monkeypatch.setattr(ingest_module, "BATCH_FILES_MAX", 3)
    assert [[file.path for file in batch] for batch in plan_batches([*files, source("e", 1)])] == [
        ["a", "b"],
        ["c", "d", "e"],
    ]


def test_times_are_numbers_or_texts() -> None:
    assert [to_ms(value) for value in (5, 5.9, "1970-01-01T00:00:01+00:00", "1970-01-01")] == [5, 5, 1000, 0]
    nothing: list[object] = [None, True, -1, 1 << 60, "x", []]
    assert list(map(to_ms, nothing)) == [None] * 6


def test_entry_that_cannot_be_read_is_told(world: World) -> None:
    world.cluster.create_topic(TOPIC, partitions=1)
    for entry, sentence in (
        (b"{", "cannot be decoded"),
        (b'{"type": "end", "v": 2, "number": 0, "counts": []}', "version 2"),
    ):
        world.cluster.producer(TOPIC).send(entry, key=sentence, partition=0).result()
        with pytest.raises(DecodeError, match=sentence):
            read_state(world.cluster, sentence)

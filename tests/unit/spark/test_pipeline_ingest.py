"""The ingest job on a cluster in memory: every line once, wherever it ends and whatever becomes of the files."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_world import Guillotine, World

from quiver.client.batching import partition_of
from quiver.errors import ConflictError, DecodeError, FencedError, RequestError
from quiver.spark.pipelines import ingest as ingest_module
from quiver.spark.pipelines import make_job, source_files
from quiver.spark.pipelines.ingest import Ingest, assign_files, plan_batches
from quiver.spark.pipelines.ingest_ledger import TOPIC, AssignedFile, IngestLedger, IngestState, read_state
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
    facts = ingest(world, folder, is_final=True)
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


def test_lines_of_a_file_that_grows_stay_in_order_in_its_partition(world: World, folder: Path) -> None:
    for end in (5, 8, 12):
        (folder / "app.log").write_bytes(lines("app", end))
        ingest(world, folder)
    (folder / "app.log").rename(folder / "app.log.1")
    with open(folder / "app.log.1", "ab") as file:
        file.write(lines("app", 12, 15))
    ingest(world, folder)
    assert values(world) == [lines("app", 15).splitlines(), []]


def test_file_that_begins_like_another_that_is_still_there_is_a_file_of_its_own(world: World, folder: Path) -> None:
    (folder / "a").write_bytes(b"banner\n")
    ingest(world, folder)
    (folder / "b").write_bytes(b"banner\nmore\n")
    assert ingest(world, folder)["sent"] == 2


def test_line_that_is_being_written_is_sent_when_it_is_whole(world: World, folder: Path) -> None:
    path = folder / "app.log"
    path.write_bytes(b"one\ntw")
    facts = ingest(world, folder)
    assert (facts["sent"], facts["files_incomplete"]) == (1, 1)
    for _ in range(2):
        assert ingest(world, folder)["sent"] == 0
    for content, sent in ((b"one\ntwo", 0), (b"one\ntwo\nthr", 1), (b"one\ntwo\nthree\n", 1)):
        path.write_bytes(content)
        assert ingest(world, folder)["sent"] == sent
    assert texts(world) == ["one", "three", "two"]
    (folder / "new.log").write_bytes(b"begun")
    assert ingest(world, folder)["files"] == 0


def test_last_line_of_a_finished_file_is_sent(world: World, folder: Path) -> None:
    (folder / "app.log").write_bytes(b"one\ntwo")
    (folder / "done.gz").write_bytes(gzip.compress(b"1\n2"))
    assert ingest(world, folder)["sent"] == 3
    assert [ingest(world, folder, is_final=True)["sent"] for _ in range(2)] == [1, 0]
    (folder / "app.log").write_bytes(b"one\ntwo and more\nthree\n")
    assert ingest(world, folder)["sent"] == 2
    assert texts(world) == [" and more", "1", "2", "one", "three", "two"]


PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("added", [b"", b"app 1000\n", b"app 1000\nno line feed"], ids=["same", "grown", "incomplete"])
def test_file_that_was_compressed_after_rotation_is_not_ingested_again(
    world: World, folder: Path, suffix: str, added: bytes
) -> None:
    (folder / "svc.log").write_bytes(lines("app", 1000))
    assert ingest(world, folder)["sent"] == 1000
    os.rename(folder / "svc.log", folder / "svc.log.1")
    (folder / "svc.log").write_bytes(lines("next", 10))
    assert ingest(world, folder)["sent"] == 10
    content = (folder / "svc.log.1").read_bytes() + added
    (folder / "svc.log.1").unlink()
    (folder / f"svc.log.1.{suffix}").write_bytes(PACK[suffix](content))
    for _ in range(2):
        ingest(world, folder)
    assert texts(world) == sorted((content + b"\n" * added.endswith(b"d") + lines("next", 10)).decode().splitlines())


def test_copytruncate_loses_nothing_and_doubles_nothing(world: World, folder: Path) -> None:
    path = folder / "svc.log"
    path.write_bytes(lines("old", 5))
    ingest(world, folder)
    (folder / "svc.log.1").write_bytes(lines("old", 8))
    path.write_bytes(lines("new", 3))
    assert ingest(world, folder)["sent"] == 6
    (folder / "svc.log.2.gz").write_bytes(gzip.compress(lines("old", 8)))
    (folder / "svc.log.1").write_bytes(lines("new", 4))
    path.write_bytes(lines("newest", 2))
    ingest(world, folder)
    assert texts(world) == sorted((lines("old", 8) + lines("new", 4) + lines("newest", 2)).decode().splitlines())


def test_ingested_content_is_continued_by_one_file_only(world: World, folder: Path) -> None:
    (folder / "a.log").write_bytes(b"banner\n")
    ingest(world, folder)
    os.rename(folder / "a.log", folder / "a.log.1")
    (folder / "a.log").write_bytes(b"banner\nsecond\n")  # a new file that begins like the old one
    ingest(world, folder)
    (folder / "b.log").write_bytes(b"banner\nother\n")
    ingest(world, folder)
    assert texts(world) == ["banner", "banner", "banner", "other", "second"]


def test_grown_compressed_file_is_continued_and_grown_parquet_file_is_a_problem(world: World, folder: Path) -> None:
    first = gzip.compress(b"1\n", mtime=0)
    (folder / "c.gz").write_bytes(first)
    ingest(world, folder)
    (folder / "c.gz").write_bytes(first + gzip.compress(b"2\n"))
    assert ingest(world, folder)["sent"] == 1
    assert texts(world) == ["1", "2"]


def test_journal_of_an_older_release_still_knows_its_files(world: World, folder: Path) -> None:
    packed = gzip.compress(lines("gz", 3))
    (folder / "a.log.gz").write_bytes(packed)
    (folder / "b.log").write_bytes(lines("b", 3))
    ledger = IngestLedger(world.cluster, Ingest(paths=("x",), topic="logs").writer(world.cluster))
    old = [
        SourceFile(path=f"/gone/{name}", size_bytes=len(own), mtime_ns=1, digest=hashlib.sha256(own).hexdigest())
        for name, own in (("a.log.gz", packed), ("b.log", lines("b", 2)))
    ]
    assert [msgspec.json.decode(msgspec.json.encode(file))["end_byte"] for file in old] == [-1, -1]
    entry = ledger.begin(
        (tuple(AssignedFile(file=file, partition=0) for file in old),), partitions=2, fields=LineFields()
    )
    assert entry.number == 0
    ledger.end(({},))
    ledger.close()
    facts = ingest(world, folder)
    assert facts["files_same"] == {str(folder / "a.log.gz"): "/gone/a.log.gz"}
    assert facts["sent"] == 3  # two short lines under another folder's name identify nothing


def test_keys_and_times_stand_in_fields_of_lines(world: World, folder: Path) -> None:
    rows = [
        b'{"user": "ann", "at": 1700000000123, "x": 1}',
        b'{"user": 7, "at": "2023-11-14T22:13:20.124Z"}',
        b'{"user": {"deep": 1}, "at": "yesterday"}',
        b"no JSON",
    ]
    (folder / "events.jsonl").write_bytes(b"".join(row + b"\n" for row in rows))
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


BROKEN = bytearray(gzip.compress(os.urandom(1000)))
BROKEN[500:520] = bytes(20)
ROWS = pa.table({"value": [os.urandom(100) for _ in range(1000)]})


def parquet(table: pa.Table, *, is_damaged: bool = False) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_page_checksum=True)
    content = bytearray(sink.getvalue().to_pybytes())
    if is_damaged:
        content[2000:2400] = bytes(400)
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.gz", gzip.compress(b"x" * 1000)[:-9], "cannot be decompressed"),
        ("a.gz", b"plain", "cannot be decompressed"),
        ("a.gz", bytes(BROKEN), "cannot be decompressed"),
        ("a.zst", b"plain", "cannot be decompressed"),
        ("a.parquet", b"plain", "not a whole Parquet file"),
        ("a.parquet", parquet(ROWS, is_damaged=True), "not a whole Parquet file"),
        ("a.parquet", parquet(pa.table({"value": ["a"], "level": ["b"]})), "has the columns level, value"),
    ],
    ids=["cut off", "no gzip", "broken gzip", "no zstd", "no Parquet", "broken Parquet", "other columns"],
)
def test_file_that_cannot_be_read_is_reported_and_stops_no_other(
    world: World, folder: Path, name: str, content: bytes, sentence: str
) -> None:
    (folder / "0.log").write_bytes(lines("good", 3))
    (folder / name).write_bytes(content)
    (folder / "z.log").write_bytes(lines("last", 3))
    job = Ingest(paths=(str(folder), str(folder / "missing.log")), topic="logs")
    for sent in (6, 0):
        result = world.run(job)
        assert (result.facts["sent"], result.is_clean) == (sent, False)
        problems: Any = result.facts["problems"]
        assert problems.keys() == {str(folder / name), str(folder / "missing.log")}
        assert sentence in problems[str(folder / name)]
        assert f"not ingested: files 2\n  {folder / name}: it " in result.sentence
    assert texts(world) == sorted((lines("good", 3) + lines("last", 3)).decode().splitlines())
    (folder / name).unlink()
    assert world.run(Ingest(paths=(str(folder),), topic="logs")).is_clean


def test_line_without_an_end_is_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "PAYLOAD_BYTES_MAX", 100)
    monkeypatch.setattr(source_files, "BLOCK_BYTES", 30)
    (folder / "a").write_bytes(b"ok\n" + b"x" * 200)
    assert "exceeds the maximum of 100 bytes" in scan_file(str(folder / "a")).problem


def test_file_and_folder_without_permission_are_reported() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, user = Path(name), os.geteuid()
        folder.chmod(0o755)
        (folder / "a").write_bytes(b"x\n")
        (folder / "a").chmod(0)
        (folder / "b").mkdir(mode=0)
        if not user:  # root may read everything: be nobody
            os.seteuid(65534)
        try:
            problem, problems = scan_file(str(folder / "a")).problem, find_files([name])[1]
        finally:
            os.seteuid(user)
            (folder / "b").chmod(0o700)
    assert problem == "Permission denied"
    assert problems == {str(folder / "b"): "Permission denied"}


def test_interrupted_batch_is_finished_from_where_its_files_were_rotated_to(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.log").write_bytes(lines("a", 30))
    with monkeypatch.context() as patch:
        patch.setattr(IngestLedger, "end", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            ingest(world, folder)
    (folder / "a.log").unlink()
    (folder / "a.log.1.gz").write_bytes(gzip.compress(lines("a", 31)))
    facts = ingest(world, folder)
    assert (facts["files_resumed"], facts["sent"]) == (1, 1)
    assert texts(world) == sorted(lines("a", 31).decode().splitlines())


def test_what_is_added_or_cut_off_while_a_file_is_read_is_not_mixed_in(folder: Path) -> None:
    path = folder / "a"
    path.write_bytes(lines("a", 10))
    file = scan_file(str(path)).file
    path.write_bytes(lines("a", 20))
    assert [len(columns["value"]) for columns in read_records(file, LineFields())] == [10]
    path.write_bytes(b"a 0\n")
    with pytest.raises(ConflictError, match="a: it was truncated while it was ingested"):
        list(read_records(file, LineFields()))
    (folder / "b").write_bytes(lines("b", 30))
    (folder / "b").rename(path)
    with pytest.raises(ConflictError, match="a: it was replaced while it was ingested"):
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
    assert find_files([str(folder / "nothing")]) == ([], {str(folder / "nothing"): "no such file or directory"})
    with pytest.raises(RequestError, match="name the files or directories"):
        make_job("ingest", {"paths": [], "topic": "logs"})


def source(path: str, size_bytes: int) -> SourceFile:
    return SourceFile(path=path, size_bytes=size_bytes, mtime_ns=0, digest=path)


def test_files_are_shared_out_by_size_and_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [source("a", 10), source("b", 9), source("c", 1), source("d", 1)]
    state = IngestState()
    state.files = 5
    senders = assign_files(files, 2, partitions=3, state=state)
    assert [[assigned.file.path for assigned in sender] for sender in senders] == [["a", "d"], ["b", "c"]]
    assert {assigned.file.path: assigned.partition for sender in senders for assigned in sender} == {
        "a": 2,
        "b": 0,
        "c": 1,
        "d": 2,
    }
    assert len(assign_files(files[:1], 8, partitions=1, state=IngestState())) == 1
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

"""Backup and restore between two live clusters: equal records, cursors and settings; damage and conflicts are found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reading import read_to_end
from waiting import wait_until

import quiver
from quiver.cli import main
from quiver.errors import ConflictError, DamageError, NotFoundError
from quiver.operations.backup import create_backup
from quiver.operations.restore import restore_backup, verify_backup
from quiver.testing import LocalCluster
from quiver.wire.messages import RetentionInfo

RETENTION = RetentionInfo(ms=86_400_000)


@pytest.fixture(scope="module")
def source() -> Iterator[LocalCluster]:
    settings = {
        "log.segment_bytes_max": "4096",
        "partition.retention_interval_ms": "100",
        "partition.summary_bytes": "1024",
        "partition.summary_entries": "20",
    }
    with LocalCluster(nodes=1, settings=settings) as cluster:
        with cluster.connect() as client:
            fill(client)
        yield cluster


@pytest.fixture(scope="module")
def target() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(source: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a backup of all topics, made by the command."""
    found = tmp_path_factory.mktemp("backup") / "monday"
    assert main(["backup", "create", "--to", str(found), "--all", "--url", source.urls[0]]) == 0
    return found


def fill(client: quiver.Cluster) -> None:
    client.create_topic("logs", partitions=2, retention=RETENTION)
    with client.producer("logs", name="web") as producer:
        for number in range(300):
            headers = {"n": str(number)} if number % 3 else {}
            producer.send(f"line {number}", key=f"k{number % 7}", headers=headers, timestamp=1_700_000_000_000 + number)
    with client.consumer("logs", name="report", idle_timeout=60) as consumer:
        for _ in zip(range(120), consumer, strict=False):
            pass
        consumer.commit()
    client.create_topic("empty", partitions=1)
    client.create_topic("short", partitions=1)
    with client.producer("short", name="web") as producer:
        for number in range(400):
            producer.send(f"{number:04} " + 60 * "x")
            if number % 20 == 0:
                producer.flush()
    client.configure_topic("short", retention=RetentionInfo(bytes=8192))
    wait_until(lambda: client.offsets("short", "earliest").offsets[0])


def read(client: quiver.Cluster, topic: str) -> list[tuple[Any, ...]]:
    with client.consumer(topic) as consumer:
        found = read_to_end(consumer)
    return sorted((r.partition, r.offset, r.timestamp, r.key, r.value, tuple(r.headers or ())) for r in found)


def with_cluster(cluster: LocalCluster, work: Any) -> Any:
    async def run() -> Any:
        async with quiver.connect_async(*cluster.addresses) as client:
            return await work(client)

    return asyncio.run(run())


def test_restored_topics_are_equal(
    source: LocalCluster, target: LocalCluster, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backup", "verify", str(folder)]) == 0
    assert main(["backup", "restore", "--from", str(folder), "--url", target.urls[0]]) == 0
    assert "offsets are lower than in the source: partition 0 by" in capsys.readouterr().out
    with source.connect() as old, target.connect() as new:
        assert sorted(old.list_topics()) == sorted(new.list_topics())
        assert read(old, "logs") == read(new, "logs")
        assert new.describe_topic("logs").retention == RETENTION
        before, after = read(old, "short"), read(new, "short")
        shift = before[0][1]
        assert shift and [(row[1] - shift, *row[2:]) for row in before] == [row[1:] for row in after]  # noqa: PT018
        kinds = {(client.kind, client.name): client for client in new.clients() if client.name}
        assert {("producer", "web"), ("consumer", "report")} <= kinds.keys()
        (reported,) = [client for client in old.clients("consumer") if client.name == "report"]
        cursors = {(lag.partition, lag.cursor) for lag in old.lag(reported.id)}
        assert {(lag.partition, lag.cursor) for lag in new.lag(kinds["consumer", "report"].id)} == cursors
        assert sum(cursor for _, cursor in cursors) == 120
        assert old.holds() == []
    with pytest.raises(ConflictError, match="exists in this cluster"):
        with_cluster(target, lambda client: restore_backup(client, str(folder), (), print))


def test_damaged_missing_and_interrupted_files_are_found(source: LocalCluster, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with_cluster(source, lambda client: create_backup(client, str(copy), ("logs",), print))
    with pytest.raises(ConflictError, match="has a backup"):
        with_cluster(source, lambda client: create_backup(client, str(copy), ("logs",), print))
    victim = copy / "topics" / "0" / "1.batches"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert verify_backup(str(copy)) == ["topics/0/1.batches is damaged: its checksum does not match"]
    assert main(["backup", "verify", str(copy)]) == 1
    with LocalCluster(nodes=1) as fresh:
        with pytest.raises(DamageError, match="not done"):
            with_cluster(fresh, lambda client: restore_backup(client, str(copy), (), print))
        with fresh.connect() as client:
            assert client.list_topics() == []
    victim.unlink()
    assert verify_backup(str(copy)) == ["topics/0/1.batches is missing"]
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"records": 300', '"records": 301'))
    with pytest.raises(DamageError, match="checksum"):
        verify_backup(str(copy))
    (copy / "manifest.json").unlink()
    with pytest.raises(DamageError, match="interrupted"):
        verify_backup(str(copy))
    with pytest.raises(NotFoundError):
        with_cluster(source, lambda client: create_backup(client, str(tmp_path / "none"), ("nope",), print))

"""An encrypted topic on real nodes: nothing readable on their disks, nothing lost, and clear words without the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from chaos_cluster import Cluster, NodeProcess, running_cluster
from chaos_http import wait_for

import quiver
from quiver.cli import main
from quiver.errors import ConflictError
from quiver.security.key_ring import make_key_line

SECRET = "account 4711 has paid"
SETTINGS = ("--partition-checkpoint-bytes", "1024", "--log-segment-bytes-max", "4096")
"""Enough checkpoints, segments and cold reads for a few hundred records."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("encryption")
    key_file = directory / "keys"
    key_file.touch(mode=0o600)
    key_file.write_text(make_key_line("2026") + "\n")
    with running_cluster(directory, settings=(*SETTINGS, "--encryption-key-file", str(key_file))) as running:
        yield running


def files_of(node: NodeProcess) -> Iterator[tuple[Path, bytes]]:
    return ((path, path.read_bytes()) for path in node.directory.rglob("*") if path.is_file())


def names_with(node: NodeProcess, text: str) -> set[str]:
    return {str(path) for path, data in files_of(node) if text.encode() in data}


def read_all(client: quiver.Cluster, topic: str, count: int) -> list[str | None]:
    with client.consumer(topic, idle_timeout=30) as consumer:
        texts: list[str | None] = []
        for record in consumer:
            texts.append(record.text)
            if len(texts) == count:
                return texts
    return texts


def in_sync(client: quiver.Cluster, topic: str) -> set[int]:
    return set(client.describe_topic(topic).partitions[0].in_sync)


def data_keys_of(cluster: Cluster) -> set[bytes]:
    found = set()
    for node in cluster.nodes:
        for path in node.directory.rglob("datakey"):
            with suppress(FileNotFoundError):  # the replica that has moved is being removed
                found.add(path.read_bytes())
    return found


def test_replica_of_an_encrypted_topic_is_rebuilt_on_another_node(cluster: Cluster) -> None:
    wanted = [f"{SECRET} {number}" for number in range(200)]
    with quiver.connect(cluster.http_addresses) as client:
        client.create_topic("moved", partitions=1, replicas=2, encrypted=True)
        with client.producer("moved") as producer:
            producer.send_many(wanted)
        held = set(client.describe_topic("moved").partitions[0].replicas)
        (free,) = {1, 2, 3} - held
        drained = max(held)
        client.drain(drained)
        wait_for("the rebuilt replica", lambda: free in in_sync(client, "moved"), 60)
        wait_for(
            "the move's end",
            lambda: drained not in client.describe_topic("moved").partitions[0].replicas,
            60,
        )
        assert read_all(client, "moved", 200) == wanted
        client.drain(drained, is_undone=True)
    keys = [data for _, data in files_of(cluster.node(free)) if SECRET.encode() in data]
    assert keys == []
    wait_for("a data key for each of two replicas", lambda: len(data_keys_of(cluster)) == 2, 60)


def test_encrypted_topic_survives_kills_and_shows_nothing_on_disk(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [f"{SECRET} {number}" for number in range(300)]
    with quiver.connect(cluster.http_addresses) as client:
        client.create_topic("secret", partitions=1, encrypted=True)
        client.create_topic("open", partitions=1, encrypted=False)
        assert client.describe_topic("secret").is_encrypted
        assert not client.describe_topic("open").is_encrypted
        for topic in ("secret", "open"):
            with client.producer(topic, name=f"bank-{topic}") as producer:
                producer.send_many(wanted[:150], key=b"key of " + SECRET.encode())
        for node in cluster.nodes:
            node.kill()
        cluster.start()
        with client.producer("secret", name="bank-secret") as producer:
            producer.send_many(wanted[150:])
        assert read_all(client, "secret", 300) == wanted
        with pytest.raises(ConflictError, match="is not encrypted"):
            client.create_topic("open", encrypted=True, exist_ok=True)

        rebuilt = cluster.node(3)
        rebuilt.kill()
        keyless = list(rebuilt.arguments)
        at = keyless.index("--encryption-key-file")
        rebuilt.arguments = (*keyless[:at], *keyless[at + 2 :])
        rebuilt.start()
        rebuilt.wait_ready()
        wait_for("the sentence", lambda: "it is encrypted, and this node has no key" in rebuilt.output.read_text(), 60)
        before = {path: data for path, data in files_of(rebuilt) if "/groups/" in str(path)}
        wait_for("the plain topic", lambda: in_sync(client, "open") == {1, 2, 3}, 60)
        wait_for("a leader without it", lambda: in_sync(client, "secret") == {1, 2}, 60)
        after = dict(files_of(rebuilt))
        encrypted = {path.parent for path in before if path.name == "datakey"}
        assert encrypted
        assert all(after[path] == data for path, data in before.items() if path.parent in encrypted)

        rebuilt.kill()
        rebuilt.arguments = tuple(keyless)
        rebuilt.start()
        rebuilt.wait_ready()
        wait_for("the encrypted replica", lambda: in_sync(client, "secret") == {1, 2, 3}, 60)
        assert read_all(client, "secret", 300) == wanted
    cluster.stop()
    for node in cluster.nodes:
        assert main(["security", "key", "list", str(node.directory), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["2026"] >= 1
        open_logs = names_with(node, SECRET)
        assert open_logs, "the search finds what is not encrypted"
        sealed = [path.parent for path, _ in files_of(node) if path.name == "datakey"]
        assert sealed
        assert not any(str(one) in name for one in sealed for name in open_logs)
        assert any(path.name == "checkpoint" for one in sealed for path in one.iterdir())

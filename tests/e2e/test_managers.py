"""The managers of real nodes change under load: three, four, a dead one replaced, three; then all start again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from chaos_cluster import Cluster, running_cluster
from chaos_settlement import verify_metadata
from postgresql_server import running_server
from reading import read_to_end

import quiver

QUICK = (
    "--manager-heartbeat-interval-ms=200",
    "--manager-suspect-after-ms=600",
    "--manager-dead-after-ms=1200",
    "--manager-rebuild-after-ms=500",
)


def run_quiver(*arguments: str) -> str:
    """Run a command that must succeed; return its output."""
    done = _call_quiver(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fail_quiver(*arguments: str) -> str:
    """Run a command that must be refused; return what it says."""
    done = _call_quiver(*arguments)
    assert done.returncode == 2, done
    return done.stderr


def _call_quiver(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "quiver", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def managers(url: str) -> list[int]:
    with quiver.connect(url) as client:
        return [one.node for one in client.managers().managers if one.is_voter]


def is_dead(url: str, node: int) -> bool:
    with quiver.connect(url) as client:
        return any(one.node == node and one.state == "dead" for one in client.managers().managers)


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.3)


def is_replicated(url: str, nodes: set[int]) -> bool:
    """Tell whether every partition is in sync on exactly these nodes."""
    with quiver.connect(url) as client:
        partitions = client.describe_topic("logs").partitions
    return all(set(one.replicas) == nodes == set(one.in_sync) for one in partitions)


class Load:
    """A producer that sends one awaited record after another until it ends."""

    def __init__(self, cluster: Cluster) -> None:
        self.sent: list[str] = []
        self._is_over = threading.Event()
        self._cluster = quiver.connect(*(node.wire for node in cluster.nodes))
        self._cluster.create_topic("logs", partitions=2)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._cluster.producer("logs", name="load") as producer:
            while not self._is_over.is_set():
                value = f"record {len(self.sent)}"
                producer.send(value).result()
                self.sent.append(value)
                time.sleep(0.01)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._cluster.close()


def test_managers_with_databases_in_postgresql_are_added_and_replaced(tmp_path: Path) -> None:
    with (
        running_server() as server,
        running_cluster(tmp_path, settings=(*QUICK, "--metadata-db", server.url)) as cluster,
    ):
        url = f"http://{cluster.node(1).http}"
        standby = cluster.add_standby(4, join=(1, 2, 3))
        standby.start()
        standby.wait_ready()
        run_quiver("manager", "add", "4", "--url", url)
        cluster.node(2).kill()
        wait_until(lambda: is_dead(url, 2))
        run_quiver("manager", "remove", "2", "--url", url)
        assert managers(url) == [1, 3, 4]
        cluster.node(3).kill()  # the majority now needs the new manager
        run_quiver("topic", "create", "after", "--url", url, "--partitions", "1", "--replicas", "1")
        for node in cluster.nodes:
            if node.is_running:
                assert node.stop() == 0
        assert not verify_metadata(cluster, server.url).get("differences")


def test_managers_are_added_replaced_and_found_again(tmp_path: Path) -> None:
    with running_cluster(tmp_path, settings=QUICK) as cluster:
        load = Load(cluster)
        try:
            url = f"http://{cluster.node(1).http}"
            standby = cluster.add_standby(4, join=(1, 2, 3))
            standby.start()
            standby.wait_ready()
            assert managers(url) == [1, 2, 3]
            run_quiver("manager", "add", "4", "--url", url)
            assert managers(url) == [1, 2, 3, 4]
            cluster.node(2).kill()
            wait_until(lambda: is_dead(url, 2))
            assert "dead" in run_quiver("manager", "list", "--url", url)
            run_quiver("manager", "remove", "2", "--url", url)
            assert managers(url) == [1, 3, 4]
            assert "not_a_manager" in fail_quiver("manager", "remove", "2", "--url", url)
            wait_until(lambda: is_replicated(url, {1, 3, 4}))
            cluster.node(1).kill()  # any one of the three may be lost, the first of the list included
            fresh = cluster.add_standby(5, join=(3, 4))  # and new nodes join by the managers of today
            fresh.start()
            fresh.wait_ready()
            for method, count in (("POST", 4), ("DELETE", 3)):  # over HTTP, too
                path = f"http://{fresh.http}/managers/5"
                with urllib.request.urlopen(urllib.request.Request(path, method=method), timeout=120) as answer:
                    assert answer.status == 200
                assert len(managers(f"http://{fresh.http}")) == count
            sent = len(load.sent)
            wait_until(lambda: len(load.sent) > sent + 20)
        finally:
            load.close()
        for node in cluster.nodes:
            if node.is_running:
                node.kill()
        for number in (3, 4, 5):  # 3 still names 1 and 2, which do not run: the metadata has the managers
            cluster.node(number).start()
        for number in (3, 4, 5):
            cluster.node(number).wait_ready()
        assert managers(f"http://{cluster.node(5).http}") == [1, 3, 4]
        with quiver.connect(cluster.node(3).wire) as client, client.consumer("logs") as consumer:
            assert {record.text for record in read_to_end(consumer)} >= set(load.sent)

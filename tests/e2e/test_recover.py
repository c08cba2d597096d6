"""Two of three real nodes are lost with their disks: the third goes on, and new nodes make three replicas again."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from chaos_cluster import Cluster, running_cluster
from reading import read_to_end

import quiver
from quiver.errors import QuiverError

QUICK = (
    "--manager-heartbeat-interval-ms=200",
    "--manager-suspect-after-ms=600",
    "--manager-dead-after-ms=1200",
    "--manager-rebuild-after-ms=500",
)


def recover(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "quiver", "recover", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except QuiverError:
            pass
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.3)


def produce(address: str, first: int, count: int) -> list[str]:
    values = [f"record {number}" for number in range(first, first + count)]
    with quiver.connect(address) as client, client.producer("logs", name="web") as producer:
        for value in values:
            producer.send(value).result()
    return values


def read(address: str) -> list[str | None]:
    with quiver.connect(address) as client, client.consumer("logs") as consumer:
        return [record.text for record in read_to_end(consumer)]


def in_sync(cluster: Cluster, node: int) -> set[tuple[int, ...]]:
    with quiver.connect(cluster.node(node).wire) as client:
        return {tuple(sorted(one.in_sync)) for one in client.describe_topic("logs").partitions}


def test_survivor_goes_on_alone_and_is_replicated_again(tmp_path: Path) -> None:
    with running_cluster(tmp_path, settings=QUICK) as cluster:
        with quiver.connect(cluster.node(1).wire) as client:
            client.create_topic("logs", partitions=2, replicas=3)
        sent = produce(cluster.node(1).wire, 0, 60)
        wait_until(lambda: in_sync(cluster, 1) == {(1, 2, 3)})
        data = str(tmp_path / "node-1")
        running = recover("--data", data, "--plan")
        assert running.returncode == 2 and "in use" in running.stderr, running  # noqa: PT018 - one outcome
        for node in cluster.nodes:
            node.kill()
        kept = tmp_path / "kept-2"
        shutil.move(tmp_path / "node-2", kept)
        shutil.rmtree(tmp_path / "node-3")

        both = recover("--data", data, "--data", str(kept), "--plan")
        assert "majority_present" in both.stderr, both
        plan = recover("--data", data, "--plan")
        assert plan.returncode == 0 and "lost for good 2, 3" in plan.stdout, plan  # noqa: PT018 - one outcome
        assert "acknowledged records from offset" in plan.stdout
        assert "names 'other'" in recover("--data", data, "--yes-lose-data", "other").stderr
        done = recover("--data", data, "--yes-lose-data", "quiver")
        assert done.returncode == 0, done.stderr

        survivor = cluster.node(1)
        survivor.start()
        survivor.wait_ready()
        assert sorted(map(str, read(survivor.wire))) == sorted(sent)
        sent += produce(survivor.wire, 60, 10)

        shutil.move(kept, tmp_path / "node-2")  # a lost node returns with its old data: harmless
        cluster.node(2).start()
        for number in (4, 5):
            cluster.add_standby(number, join=(1,)).start()
        for number in (4, 5):
            cluster.node(number).wait_ready()
        wait_until(lambda: in_sync(cluster, 1) == {(1, 4, 5)})
        with quiver.connect(survivor.wire) as client:
            for number in (4, 5):
                client.add_manager(number)
            assert [one.node for one in client.managers().managers if one.is_voter] == [1, 4, 5]
            assert [node.node for node in client.brokers()] == [1, 4, 5]
        survivor.kill()  # the new nodes have everything
        sent += produce(cluster.node(4).wire, 70, 10)
        assert sorted(map(str, read(cluster.node(5).wire))) == sorted(sent)
        assert "refused" in cluster.node(2).output.read_text()

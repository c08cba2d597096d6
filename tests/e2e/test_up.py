"""`quiver up`: a cluster of child processes that recovers all its data after any kind of end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quiver

QUIVER = (sys.executable, "-m", "quiver")
PORTS = 16
"""A range of ports for each worker of the test run."""


class Up:
    """A running `quiver up`, leader of its own process group as a shell's job is."""

    def __init__(self, data: Path, first_port: int, *arguments: str) -> None:
        self.http_port, self.wire_port = first_port, first_port + 8
        ports = ("--http-port", str(self.http_port), "--wire-port", str(self.wire_port))
        self.process = subprocess.Popen(
            (*QUIVER, "up", "--data", str(data), *ports, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("ready"):
                return
        raise AssertionError("".join(self.lines))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pids(self) -> dict[int, int]:
        rows = [line.split() for line in self.lines if line.strip()[:1].isdigit()]
        return {int(row[0]): int(row[1]) for row in rows}

    def kill_all(self) -> None:
        """End the whole job at once, as a power failure would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def first_port(worker_id: str) -> int:
    worker = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    return 21_000 + worker * PORTS


@contextmanager
def running(data: Path, first_port: int, *arguments: str) -> Iterator[Up]:
    up = Up(data, first_port, *arguments)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.kill_all()
        assert up.process.stdout is not None
        up.process.stdout.close()


def run_quiver(*arguments: str) -> str:
    run = subprocess.run((*QUIVER, *arguments), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_cluster_recovers_all_data_after_kill_9_of_all_nodes(tmp_path: Path, first_port: int) -> None:
    with running(tmp_path, first_port) as up:
        assert list(up.pids) == [1, 2, 3]
        with quiver.connect(up.url) as cluster:
            cluster.create_topic("logs")
            with cluster.producer("logs", name="web") as producer:
                producer.send_many([str(n) for n in range(1000)])
        up.kill_all()
    with running(tmp_path, first_port) as up:
        with quiver.connect(up.url) as cluster, cluster.consumer("logs", idle_timeout=30) as consumer:
            found = sorted(int(record.text or -1) for record, _ in zip(consumer, range(1000), strict=False))
        assert found == list(range(1000))
        assert up.stop() == 0
    assert "equal wherever they can be compared" in run_quiver("metadata", "verify", "--data", str(tmp_path))
    requests = [
        json.loads(line)["request"]
        for line in run_quiver("metadata", "log", "--data", str(tmp_path), "--json").splitlines()
    ]
    assert {"init_cluster", "register_broker", "create_topic", "register_producer"} <= set(requests)


def test_dead_node_is_reported_and_not_restarted(tmp_path: Path, first_port: int) -> None:
    with running(tmp_path, first_port) as up:
        os.kill(up.pids[2], signal.SIGKILL)
        assert up.process.stdout is not None
        line = up.process.stdout.readline()
        assert line.startswith(f"node 2 (pid {up.pids[2]}) killed by SIGKILL; to start it again: quiver node --id 2")
        status = json.loads(run_quiver("status", "--json", "--url", up.url))
        assert {node["node"]: node["is_alive"] for node in status["nodes"]} == {1: True, 2: False, 3: True}
        command = shlex.split(line.partition("start it again: quiver ")[2])
        with subprocess.Popen((*QUIVER, *command), stdout=subprocess.PIPE, text=True) as node:
            assert node.stdout is not None
            assert any(line.startswith("ready") for line in node.stdout)
            node.send_signal(signal.SIGTERM)
        assert node.returncode == 0
        assert up.stop() == 0


def test_nodes_stop_when_their_parent_dies(tmp_path: Path, first_port: int) -> None:
    with running(tmp_path, first_port, "--nodes", "1") as up:
        os.kill(up.process.pid, signal.SIGKILL)
        up.process.wait()
    with running(tmp_path, first_port, "--nodes", "1") as up:  # the lock and the ports are free again
        assert up.stop() == 0


def test_topics_and_brokers_are_managed_from_the_command_line(tmp_path: Path, first_port: int) -> None:
    with running(tmp_path, first_port, "--nodes", "1") as up:
        url = ("--url", up.url)
        assert run_quiver("topic", "create", "logs", "--partitions", "2", *url) == "created logs with 2 partitions\n"
        assert run_quiver("topic", "list", "--names", *url) == "logs\n"
        run_quiver("topic", "add-partitions", "logs", "4", *url)
        described = json.loads(run_quiver("topic", "describe", "logs", "--json", *url))
        assert [item["partition"] for item in described["partitions"]] == [0, 1, 2, 3]
        assert "cluster quiver" in run_quiver("status", *url)
        run_quiver("topic", "delete", "logs", *url)
        assert run_quiver("topic", "list", "--names", *url) == ""
        run_quiver("topic", "restore", "logs", *url)
        assert json.loads(run_quiver("broker", "list", "--json", *url))[0]["state"] == "alive"
        again = subprocess.run((*QUIVER, "topic", "create", "logs", *url), capture_output=True, text=True, check=False)
        assert (again.returncode, again.stderr.split(":")[0]) == (2, "error topic_exists")


def test_data_directory_belongs_to_one_node_of_one_cluster(tmp_path: Path, first_port: int) -> None:
    with running(tmp_path, first_port, "--nodes", "1") as up:
        up.stop()
    for flags, message in (
        (("--id", "2"), "belongs to node 1, not to node 2"),
        (("--id", "1", "--cluster", "other"), "belongs to cluster 'quiver'"),
    ):
        run = subprocess.run(
            (*QUIVER, "node", "--data", f"{tmp_path}/node-1", *flags), capture_output=True, text=True, check=False
        )
        assert run.returncode == 2
        assert message in run.stderr


def test_node_that_cannot_start_is_reported_with_its_log_and_what_to_do(tmp_path: Path, first_port: int) -> None:
    with running(tmp_path / "one", first_port, "--nodes", "1") as up:
        ports = ("--http-port", str(up.http_port), "--wire-port", str(up.wire_port))
        command = (*QUIVER, "up", "--nodes", "1", "--data", str(tmp_path / "two"), *ports)
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert run.returncode == 3
        assert run.stderr.startswith("error not_started: node 1 did not become ready")
        assert "cannot listen on" in run.stderr
        assert run.stderr.rstrip().splitlines()[-1].startswith("  what to do: correct what the end of the node's log")
        assert up.stop() == 0

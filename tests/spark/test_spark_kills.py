"""A driver that is killed with all its processes, at whatever it is doing, and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spark_queries import fill

import quiver
from quiver.testing import LocalCluster

JOB = Path(__file__).parent / "shared" / "spark_copy_job.py"
START_TIMEOUT_S = 300


def start(local: LocalCluster, source: str, target: str, folder: Path, *, fault: str = "") -> subprocess.Popen[bytes]:
    arguments = [sys.executable, str(JOB), ",".join(local.addresses), source, target, str(folder / "checkpoint")]
    arguments += ["local[2]", fault] if fault else []
    return subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count(client: quiver.Cluster, topic: str) -> int:
    return sum(client.offsets(topic).offsets.values())


def values(client: quiver.Cluster, topic: str, partition: int) -> list[bytes | None]:
    end = client.offsets(topic).offsets[partition]
    return [value for batch in client.read_range(topic, partition, 0, end) for value in batch.values()]


@pytest.mark.slow
def test_killed_driver_loses_nothing_and_doubles_nothing(
    local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path
) -> None:
    source = f"{topic}-in"
    fill(client, source, 3000, 3000)
    client.create_topic(topic, partitions=2)
    for pause_s in (0.0, 0.15, 0.3):
        process = start(local, source, topic, folder)
        before, deadline_s = count(client, topic), time.monotonic() + START_TIMEOUT_S
        try:
            while count(client, topic) == before and process.poll() is None:
                assert time.monotonic() < deadline_s, "the driver published nothing"
                time.sleep(0.02)
            time.sleep(pause_s)
        finally:
            kill(process)
    assert start(local, source, topic, folder).wait(START_TIMEOUT_S) == 0
    for partition in range(2):
        assert values(client, topic, partition) == values(client, source, partition)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "published"), [("before", 400), ("after", 800)])
def test_driver_killed_around_publishing_neither_loses_nor_doubles(
    local: LocalCluster, client: quiver.Cluster, topic: str, folder: Path, when: str, published: int
) -> None:
    source = f"{topic}-in"
    fill(client, source, 700, 500)
    client.create_topic(topic, partitions=2)
    process = start(local, source, topic, folder, fault=f"{when}:kill:{folder / 'killed'}")
    assert process.wait(START_TIMEOUT_S) == -signal.SIGKILL
    assert (folder / "killed").exists()
    assert count(client, topic) == published
    assert start(local, source, topic, folder).wait(START_TIMEOUT_S) == 0
    for partition in range(2):
        assert values(client, topic, partition) == values(client, source, partition)

"""Members of a group as processes: killed, they are replaced; stopped, they are fenced and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count

import pytest
from waiting import wait_until as wait

import quiver
from quiver.testing import LocalCluster

PARTITIONS = 6
PROGRAM = """
import sys, quiver
topic, *addresses = sys.argv[1:]
with quiver.connect(*addresses) as cluster:
    consumer = cluster.consumer(topic, group=topic, session_timeout=5, auto_commit=0.2)
    print("joined", flush=True)
    for record in consumer:
        print(record.partition, record.offset, record.text, flush=True)
"""
_numbers = count()


class Member:
    """A process that prints what it receives."""

    def __init__(self, topic: str, addresses: list[str]) -> None:
        self.seen: list[tuple[int, int, int]] = []
        """Partition, offset and number of each record."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, topic, *addresses], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "joined\n"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            partition, offset, number = map(int, line.split())
            self.seen.append((partition, offset, number))

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[quiver.Cluster]:
    with local.connect() as connected:
        yield connected


@pytest.fixture
def topic(cluster: quiver.Cluster) -> str:
    name = f"jobs-{next(_numbers)}"
    cluster.create_topic(name, partitions=PARTITIONS)
    return name


@pytest.fixture
def members(local: LocalCluster, topic: str) -> Iterator[list[Member]]:
    started = [Member(topic, local.addresses) for _ in range(3)]
    yield started
    for one in started:
        one.kill()


def fill(cluster: quiver.Cluster, topic: str, numbers: range) -> None:
    with cluster.producer(topic) as producer:
        for number in numbers:
            producer.send(f"{number}", partition=number % PARTITIONS)


def have_seen(members: list[Member], numbers: range) -> Callable[[], bool]:
    return lambda: {number for one in members for _, _, number in one.seen} >= {*numbers}


def shares(cluster: quiver.Cluster, topic: str) -> list[int]:
    return sorted(len(one.owned) for one in cluster.describe_group(topic).members)


def test_partitions_of_a_killed_member_go_to_the_others(
    cluster: quiver.Cluster, topic: str, members: list[Member]
) -> None:
    wait(lambda: shares(cluster, topic) == [2, 2, 2])
    fill(cluster, topic, range(60))
    wait(have_seen(members, range(60)))
    dead, *others = members
    own = {partition for partition, _, _ in dead.seen}
    dead.kill()
    fill(cluster, topic, range(60, 120))
    wait(have_seen(others, range(60, 120)))
    wait(lambda: shares(cluster, topic) == [3, 3])
    assert own == {partition for one in others for partition, _, _ in one.seen} & own
    for one in others:  # within a member nothing comes twice, and each partition in order
        assert len(one.seen) == len({*one.seen})
        for at in range(PARTITIONS):
            offsets = [offset for partition, offset, _ in one.seen if partition == at]
            assert offsets == sorted(offsets)
    wait(lambda: sum(lag.lag for lag in cluster.group_lag(topic)) == 0)


def test_stopped_member_is_fenced_and_joins_again(cluster: quiver.Cluster, topic: str, members: list[Member]) -> None:
    wait(lambda: shares(cluster, topic) == [2, 2, 2])
    zombie, *others = members
    zombie.send(signal.SIGSTOP)
    fill(cluster, topic, range(60))
    wait(have_seen(others, range(60)))
    wait(lambda: sum(lag.lag for lag in cluster.group_lag(topic)) == 0)
    before = len(zombie.seen)
    zombie.send(signal.SIGCONT)
    wait(lambda: shares(cluster, topic) == [2, 2, 2])
    assert sum(lag.lag for lag in cluster.group_lag(topic)) == 0  # it has moved nothing back
    assert len(zombie.seen) == before  # and delivered nothing that others have delivered
    fill(cluster, topic, range(60, 120))
    wait(have_seen(members, range(60, 120)))
    assert len(zombie.seen) > before
    wait(lambda: sum(lag.lag for lag in cluster.group_lag(topic)) == 0)

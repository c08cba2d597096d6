"""A query's hold: placed before anything is read, renewed while a batch runs, moved with the query, gone at its end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from quiver.client.cluster import AsyncCluster
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.spark import holds
from quiver.spark.connections import Servers
from quiver.spark.holds import QueryHold
from quiver.spark.offsets import StreamOffset, TopicOffset, incarnation_of
from quiver.spark.options import OffsetBound, ReadOptions
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster

SERVERS = Servers(addresses=("node-1:9002",))


@pytest.fixture
def memory() -> MemoryCluster:
    return MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())


@pytest.fixture
def cluster(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    client = AsyncCluster(memory.addresses, transport=memory, clock=SystemClock(), rng=random.Random(2))
    with Cluster(client) as cluster:
        cluster.create_topic("logs", partitions=2)
        monkeypatch.setattr(holds, "connection", lambda servers: cluster)
        yield cluster


def options(hold_s: float = 60.0) -> ReadOptions:
    return ReadOptions(servers=SERVERS, topics=("logs",), starting=OffsetBound(default="earliest"), hold_s=hold_s)


def at(cluster: Cluster, *offsets: int, topic: str = "logs") -> StreamOffset:
    incarnation = incarnation_of(cluster.cluster_id, cluster.offsets(topic))
    return StreamOffset(topics={topic: TopicOffset(id=incarnation, p=dict(enumerate(offsets)))})


def held(memory: MemoryCluster) -> list[dict[int, int]]:
    return [{int(part): int(offset) for part, offset in hold.offsets} for hold in memory.holds.values()]


def wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_hold_is_there_when_the_first_move_returns_and_gone_after_release(
    memory: MemoryCluster, cluster: Cluster
) -> None:
    hold = QueryHold(options())
    hold.move(at(cluster, 3, 4), at(cluster, 9, 9))
    assert held(memory) == [{0: 3, 1: 4}]
    hold.release()
    hold.release()
    assert held(memory) == []


def test_hold_is_renewed_at_where_the_query_is_without_being_asked(memory: MemoryCluster, cluster: Cluster) -> None:
    hold = QueryHold(options(hold_s=0.2))
    hold.move(at(cluster, 3, 4), at(cluster, 9, 9))
    (first,) = memory.holds.values()
    wait(lambda: next(iter(memory.holds.values())).expires_ms > first.expires_ms)
    hold.move(at(cluster, 7, 4), at(cluster, 9, 9))
    wait(lambda: held(memory) == [{0: 7, 1: 4}])
    hold.release()


def test_new_partition_is_held_at_once(memory: MemoryCluster, cluster: Cluster) -> None:
    hold = QueryHold(options())
    hold.move(at(cluster, 3), at(cluster, 9))
    hold.move(at(cluster, 5), at(cluster, 9, 0))
    assert held(memory) == [{0: 5, 1: 0}]
    hold.release()


def test_topic_that_is_gone_is_not_held_and_no_error(memory: MemoryCluster, cluster: Cluster) -> None:
    place = at(cluster, 3, 4)
    cluster.delete_topic("logs")
    hold = QueryHold(options())
    hold.move(place, place)
    assert held(memory) == []
    hold.release()


def test_nothing_is_held_that_was_not_wished(memory: MemoryCluster, cluster: Cluster) -> None:
    hold = QueryHold(options(hold_s=0))
    hold.move(at(cluster, 3, 4), at(cluster, 9, 9))
    hold.release()
    assert held(memory) == []

"""A query's cursors: they follow its offsets, and are left to others who use them."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from quiver.client.cluster import AsyncCluster
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.spark import offset_reader
from quiver.spark.connections import Servers
from quiver.spark.offset_reader import OffsetReader
from quiver.spark.offsets import StreamOffset, TopicOffset
from quiver.spark.options import OffsetBound, ReadOptions
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster
from quiver.wire.group_messages import JoinGroup, LeaveGroup
from quiver.wire.requests import Request


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    memory = MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())
    client = AsyncCluster(memory.addresses, transport=memory, clock=SystemClock(), rng=random.Random(2))
    with Cluster(client) as cluster:
        cluster.create_topic("logs", partitions=1)
        with cluster.producer("logs") as producer:
            producer.send_many([b"x"] * 9)
        monkeypatch.setattr(offset_reader, "connection", lambda servers: cluster)
        yield cluster


@pytest.fixture
def reader() -> OffsetReader:
    servers = Servers(addresses=("node-1:9002",))
    start = OffsetBound(default="earliest")
    return OffsetReader(ReadOptions(servers=servers, topics=("logs",), starting=start, group_id="copy"))


def ask(cluster: Cluster, request: Request[Any]) -> Any:
    router = cluster._cluster.router
    return cluster._run(router.ask(request, deadline=router.deadline()))[0]


def reached(offset: int) -> StreamOffset:
    return StreamOffset(topics={"logs": TopicOffset(id="any", p={0: offset})})


def cursor(cluster: Cluster) -> int:
    (lag,) = cluster.group_lag("copy")
    return lag.cursor


@pytest.mark.parametrize("kind", ["stream", "queue"])
def test_query_goes_on_while_others_use_its_cursors(
    cluster: Cluster, reader: OffsetReader, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    if kind == "stream":
        reader.publish(reached(3))
        assert cursor(cluster) == 3
    joined = ask(cluster, JoinGroup(group="copy", topics=("logs",), member_id="a", kind=kind))
    before = cursor(cluster)
    for offset in (4, 5):
        reader.publish(reached(offset))
    assert cursor(cluster) == before
    assert [record.message for record in caplog.records] == ["cursors not moved: others use them"]
    if kind == "stream":
        ask(cluster, LeaveGroup(group_id=joined.group_id, member_id="a"))
        reader.publish(reached(6))
        assert cursor(cluster) == 6

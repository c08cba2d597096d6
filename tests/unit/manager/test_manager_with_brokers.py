"""Managers and brokers together: what managers decide, brokers carry out, and no record is lost on the way."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from broker_cluster import Cluster, Node

from quiver.config import ManagerSettings
from quiver.manager import Manager
from quiver.metadata import BrokerState, NotPrimaryError
from quiver.model import NodeId, TopicId
from quiver.raft import Configuration
from quiver.testing import SimulatedClock
from quiver.wire.messages import BrokerHeartbeatRequest, CreateTopicRequest, DrainBroker, HeartbeatReceived
from quiver.wire.serving import Answer, Caller

QUICK = ManagerSettings(
    heartbeat_interval_ms=200,
    suspect_after_ms=1_000,
    dead_after_ms=3_000,
    rebuild_after_ms=2_000,
    reconcile_interval_ms=200,
)
TOPICS = 4


class ManagedNode(Node):
    """A node whose manager works."""

    manager: Manager | None = None

    def start(self, *, bootstrap: Configuration | None = None) -> None:
        super().start(bootstrap=bootstrap)
        self.manager = None
        with self.cluster.loop.node_scope(self.id):
            self.cluster.loop.create_task(self._manage())

    async def _manage(self) -> None:
        await self.cluster.wait(lambda: self.is_up or None)
        now_ms = self.cluster.loop.now_ns // 1_000_000
        clock = SimulatedClock(self.cluster.loop, wall_start_ms=1_000_000 + now_ms)
        async with Manager(self.store, clock=clock, settings=QUICK, cluster_id="c1") as self.manager:
            await asyncio.Event().wait()

    async def _handle_heartbeat(self, _: Caller, request: BrokerHeartbeatRequest, __: memoryview) -> Answer:
        if self.manager is None:
            raise NotPrimaryError("not done: this node is starting")
        return HeartbeatReceived(is_known=await self.manager.handle_heartbeat(request)), ()


class ManagedCluster(Cluster):
    """Nodes with managers that work, and topics of one partition."""

    def __init__(self, directory: Path, nodes: int, *, seed: int) -> None:
        super().__init__(directory, nodes, seed=seed)
        self.nodes = {node: ManagedNode(self, node) for node in self.nodes}
        self.expected: dict[TopicId, list[bytes]] = {}

    async def fill(self) -> None:
        """Create topics and produce to each."""
        for number in range(TOPICS):
            request = CreateTopicRequest(topic=f"t{number}", partitions=1, replicas=3, request_id=f"r{number}")
            created, _ = await self.client.call(self[1].address, request, timeout_ms=5_000)
            self.known_index = created.index
            self.expected[created.topic_id] = []
        for number in range(3):
            await self.produce_everywhere(b"before %d" % number)

    async def produce_everywhere(self, value: bytes) -> None:
        for topic_id, values in self.expected.items():
            await self.produce(topic_id, value)
            values.append(value)

    async def drain(self, number: int, *, through: int) -> None:
        request = DrainBroker(broker=NodeId(number))
        await self.client.call(self[through].address, request, timeout_ms=5_000)

    def state_of(self, number: int) -> BrokerState:
        return self.view().brokers[NodeId(number)].state

    async def check(self) -> None:
        """Check that every record is there, on exactly the replicas that are meant to be, and that more can follow."""
        await self.produce_everywhere(b"after")
        for topic_id, values in self.expected.items():
            assert await self.fetch(topic_id) == values
            (partition,) = self.view().partitions_of(topic_id)
            assert len(set(partition.replicas)) == 3
            await self.wait_equal(topic_id, *partition.replicas)


def run(test: Callable[[ManagedCluster], Coroutine[Any, Any, None]], *, seed: int = 1) -> None:
    """Run `async def test(cluster)` over four nodes with records in every topic."""

    async def main(cluster: ManagedCluster) -> None:
        cluster.start()
        await cluster.form()
        await cluster.fill()
        await test(cluster)
        for node in cluster.nodes.values():
            if cluster.loop.is_alive(node.id):
                node.kill()

    with tempfile.TemporaryDirectory() as directory:
        cluster = ManagedCluster(Path(directory), 4, seed=seed)
        try:
            cluster.loop.run_until_complete(main(cluster))
        finally:
            cluster.loop.close()


def test_drained_broker_hands_on_all_it_had() -> None:
    async def test(cluster: ManagedCluster) -> None:
        await cluster.drain(4, through=2)
        await cluster.wait(lambda: cluster.state_of(4) is BrokerState.DRAINED or None)
        assert cluster.view().partitions_on(NodeId(4)) == []
        await cluster.check()

    run(test)


@pytest.mark.parametrize("seed", range(2))
def test_drain_survives_the_loss_of_whoever_is_primary(seed: int) -> None:
    async def test(cluster: ManagedCluster) -> None:
        await cluster.drain(4, through=1)
        await cluster.wait(lambda: cluster.view().moves or None)
        primary = await cluster.wait(lambda: next((node for node in cluster.up if node.store.is_primary), None))
        primary.kill(loses_power=True)
        await asyncio.sleep(1)
        primary.start()
        await cluster.wait(lambda: cluster.state_of(4) is BrokerState.DRAINED or None)
        await cluster.check()

    run(test, seed=seed)


def test_lost_brokers_replicas_are_built_anew_from_those_that_are_left() -> None:
    async def test(cluster: ManagedCluster) -> None:
        victim = 3 if cluster[3].store.is_primary is False else 2
        cluster[victim].kill()
        await cluster.wait(lambda: cluster.state_of(victim) is BrokerState.DEAD or None)
        await cluster.wait(lambda: not cluster.view().partitions_on(NodeId(victim)) and not cluster.view().moves)
        cluster[victim].start()
        await cluster.wait(lambda: cluster.state_of(victim) is BrokerState.ALIVE or None)
        await cluster.check()  # what it still had is gone from its disk, too

    run(test)

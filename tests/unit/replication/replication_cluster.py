"""Three real nodes on a simulated loop, network and disk, steered by hand: what the driver's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import StorageError, UnavailableError
from quiver.model import GroupId, NodeId
from quiver.raft import Configuration
from quiver.record import Batch, BatchHeader, build_batch
from quiver.replication import Member, Replicator
from quiver.testing import (
    Latency,
    RandomStreams,
    SimulatedClock,
    SimulatedDisk,
    SimulatedExecutor,
    SimulatedLoop,
    SimulatedNetwork,
)

T = TypeVar("T")
GROUP = GroupId(1)
DIRECTORY = "/data/group-1"
SMALL_LOG = LogSettings(segment_bytes_max=2048, tail_cache_bytes_max=1000)
QUICK_DISK = Latency(minimum_ms=0.1, spread_ms=0.3)


class ValuesMachine:
    """A state machine that remembers every value."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []

    def apply(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if not batch.header.is_control:
                self.values += batch.values()

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.values)

    def restore(self, state: bytes) -> None:
        self.values = msgspec.msgpack.decode(state, type=list[bytes | None]) if state else []


class Node:
    """One node's life after life."""

    def __init__(self, cluster: Cluster, node: NodeId) -> None:
        self.cluster, self.id = cluster, node
        self.disk = SimulatedDisk()
        self.lives = 0
        self.failures: list[StorageError] = []
        self.machine = ValuesMachine()
        self.replicator: Replicator
        self.member: Member

    def start(self, *, bootstrap: Configuration | None = None) -> None:
        self.lives += 1
        with self.cluster.loop.node_scope(self.id):
            self.cluster.loop.create_task(self._live(bootstrap))

    def kill(self, *, loses_power: bool = False) -> None:
        self.cluster.loop.kill(self.id)
        self.cluster.network.disconnect(self.id)
        del self.member
        if loses_power:
            self.disk.crash()
        else:
            self.disk.restart()

    async def _live(self, bootstrap: Configuration | None) -> None:
        cluster = self.cluster
        self.machine = ValuesMachine()
        self.replicator = Replicator(
            self.id,
            incarnation=self.lives,
            network=cluster.network.port(self.id),
            disk=self.disk,
            executor=SimulatedExecutor(cluster.loop, cluster.streams.disk, QUICK_DISK),
            clock=SimulatedClock(cluster.loop),
            rng=cluster.streams.stream(f"node-{self.id}-{self.lives}"),
            settings=cluster.settings,
            log_settings=SMALL_LOG,
            on_failure=self.failures.append,
        )
        async with self.replicator as replicator:
            self.member = await replicator.open_member(GROUP, DIRECTORY, self.machine, bootstrap=bootstrap)
            await asyncio.Event().wait()


class Cluster:
    """Nodes, and ways to wait for what they do."""

    def __init__(self, nodes: int = 3, *, seed: int = 1, settings: ReplicationSettings | None = None) -> None:
        self.streams = RandomStreams(seed)
        self.loop = SimulatedLoop(self.streams.schedule, time_max_s=600)
        self.network = SimulatedNetwork(self.loop, self.streams.network, keep_order=True)
        self.settings = settings or ReplicationSettings(hibernation=False)
        self.nodes = {NodeId(n): Node(self, NodeId(n)) for n in range(1, nodes + 1)}
        self.voters = Configuration(voters=tuple(self.nodes))

    def start(self) -> None:
        for node in self.nodes.values():
            node.start(bootstrap=self.voters)

    def add(self, number: int) -> Node:
        node = self.nodes[NodeId(number)] = Node(self, NodeId(number))
        node.start()
        return node

    async def wait(self, condition: Callable[[], T | None], *, timeout_s: float = 30) -> T:
        end = self.loop.time() + timeout_s
        while True:
            found = condition()
            if found:
                return found
            assert self.loop.time() < end, "waited in vain"
            await asyncio.sleep(0.01)

    async def leader(self) -> Node:
        return await self.wait(self._find_leader)

    def _find_leader(self) -> Node | None:
        leaders = [
            node
            for node in self.nodes.values()
            if self.loop.is_alive(node.id) and hasattr(node, "member") and node.member.is_ready
        ]
        return max(leaders, key=lambda node: node.member.term, default=None)

    async def propose(self, *values: bytes) -> list[BatchHeader]:
        """Propose at whoever leads, until it is taken."""
        while True:
            node = await self.leader()
            try:
                return await node.member.propose([build_batch(list(values), timestamp=1)])
            except UnavailableError:
                await asyncio.sleep(0.05)

    async def wait_equal(self, values: list[bytes], *numbers: int) -> None:
        nodes = [self.nodes[NodeId(n)] for n in numbers] or list(self.nodes.values())
        await self.wait(lambda: all(node.machine.values == values for node in nodes) or None)


def simulate(test: Callable[[Cluster], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Turn `async def test(cluster)` into a test over a started cluster of three."""

    def run() -> None:
        cluster = Cluster()
        run_in(cluster, test)

    run.__name__ = test.__name__
    return run


def run_in(cluster: Cluster, test: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        cluster.start()
        await test(cluster)
        for node in list(cluster.nodes.values()):
            if cluster.loop.is_alive(node.id):
                cluster.loop.kill(node.id)

    try:
        cluster.loop.run_until_complete(main())
    finally:
        cluster.loop.close()

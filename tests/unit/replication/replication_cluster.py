"""Members of one group on the simulated harness: what the driver's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import UnavailableError
from quiver.model import GroupId, Index, NodeId
from quiver.raft import Configuration
from quiver.record import Batch, BatchHeader, build_batch
from quiver.replication import Member, Replicator
from quiver.testing.harness import HarnessNode, SimulatedHarness

GROUP = GroupId(1)
DIRECTORY = "/data/group-1"
SMALL_LOG = LogSettings(segment_bytes_max=2048, tail_cache_bytes_max=1000)


class ValuesMachine:
    """A state machine that remembers every value."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.applied_index = Index(0)

    def apply(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if not batch.header.is_control:
                self.values += batch.values()
            self.applied_index = batch.header.index

    def apply_steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        return iter(())

    def snapshot_steps(self) -> Iterator[bytes]:
        return iter((msgspec.msgpack.encode(self.values),))

    def restore_steps(self, state: bytes) -> Iterator[None]:
        return iter(())

    def restore(self, state: bytes) -> None:
        self.values = msgspec.msgpack.decode(state, type=list[bytes | None]) if state else []


class Node(HarnessNode):
    """One node with one member of the group."""

    def __init__(self, cluster: Cluster, node: NodeId) -> None:
        super().__init__(cluster, node)
        self.cluster = cluster
        self.machine = ValuesMachine()
        self.replicator: Replicator
        self.member: Member

    @property
    def is_up(self) -> bool:
        return self.is_alive and hasattr(self, "member")

    def _drop_process(self) -> None:
        del self.member

    async def _run(self, bootstrap: Configuration | None) -> None:
        self.machine = ValuesMachine()
        self.replicator = self._make_replicator(settings=self.cluster.settings, log_settings=SMALL_LOG)
        async with self.replicator as replicator:
            self.member = await replicator.open_member(GROUP, DIRECTORY, self.machine, bootstrap=bootstrap)
            await asyncio.Event().wait()


class Cluster(SimulatedHarness[Node]):
    """Nodes of one group."""

    def __init__(self, nodes: int = 3, *, seed: int = 1, settings: ReplicationSettings | None = None) -> None:
        super().__init__(nodes, seed=seed)
        self.settings = settings or ReplicationSettings(hibernation=False)

    def make_node(self, node: NodeId) -> Node:
        return Node(self, node)

    def add(self, number: int) -> Node:
        """Add a node and start it."""
        node = self.add_node(number)
        node.start()
        return node

    async def leader(self) -> Node:
        return await self.wait(self._find_leader)

    def _find_leader(self) -> Node | None:
        leaders = [node for node in self.nodes.values() if node.is_up and node.member.is_ready]
        return max(leaders, key=lambda node: node.member.term, default=None)

    async def propose(self, *values: bytes) -> list[BatchHeader]:
        """Propose at the leader until it is accepted."""
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
    cluster.run(lambda: test(cluster))

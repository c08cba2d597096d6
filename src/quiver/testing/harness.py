"""Nodes on a simulated loop, network and disk, steered by hand: the life cycle that unit tests share.

Unlike the simulator, nothing here happens by chance: a test starts, kills and restarts nodes itself and waits for what
it expects. A subclass of `HarnessNode` says what runs on a node; a subclass of `SimulatedHarness` adds the calls that
its tests make.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from quiver.clock import Rng
from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import OutcomeUnknownError, StorageError
from quiver.model import NodeId
from quiver.raft import Configuration
from quiver.replication import Replicator
from quiver.testing.clock import SimulatedClock
from quiver.testing.disk import SimulatedDisk
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import SimulatedNetwork
from quiver.testing.randomness import Latency, RandomStreams

T = TypeVar("T")
N = TypeVar("N", bound="HarnessNode")

QUICK_DISK = Latency(minimum_ms=0.1, spread_ms=0.3)
_TIME_MAX_S = 600
_POLL_S = 0.002


class HarnessNode(ABC):
    """One node: its disk outlives its processes."""

    def __init__(self, harness: SimulatedHarness[Any], node: NodeId) -> None:
        self.id = node
        self.disk = SimulatedDisk()
        self.lives = 0
        """How many processes were started."""
        self.failures: list[StorageError] = []
        """Storage errors that the replicator reported."""
        self._harness = harness

    @property
    def is_alive(self) -> bool:
        """Return whether there is a process."""
        return self._harness.loop.is_alive(self.id)

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Return whether there is a process that has started what the tests ask for."""

    def start(self, *, bootstrap: Configuration | None = None) -> None:
        """Start a process; `bootstrap` makes it a first member of its group."""
        self.lives += 1
        with self._harness.loop.node_scope(self.id):
            self._harness.loop.create_task(self._run(bootstrap))

    def kill(self, *, loses_power: bool = False) -> None:
        """Kill the process; with `loses_power` everything that was not synced is gone."""
        self._harness.loop.kill(self.id)
        self._harness.network.disconnect(self.id)
        self._drop_process()
        if loses_power:
            self.disk.crash()
        else:
            self.disk.restart()

    @abstractmethod
    async def _run(self, bootstrap: Configuration | None) -> None:
        """Run one process, in the node's scope on the loop."""

    @abstractmethod
    def _drop_process(self) -> None:
        """Forget what died with the process."""

    def _make_executor(self, *, workers: int = 1) -> SimulatedExecutor:
        return SimulatedExecutor(self._harness.loop, self._harness.streams.disk, QUICK_DISK, workers=workers)

    def _make_rng(self) -> Rng:
        return self._harness.streams.stream(f"node-{self.id}-{self.lives}")

    def _make_replicator(
        self,
        *,
        settings: ReplicationSettings,
        log_settings: LogSettings,
        executor: SimulatedExecutor | None = None,
        clock: SimulatedClock | None = None,
        rng: Rng | None = None,
    ) -> Replicator:
        """Return the replicator of a new process."""
        return Replicator(
            self.id,
            incarnation=self.lives,
            network=self._harness.network.port(self.id),
            disk=self.disk,
            executor=executor or self._make_executor(),
            clock=clock or SimulatedClock(self._harness.loop),
            rng=rng or self._make_rng(),
            settings=settings,
            log_settings=log_settings,
            on_failure=self.failures.append,
        )


class SimulatedHarness(ABC, Generic[N]):
    """Nodes 1 to `nodes`, and the loop and network that they share."""

    def __init__(self, nodes: int, *, seed: int = 1) -> None:
        self.streams = RandomStreams(seed)
        self.loop = SimulatedLoop(self.streams.schedule, time_max_s=_TIME_MAX_S)
        self.network = SimulatedNetwork(self.loop, self.streams.network, keep_order=True)
        self.nodes: dict[NodeId, N] = {}
        for _ in range(nodes):
            self.add_node()
        self.voters = Configuration(voters=tuple(self.nodes))

    def __getitem__(self, number: int) -> N:
        return self.nodes[NodeId(number)]

    @abstractmethod
    def make_node(self, node: NodeId) -> N:
        """Return a new node with an empty disk."""

    def add_node(self, number: int | None = None) -> N:
        """Create one more node, which is not started and belongs to no group."""
        node = NodeId(len(self.nodes) + 1 if number is None else number)
        self.nodes[node] = self.make_node(node)
        return self.nodes[node]

    def start(self) -> None:
        """Start every node as a first voter."""
        for node in self.nodes.values():
            node.start(bootstrap=self.voters)

    async def wait(self, condition: Callable[[], T | None], *, step_s: float = 0.01, timeout_s: float = 60) -> T:
        """Return what `condition` returns as soon as it is true; fail the test after `timeout_s`."""
        end = self.loop.time() + timeout_s
        while True:
            result = condition()
            if result:
                return result
            assert self.loop.time() < end, "waited in vain"
            await asyncio.sleep(step_s)

    async def run_on(self, node: N, work: Coroutine[Any, Any, T]) -> T:
        """Run work on a node and return its result; the outcome is unknown if the node is killed meanwhile."""
        lives = node.lives
        with self.loop.node_scope(node.id):
            task = self.loop.create_task(work)
        while not task.done():
            if not node.is_up or node.lives != lives:
                raise OutcomeUnknownError("the node was killed")
            await asyncio.sleep(_POLL_S)
        return task.result()

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        """Start the nodes, run a test, kill the nodes that are left and close the loop."""

        async def main() -> None:
            self.start()
            await test()
            for node in self.nodes.values():
                if node.is_alive:
                    self.loop.kill(node.id)

        try:
            self.loop.run_until_complete(main())
        finally:
            self.loop.close()
            self.close()

    def close(self) -> None:
        """Free what the nodes hold besides memory; idempotent."""

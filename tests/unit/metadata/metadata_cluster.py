"""Managers on a simulated loop, network and disk, each with a real SQLite file: what the store's tests share."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from metadata_world import init_cluster

from quiver.config import LogSettings, MetadataSettings, ReplicationSettings
from quiver.errors import OutcomeUnknownError, StorageError, UnavailableError
from quiver.metadata import (
    METADATA_GROUP,
    Command,
    Database,
    MetadataState,
    MetadataStore,
    compare,
    open_database,
    sqlite_url,
)
from quiver.model import NodeId
from quiver.raft import Configuration
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
R = TypeVar("R")
DIRECTORY = "/data/metadata"
SMALL_LOG = LogSettings(segment_bytes_max=4096, tail_cache_bytes_max=2000)
QUICK_DISK = Latency(minimum_ms=0.1, spread_ms=0.3)


class Manager:
    """One manager's life after life."""

    def __init__(self, cluster: Cluster, node: NodeId) -> None:
        self.cluster, self.id = cluster, node
        self.disk = SimulatedDisk()
        self.path = cluster.directory / f"manager-{node}.db"
        self.lives = 0
        self.failures: list[StorageError] = []
        self.database: Database
        self.store: MetadataStore
        self.member: Member

    @property
    def is_up(self) -> bool:
        return self.cluster.loop.is_alive(self.id) and hasattr(self, "member")

    def start(self, *, bootstrap: Configuration | None = None) -> None:
        self.lives += 1
        with self.cluster.loop.node_scope(self.id):
            self.cluster.loop.create_task(self._live(bootstrap))

    def kill(self, *, loses_power: bool = False) -> None:
        self.cluster.loop.kill(self.id)
        self.cluster.network.disconnect(self.id)
        self.database.close()
        del self.member
        if loses_power:
            self.disk.crash()
        else:
            self.disk.restart()

    def lose_database(self) -> None:
        for path in self.cluster.directory.glob(f"{self.path.name}*"):
            path.unlink()

    def load_database(self) -> MetadataState:
        with closing(open_database(sqlite_url(str(self.path)))) as database:  # the manager may be dead
            return database.load()

    async def _live(self, bootstrap: Configuration | None) -> None:
        cluster = self.cluster
        executor = SimulatedExecutor(cluster.loop, cluster.streams.disk, QUICK_DISK)
        clock = SimulatedClock(cluster.loop)
        self.database = open_database(sqlite_url(str(self.path)))
        replicator = Replicator(
            self.id,
            incarnation=self.lives,
            network=cluster.network.port(self.id),
            disk=self.disk,
            executor=executor,
            clock=clock,
            rng=cluster.streams.stream(f"node-{self.id}-{self.lives}"),
            settings=cluster.settings,
            log_settings=SMALL_LOG,
            on_failure=self.failures.append,
        )
        self.store = await MetadataStore.open(
            self.database, executor=executor, clock=clock, on_failure=replicator.fail, settings=cluster.metadata
        )
        async with replicator:
            member = await replicator.open_member(METADATA_GROUP, DIRECTORY, self.store.machine, bootstrap=bootstrap)
            self.store.attach(member)
            self.member = member
            await self.work()

    async def work(self) -> None:
        """Do what a manager does beside keeping the metadata: nothing, unless a test's own kind of manager does."""
        await asyncio.Event().wait()


class Cluster:
    """Managers, and ways to wait for what they do."""

    def __init__(
        self,
        directory: Path,
        managers: int = 3,
        *,
        seed: int = 1,
        hibernation: bool = False,
        metadata: MetadataSettings | None = None,
    ) -> None:
        self.directory = directory
        self.streams = RandomStreams(seed)
        self.loop = SimulatedLoop(self.streams.schedule, time_max_s=600)
        self.network = SimulatedNetwork(self.loop, self.streams.network, keep_order=True)
        self.settings = ReplicationSettings(hibernation=hibernation)
        self.metadata = metadata
        self.managers = {NodeId(n): self.make_manager(NodeId(n)) for n in range(1, managers + 1)}
        self.voters = Configuration(voters=tuple(self.managers))

    def __getitem__(self, number: int) -> Manager:
        return self.managers[NodeId(number)]

    def make_manager(self, node: NodeId) -> Manager:
        return Manager(self, node)

    def add(self) -> Manager:
        """Make one more node; it belongs to no group until the primary lets it."""
        node = NodeId(len(self.managers) + 1)
        self.managers[node] = self.make_manager(node)
        return self.managers[node]

    def start(self) -> None:
        for manager in self.managers.values():
            manager.start(bootstrap=self.voters)

    async def wait(self, condition: Callable[[], T | None], *, step_s: float = 0.01) -> T:
        end = self.loop.time() + 60
        while True:
            found = condition()
            if found:
                return found
            assert self.loop.time() < end, "waited in vain"
            await asyncio.sleep(step_s)

    async def primary(self) -> Manager:
        return await self.wait(self._find_primary)

    def _find_primary(self) -> Manager | None:
        leaders = [manager for manager in self.managers.values() if manager.is_up and manager.member.is_ready]
        return max(leaders, key=lambda manager: manager.member.term, default=None)

    async def replica(self) -> Manager:
        primary = await self.primary()
        return next(manager for manager in self.managers.values() if manager is not primary)

    async def submit(self, command: Command[R]) -> R:
        """Submit at whoever leads, until it is done; the command must bear being done twice."""
        while True:
            manager = await self.primary()
            try:
                return await self._on(manager, manager.store.submit(command))
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.05)

    async def _on(self, manager: Manager, work: Coroutine[Any, Any, R]) -> R:
        """Wait for work on a manager, which may be killed meanwhile."""
        with self.loop.node_scope(manager.id):
            task = self.loop.create_task(work)
        lives = manager.lives
        while not task.done():
            if not manager.is_up or manager.lives != lives:
                raise OutcomeUnknownError("the manager was killed")
            await asyncio.sleep(0.002)
        return task.result()

    async def wait_equal(self) -> None:
        """Wait until every manager has applied and stored the same, and check that it is the same."""
        managers = list(self.managers.values())
        await self.submit(init_cluster())  # changes nothing, and has everything before it applied
        await self.wait(lambda: all(manager.is_up for manager in managers) or None)
        await self.wait(lambda: self._is_settled(managers) or None)
        in_memory = compare({str(manager.id): manager.store.view() for manager in managers})
        stored = compare({str(manager.id): manager.load_database().view() for manager in managers})
        assert in_memory.is_equal, in_memory
        assert len({item.digest for item in (*in_memory.compared, *stored.compared)}) == 1, (in_memory, stored)

    def _is_settled(self, managers: list[Manager]) -> bool:
        indexes = {manager.store.stored_index for manager in managers}
        indexes |= {manager.member.commit_index for manager in managers}
        return len(indexes) == 1


def simulate(
    test: Callable[[Cluster], Coroutine[Any, Any, None]],
    *,
    managers: int = 3,
    formed: bool = True,
    make_cluster: Callable[..., Cluster] = Cluster,
    **settings: Any,
) -> None:
    """Run `async def test(cluster)` over started managers of a formed cluster."""

    async def main(cluster: Cluster) -> None:
        cluster.start()
        if formed:
            await cluster.submit(init_cluster())
        await test(cluster)
        for manager in cluster.managers.values():
            if cluster.loop.is_alive(manager.id):
                cluster.loop.kill(manager.id)
            manager.database.close()

    with tempfile.TemporaryDirectory() as directory:
        cluster = make_cluster(Path(directory), managers, **settings)
        try:
            cluster.loop.run_until_complete(main(cluster))
        finally:
            cluster.loop.close()

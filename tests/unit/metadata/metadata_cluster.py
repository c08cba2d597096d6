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
from quiver.errors import OutcomeUnknownError, UnavailableError
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
from quiver.replication import Member
from quiver.testing import SimulatedClock
from quiver.testing.harness import HarnessNode, SimulatedHarness

R = TypeVar("R")
DIRECTORY = "/data/metadata"
SMALL_LOG = LogSettings(segment_bytes_max=4096, tail_cache_bytes_max=2000)


class Manager(HarnessNode):
    """One manager: a member of the metadata's group with a SQLite file."""

    def __init__(self, cluster: Cluster, node: NodeId) -> None:
        super().__init__(cluster, node)
        self.cluster = cluster
        self.path = cluster.directory / f"manager-{node}.db"
        self.database: Database
        self.store: MetadataStore
        self.member: Member

    @property
    def is_up(self) -> bool:
        return self.is_alive and hasattr(self, "member")

    def _drop_process(self) -> None:
        self.database.close()
        del self.member

    def lose_database(self) -> None:
        for path in self.cluster.directory.glob(f"{self.path.name}*"):
            path.unlink()

    def load_database(self) -> MetadataState:
        with closing(open_database(sqlite_url(str(self.path)))) as database:  # the manager may be dead
            return database.load()

    async def _run(self, bootstrap: Configuration | None) -> None:
        cluster = self.cluster
        executor, clock = self._make_executor(), SimulatedClock(cluster.loop)
        self.database = open_database(sqlite_url(str(self.path)))
        replicator = self._make_replicator(
            settings=cluster.settings, log_settings=SMALL_LOG, executor=executor, clock=clock
        )
        self.store = await MetadataStore.open(
            self.database,
            executor=executor,
            clock=clock,
            rng=self._make_rng(),
            on_failure=replicator.fail,
            settings=cluster.metadata,
        )
        async with replicator:
            member = await replicator.open_member(METADATA_GROUP, DIRECTORY, self.store.machine, bootstrap=bootstrap)
            self.store.attach(member)
            self.member = member
            await self.work()

    async def work(self) -> None:
        """Do what a manager does beside keeping the metadata: nothing, unless a test's own kind of manager does."""
        await asyncio.Event().wait()


class Cluster(SimulatedHarness[Manager]):
    """Managers of one cluster."""

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
        self.settings = ReplicationSettings(hibernation=hibernation)
        self.metadata = metadata
        super().__init__(managers, seed=seed)

    @property
    def managers(self) -> dict[NodeId, Manager]:
        return self.nodes

    def make_node(self, node: NodeId) -> Manager:
        return Manager(self, node)

    def close(self) -> None:
        for manager in self.nodes.values():
            if hasattr(manager, "database"):
                manager.database.close()

    async def primary(self) -> Manager:
        return await self.wait(self._find_primary)

    def _find_primary(self) -> Manager | None:
        leaders = [manager for manager in self.managers.values() if manager.is_up and manager.member.is_ready]
        return max(leaders, key=lambda manager: manager.member.term, default=None)

    async def replica(self) -> Manager:
        primary = await self.primary()
        return next(manager for manager in self.managers.values() if manager is not primary)

    async def submit(self, command: Command[R]) -> R:
        """Submit at the primary until it is done; the command must be idempotent."""
        while True:
            manager = await self.primary()
            try:
                return await self.run_on(manager, manager.store.submit(command))
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.05)

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

    with tempfile.TemporaryDirectory() as directory:
        cluster = make_cluster(Path(directory), managers, **settings)

        async def main() -> None:
            if formed:
                await cluster.submit(init_cluster())
            await test(cluster)

        cluster.run(main)

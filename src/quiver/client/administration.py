"""The administration of a cluster's nodes: the part of `AsyncCluster` that programs rarely need."""

from __future__ import annotations

from quiver.client.access import AsyncAccess
from quiver.client.arguments import check_arguments
from quiver.client.checkup import Checkup, check_cluster
from quiver.client.explanation import PartitionExplanation, explain_partition
from quiver.client.overview import ClusterOverview, find_overview
from quiver.model import NodeId
from quiver.routing.router import Router
from quiver.wire.admin_messages import (
    AddManager,
    ClusterUpgraded,
    ListManagers,
    ManagersFound,
    RemoveManager,
    UpgradeCluster,
)
from quiver.wire.messages import DrainBroker, NodeInfo, RebalanceBrokers, RemoveBroker
from quiver.wire.requests import Done, R, Request


@check_arguments
class AsyncClusterAdministration:
    """Brokers, managers, users, and the state of the cluster; `AsyncCluster` provides the router."""

    router: Router

    @property
    def access(self) -> AsyncAccess:
        """The users, tokens, roles and grants of the cluster."""
        return AsyncAccess(self.router)

    async def brokers(self) -> list[NodeInfo]:
        """Return all nodes, sorted by id."""
        await self.router.refresh_all(deadline=self.router.deadline())
        return sorted(self.router.cache.nodes.values(), key=lambda node: node.node)

    async def drain(self, broker: int, *, is_undone: bool = False) -> None:
        """Move all replicas off a broker; with `is_undone`, let it hold replicas again."""
        self._record_index(await self._ask(DrainBroker(broker=NodeId(broker), is_undone=is_undone)))

    async def remove(self, broker: int) -> None:
        """Remove a broker from the cluster; it must be drained, or dead and without replicas."""
        self._record_index(await self._ask(RemoveBroker(broker=NodeId(broker))))

    async def rebalance(self) -> None:
        """Move replicas until all brokers hold a similar share; `status` shows the progress."""
        self._record_index(await self._ask(RebalanceBrokers()))

    async def upgrade(self, level: int | None = None, *, is_dry_run: bool = False) -> ClusterUpgraded:
        """Raise the cluster's feature level, to the highest known one unless another is given; it is never lowered.

        Raises:
            ConflictError: not done; the program of a node is too old or not known (`nodes_too_old`).
        """
        upgraded = await self._ask(UpgradeCluster(level=level, is_dry_run=is_dry_run))
        self.router.cache.record_index(upgraded.index)
        return upgraded

    async def managers(self) -> ManagersFound:
        """Return the managers, which vote on the metadata, and the standbys, which have the role only."""
        return await self._ask(ListManagers())

    async def add_manager(self, node: int) -> None:
        """Make a node that has the role manager a manager; returns when the change is committed."""
        self._record_index(await self._ask(AddManager(node=NodeId(node))))

    async def remove_manager(self, node: int) -> None:
        """Remove a node from the managers; it keeps its other roles. Returns when the change is committed."""
        self._record_index(await self._ask(RemoveManager(node=NodeId(node))))

    async def status(self) -> ClusterOverview:
        """Return the state of the whole cluster: all nodes now, all partitions as reported by their leaders."""
        return await find_overview(self.router)

    async def explain(self, topic: str, partition: int, offset: int | None = None) -> PartitionExplanation:
        """Return who leads a partition, how far each replica is, and why it does not accept or deliver records."""
        return await explain_partition(self.router, topic, partition, offset)

    async def checkup(self) -> Checkup:
        """Check the whole cluster and return what needs attention, the most severe findings first."""
        return await check_cluster(self.router)

    async def _ask(self, request: Request[R]) -> R:
        return (await self.router.ask(request, deadline=self.router.deadline()))[0]

    def _record_index(self, done: Done) -> None:
        self.router.cache.record_index(done.index)

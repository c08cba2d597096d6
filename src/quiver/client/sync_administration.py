"""The administration of a cluster's nodes, from threads: the part of `sync.Cluster` that programs rarely need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from quiver.client.access import Access
from quiver.client.arguments import check_arguments
from quiver.client.checkup import Checkup
from quiver.client.cluster import AsyncCluster
from quiver.client.explanation import PartitionExplanation
from quiver.client.overview import ClusterOverview
from quiver.wire.admin_messages import ClusterUpgraded, ManagersFound
from quiver.wire.messages import NodeInfo

T = TypeVar("T")


@check_arguments
class ClusterAdministration(ABC):
    """Brokers, managers, users and the overview; `sync.Cluster` provides the cluster and the thread that it runs in."""

    _cluster: AsyncCluster

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work, which runs in the cluster's thread."""

    @property
    def access(self) -> Access:
        """The users, tokens, roles and grants of the cluster."""
        return Access(self._cluster.access, self._run)

    def brokers(self) -> list[NodeInfo]:
        """Return all nodes, sorted by id."""
        return self._run(self._cluster.brokers())

    def drain(self, broker: int, *, is_undone: bool = False) -> None:
        """Move all replicas off a broker; with `is_undone`, let it hold replicas again."""
        self._run(self._cluster.drain(broker, is_undone=is_undone))

    def remove(self, broker: int) -> None:
        """Remove a broker from the cluster; it must be drained, or dead and without replicas."""
        self._run(self._cluster.remove(broker))

    def rebalance(self) -> None:
        """Move replicas until all brokers hold a similar share; `status` shows the progress."""
        self._run(self._cluster.rebalance())

    def managers(self) -> ManagersFound:
        """Return the managers, which vote on the metadata, and the standbys, which have the role only."""
        return self._run(self._cluster.managers())

    def add_manager(self, node: int) -> None:
        """Make a node that has the role manager a manager; returns when the change is committed."""
        self._run(self._cluster.add_manager(node))

    def remove_manager(self, node: int) -> None:
        """Remove a node from the managers; it keeps its other roles. Returns when the change is committed."""
        self._run(self._cluster.remove_manager(node))

    def upgrade(self, level: int | None = None, *, is_dry_run: bool = False) -> ClusterUpgraded:
        """Raise the cluster's feature level, to the highest known one unless another is given; it is never lowered.

        Raises:
            ConflictError: not done; the program of a node is too old or not known (`nodes_too_old`).
        """
        return self._run(self._cluster.upgrade(level, is_dry_run=is_dry_run))

    def status(self) -> ClusterOverview:
        """Return the state of the whole cluster: all nodes now, all partitions as reported by their leaders."""
        return self._run(self._cluster.status())

    def explain(self, topic: str, partition: int, offset: int | None = None) -> PartitionExplanation:
        """Return who leads a partition, how far each replica is, and why it does not accept or deliver records."""
        return self._run(self._cluster.explain(topic, partition, offset))

    def checkup(self) -> Checkup:
        """Check the whole cluster and return what needs attention, the most severe findings first."""
        return self._run(self._cluster.checkup())

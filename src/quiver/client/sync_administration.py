"""The blocking administration of nodes, clients, groups and holds: the part of `sync.Cluster` programs rarely need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar

from quiver.client.access import Access
from quiver.client.arguments import check_arguments
from quiver.client.checkup import Checkup
from quiver.client.cluster import AsyncCluster
from quiver.client.consumer_core import SeekTarget
from quiver.client.cursors import PartitionLag
from quiver.client.explanation import PartitionExplanation
from quiver.client.group_admin import CursorReset, Shift
from quiver.client.overview import ClusterOverview
from quiver.wire.admin_messages import ClientInfo, ClusterUpgraded, HoldInfo, ManagersFound
from quiver.wire.group_messages import GroupInfo
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

    def groups(self) -> list[GroupInfo]:
        """Return all groups with their members, sorted by name; a named consumer is a group of one."""
        return self._run(self._cluster.groups())

    def describe_group(self, group: str) -> GroupInfo:
        """Return a group: members, assignment with epochs, the last rebalance and its reason.

        Raises:
            NotFoundError: unknown group (`unknown_group`).
        """
        return self._run(self._cluster.describe_group(group))

    def group_lag(self, group: str, topic: str | None = None) -> list[PartitionLag]:
        """Return a group's cursor and lag in all its partitions, or in those of one topic.

        Raises:
            NotFoundError: unknown group, or a topic that it does not read.
        """
        return self._run(self._cluster.group_lag(group, topic))

    def reset_group(
        self,
        group: str,
        offset: SeekTarget | None = None,
        *,
        timestamp: int | datetime | None = None,
        shift: Shift | None = None,
        topic: str | None = None,
        partitions: Iterable[int] = (),
        dry_run: bool = False,
        force: bool = False,
    ) -> list[CursorReset]:
        """Move a group's cursors to an offset, "earliest", "latest", a timestamp, or by a number of records.

        Returns the cursors before and after; with `dry_run`, moves nothing. With `force` also while members are active:
        they are fenced and continue at the new cursors.

        Raises:
            ConflictError: the group has members, and `force` is false (`group_active`); nothing was moved.
            OutcomeUnknownError: some cursors were moved, others not (`partly_done`); the message names them.
            NotFoundError: unknown group, topic or partition; nothing was moved.
            OutOfRangeError: the offset is beyond a partition's end; nothing was moved.
        """
        resetting = self._cluster.reset_group(
            group,
            offset,
            timestamp=timestamp,
            shift=shift,
            topic=topic,
            partitions=partitions,
            dry_run=dry_run,
            force=force,
        )
        return self._run(resetting)

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """Delete a group with its cursors; with `force` also while it has members, which then fail.

        Raises:
            ConflictError: the group has members, and `force` is false (`group_active`).
            NotFoundError: unknown group (`unknown_group`).
        """
        self._run(self._cluster.delete_group(group, force=force))

    def clients(self, kind: Literal["producer", "consumer", ""] = "", topic: str | None = None) -> list[ClientInfo]:
        """Return the registered producers and consumers, optionally of one kind or topic."""
        return self._run(self._cluster.clients(kind, topic))

    def forget(self, kind: Literal["producer", "consumer"], id: int) -> None:  # noqa: A002 - the public name of the argument
        """Remove a producer or consumer; its cursors no longer keep records from retention."""
        self._run(self._cluster.forget(kind, id))

    def lag(self, consumer_id: int, topic: str | None = None) -> list[PartitionLag]:
        """Return a consumer's cursor and lag in all its partitions, or in those of one topic."""
        return self._run(self._cluster.lag(consumer_id, topic))

    def reset(
        self,
        consumer_id: int,
        topic: str,
        offset: SeekTarget | None = None,
        *,
        timestamp: int | datetime | None = None,
        partitions: Iterable[int] = (),
    ) -> None:
        """Move a consumer's cursors to an offset, "earliest", "latest", or the first record since a timestamp.

        Stop the consumer first: one that runs keeps its positions and overwrites the cursors with its next commit.
        """
        self._run(self._cluster.reset(consumer_id, topic, offset, timestamp=timestamp, partitions=partitions))

    def hold(
        self,
        topic: str,
        name: str,
        offsets: Mapping[int, int],
        *,
        lasting: float = 60.0,
        owner: str = "",
        topic_id: int | None = None,
    ) -> None:
        """Keep a topic's records from retention for `lasting` seconds, by partition from an offset on.

        For a program that stores its own offsets: renew the hold, from its current offsets, well before it expires. It
        replaces the hold of that `name` on the topic. `owner` is shown to operators.
        """
        self._run(self._cluster.hold(topic, name, offsets, lasting=lasting, owner=owner, topic_id=topic_id))

    def release_hold(self, name: str, topic: str | None = None) -> None:
        """Release a hold on one topic or on all its topics; a missing hold is no error."""
        self._run(self._cluster.release_hold(name, topic))

    def holds(self) -> list[HoldInfo]:
        """Return the holds, sorted by topic and name."""
        return self._run(self._cluster.holds())

"""The administration of nodes, clients, groups and holds: the part of `AsyncCluster` that programs rarely need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

from quiver.client.access import AsyncAccess
from quiver.client.arguments import check_arguments
from quiver.client.checkup import Checkup, check_cluster
from quiver.client.consumer import parse_seek_target
from quiver.client.consumer_core import SeekTarget
from quiver.client.cursors import PartitionLag, find_lag, reset_cursors
from quiver.client.explanation import PartitionExplanation, explain_partition
from quiver.client.group_admin import (
    CursorReset,
    ResetTarget,
    Shift,
    delete_group,
    find_group,
    find_group_lag,
    find_groups,
    require_resettable,
    reset_group,
)
from quiver.client.holds import find_holds, place_hold, release_hold
from quiver.client.options import to_ms
from quiver.client.overview import ClusterOverview, find_overview
from quiver.errors import NotFoundError
from quiver.model import ConsumerId, NodeId, PartitionId
from quiver.routing.router import Router
from quiver.wire.admin_messages import (
    AddManager,
    ClientInfo,
    ClusterUpgraded,
    HoldInfo,
    ListClients,
    ListManagers,
    ManagersFound,
    RemoveManager,
    UpgradeCluster,
)
from quiver.wire.group_messages import GroupInfo
from quiver.wire.messages import DrainBroker, ForgetClientRequest, NodeInfo, RebalanceBrokers, RemoveBroker
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

    async def clients(
        self, kind: Literal["producer", "consumer", ""] = "", topic: str | None = None
    ) -> list[ClientInfo]:
        """Return the registered producers and consumers, optionally of one kind or topic."""
        request = ListClients(kind=kind, topic=topic)
        return list((await self._ask(request)).clients)

    async def forget(self, kind: Literal["producer", "consumer"], id: int) -> None:  # noqa: A002 - the public name of the argument
        """Remove a producer or consumer; its cursors no longer keep records from retention."""
        self._record_index(await self._ask(ForgetClientRequest(kind=kind, id=id)))

    async def lag(self, consumer_id: int, topic: str | None = None) -> list[PartitionLag]:
        """Return a consumer's cursor and lag in all its partitions, or in those of one topic.

        Raises:
            NotFoundError: unknown consumer, or not registered for that topic (`unknown_consumer`).
        """
        known = next((client for client in await self.clients("consumer", topic) if client.id == consumer_id), None)
        if known is None:
            scope = "" if topic is None else f" of topic {topic!r}"
            raise NotFoundError(f"not done: unknown consumer {consumer_id}{scope}", code="unknown_consumer")
        return await find_lag(self.router, ConsumerId(consumer_id), known.topics if topic is None else (topic,))

    async def reset(
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

        Raises:
            ConflictError: it is a group with members (`group_active`), or a work queue (`group_kind`).
            NotFoundError: unknown consumer, topic or partition.
            NotAllowedError: the consumer is not registered for one of `partitions`; no cursor was moved.
            OutOfRangeError: the offset is beyond a partition's end; no cursor was moved.
        """
        target, is_timestamp = parse_seek_target(offset, timestamp)
        named = tuple(map(PartitionId, partitions))
        consumer = ConsumerId(consumer_id)
        await require_resettable(self.router, consumer)
        await reset_cursors(self.router, consumer, topic, target, is_timestamp=is_timestamp, partitions=named)

    async def hold(
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

        Raises:
            ConflictError: too many holds (`too_many_holds`), or the topic was created again (`topic_recreated`).
            OutOfRangeError: no partition is named, or the time is too short or too long (`bad_hold`).
        """
        lasting_ms = to_ms(lasting, "lasting")
        await place_hold(self.router, topic, name, offsets, lasting_ms=lasting_ms, owner=owner, topic_id=topic_id)

    async def release_hold(self, name: str, topic: str | None = None) -> None:
        """Release a hold on one topic or on all its topics; a missing hold is no error."""
        await release_hold(self.router, name, topic)

    async def holds(self) -> list[HoldInfo]:
        """Return the holds, sorted by topic and name."""
        return await find_holds(self.router)

    async def groups(self) -> list[GroupInfo]:
        """Return all groups with their members, sorted by name; a named consumer is a group of one."""
        return await find_groups(self.router)

    async def describe_group(self, group: str) -> GroupInfo:
        """Return a group: members, assignment with epochs, the last rebalance and its reason.

        Raises:
            NotFoundError: unknown group (`unknown_group`).
        """
        return await find_group(self.router, group)

    async def group_lag(self, group: str, topic: str | None = None) -> list[PartitionLag]:
        """Return a group's cursor and lag in all its partitions, or in those of one topic.

        Raises:
            NotFoundError: unknown group, or a topic that it does not read.
        """
        return await find_group_lag(self.router, group, topic)

    async def reset_group(
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
        timestamp_ms = round(timestamp.timestamp() * 1000) if isinstance(timestamp, datetime) else timestamp
        return await reset_group(
            self.router,
            group,
            ResetTarget(offset=offset, timestamp_ms=timestamp_ms, shift=shift),
            topic=topic,
            partitions=tuple(map(PartitionId, partitions)),
            is_dry_run=dry_run,
            is_forced=force,
        )

    async def delete_group(self, group: str, *, force: bool = False) -> None:
        """Delete a group with its cursors; with `force` also while it has members, which then fail.

        Raises:
            ConflictError: the group has members, and `force` is false (`group_active`).
            NotFoundError: unknown group (`unknown_group`).
        """
        await delete_group(self.router, group, is_forced=force)

    async def _ask(self, request: Request[R]) -> R:
        return (await self.router.ask(request, deadline=self.router.deadline()))[0]

    def _record_index(self, done: Done) -> None:
        self.router.cache.record_index(done.index)

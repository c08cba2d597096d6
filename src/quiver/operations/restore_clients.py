"""What `quiver backup restore` restores beside records: named clients, cursors, queues, owners and quotas.

A client that exists keeps its owner and its other topics. A new one belongs to whom it belonged to, by name: the user
need not exist yet. What belonged to nobody, or to whom an earlier program did not say, belongs to nobody again: the
first user that uses it becomes its owner. Only an administrator may say to whom something belongs; whoever else
restores owns what is restored, which `report` gets told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from quiver.client.cluster import AsyncCluster
from quiver.client.cursors import ConsumerCursors, register_consumer
from quiver.errors import NotAllowedError, NotFoundError, RequestError
from quiver.model import ConsumerId, Offset, PartitionId
from quiver.operations.backup_folder import ClusterBackup, ConsumerBackup, ProducerBackup, QuotaBackup, TopicBackup
from quiver.security.permissions import USER_PREFIX
from quiver.tasks import gather_first_error
from quiver.wire.group_messages import ConfigureGroup, QueueSettingsChange
from quiver.wire.messages import RegisterProducerRequest, Selection

Report = Callable[[str], None]
OwnedKind = Literal["topic", "producer", "consumer"]

_NO_OWNERS = frozenset({"not_allowed", "feature_level", "unknown_request"})
"""Codes of refusals that are the same for every owner: of the user, the cluster's level, or its programs."""


class Owners:
    """Gives what is restored to its owners."""

    def __init__(self, cluster: AsyncCluster, report: Report) -> None:
        self._cluster, self._report = cluster, report
        self._is_refused = False
        self._given: set[str] = set()

    async def give(self, kind: OwnedKind, id_: int, owner: str | None) -> None:
        """Make a user the owner of something; empty or None: nobody."""
        if self._is_refused:
            return
        try:
            await self._cluster.access.change_owner(kind, id_, owner or "")
        except RequestError as error:
            if error.code not in _NO_OWNERS:
                raise
            self._is_refused = True
            self._report(f"owners are not restored, all of it belongs to the user that restores it: {error.message}")
            return
        if owner:
            self._given.add(owner)

    async def report_unknown(self) -> None:
        """Report the owners that are no users of the cluster."""
        known = {USER_PREFIX + user.user for user in await self._cluster.access.users()} if self._given else set()
        for owner in sorted(self._given - known):
            name = owner.removeprefix(USER_PREFIX)
            self._report(
                f"{owner} owns some of it and is no user of this cluster: unless an identity provider knows it, "
                f"create it with `quiver user create {name}`"
            )


class ClientRestorer:
    """Restores the clients of some topics of a backup."""

    def __init__(self, cluster: AsyncCluster, topics: Mapping[str, TopicBackup], owners: Owners) -> None:
        self._cluster, self._router, self._topics, self._owners = cluster, cluster.router, topics, owners
        self._existing: set[tuple[str, str]] = set()
        self.producers = self.consumers = self.cursors = 0
        """How many were restored."""

    async def restore(self, content: ClusterBackup) -> None:
        """Register named clients again, and set the consumers' cursors to the same records."""
        self._existing = {(one.kind, one.name) for one in await self._cluster.clients() if one.name}
        for producer in content.producers:
            await self._restore_producer(producer)
        for consumer in content.consumers:
            await self._restore_consumer(consumer)

    async def _restore_producer(self, producer: ProducerBackup) -> None:
        used = tuple(Selection(topic=topic) for topic in producer.topics if topic in self._topics)
        if not used:
            return
        request = RegisterProducerRequest(topics=used, name=producer.name)
        registered, _ = await self._router.ask(request, deadline=self._router.deadline())
        self._router.cache.record_index(registered.index)
        self.producers += 1
        if ("producer", producer.name) not in self._existing:
            await self._owners.give("producer", registered.producer_id, producer.owner)

    async def _restore_consumer(self, consumer: ConsumerBackup) -> None:
        shifted = shift_cursors(consumer, self._topics)
        if not shifted:
            return
        if consumer.queue is not None:
            id_ = await self._register_queue(consumer, tuple(shifted))
        else:
            id_ = await self._register(consumer.name, shifted)
        for topic, offsets in shifted.items():
            cursors = ConsumerCursors(self._router, topic, id_)
            deadline = self._router.deadline()
            # A queue that has begun knows better what is settled.
            put = cursors.move if consumer.queue is None else cursors.begin
            await gather_first_error(
                put(PartitionId(partition), Offset(at), deadline=deadline) for partition, at in offsets.items()
            )
            self.cursors += len(offsets)
        self.consumers += 1
        if ("consumer", consumer.name) not in self._existing:
            await self._owners.give("consumer", id_, consumer.owner)

    async def _register(self, name: str, cursors: Mapping[str, Mapping[int, int]]) -> ConsumerId:
        """Register a consumer for the partitions in which it had a cursor; return its id."""
        ids = [
            await register_consumer(
                self._router,
                (topic,),
                name=name,
                consumer_id=None,
                partitions=self._select(topic, offsets),
                deadline=self._router.deadline(),
            )
            for topic, offsets in cursors.items()
        ]
        return ids[0][0]

    def _select(self, topic: str, offsets: Mapping[int, int]) -> tuple[PartitionId, ...]:
        """Return the partitions of a registration; empty: all."""
        is_whole = not offsets or len(offsets) == len(self._topics[topic].partitions)
        return () if is_whole else tuple(map(PartitionId, sorted(offsets)))

    async def _register_queue(self, consumer: ConsumerBackup, topics: tuple[str, ...]) -> ConsumerId:
        """Register a work queue with its settings; one that exists keeps its own."""
        assert consumer.queue is not None
        is_new = ("consumer", consumer.name) not in self._existing
        settings = QueueSettingsChange(**msgspec.structs.asdict(consumer.queue)) if is_new else QueueSettingsChange()
        request = ConfigureGroup(group=consumer.name, kind="queue", topics=topics, settings=settings)
        configured, _ = await self._router.ask(request, deadline=self._router.deadline())
        self._router.cache.record_index(configured.index)
        return configured.group_id


async def restore_quotas(cluster: AsyncCluster, quotas: tuple[QuotaBackup, ...], report: Report) -> int:
    """Set the limits of subjects that have none; return their number. Users and roles must exist."""
    if not quotas:
        return 0
    try:
        known = {one.subject for one in await cluster.access.quotas()}
    except NotAllowedError as error:
        report(f"quotas are not restored: {error.message}")
        return 0
    restored = 0
    for quota in quotas:
        if quota.subject in known:
            report(f"quota of {quota.subject} is not restored: it has one already")
            continue
        try:
            await cluster.access.set_quota(quota.subject, quota.limits)
        except NotFoundError as error:
            report(f"quota of {quota.subject} is not restored: {error.message}")
            continue
        restored += 1
    return restored


def shift_cursors(consumer: ConsumerBackup, topics: Mapping[str, TopicBackup]) -> dict[str, dict[int, int]]:
    """Return a consumer's cursors in the restored topics: each at the record that it was at."""
    found: dict[str, dict[int, int]] = {}
    for topic in consumer.cursors.keys() & topics.keys():
        bounds = {one.partition: one for one in topics[topic].partitions}
        found[topic] = {
            part: min(max(at, bounds[part].first_offset), bounds[part].end_offset) - bounds[part].first_offset
            for part, at in consumer.cursors[topic].items()
            if part in bounds
        }
    return dict(sorted(found.items()))

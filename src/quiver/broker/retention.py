"""Gives replicas their retention policy, derived from their topic, its consumers and its holds.

Only leaders apply a policy, but every replica gets it, since any may become the leader. If a topic keeps records until
they are consumed, the policy changes with its consumers; a partition without consumers keeps everything. A hold counts
as long as it is in the metadata: only the primary expires it. Before a trim, the primary confirms that this node knows
every hold that was acknowledged (`ConfirmedPolicy`): without that, a new leader whose metadata lags behind could remove
what a program has just been promised. While there is no primary, retention waits.
"""

from __future__ import annotations

from quiver.broker.replica_table import HostedReplica, ReplicaTable
from quiver.manager.node_router import NodeRouter
from quiver.metadata import ConsumerRow, MetadataStore, Table, View, WatchEvent
from quiver.model import Index, TopicId
from quiver.partition import Replica, RetentionPolicy


class RetentionUpdater:
    """Keeps the retention policies of this node's replicas up to date."""

    def __init__(self, table: ReplicaTable, store: MetadataStore, router: NodeRouter) -> None:
        self._table = table
        self._store = store
        self._router = router

    async def run(self) -> None:
        """Follow topics, consumers and holds until the store closes."""
        async for changed in self._store.watch(Index(0)):
            view = self._store.view()
            affected = _affected_topics(view, changed)
            for hosted, replica in self._table.open_replicas() if affected else ():
                if hosted.key[0] in affected:
                    self.update(hosted, replica)

    def begin(self, hosted: HostedReplica, replica: Replica) -> None:
        """Give a replica that was just opened its policy, and the way to confirm it."""
        replica.set_policy_source(ConfirmedPolicy(hosted, self._store, self._router))
        self.update(hosted, replica)

    def update(self, hosted: HostedReplica, replica: Replica) -> None:
        """Give a replica its current policy."""
        replica.set_retention(derive_policy(self._store.view(), hosted))


class ConfirmedPolicy:
    """The policy of one replica by metadata that is confirmed to be current."""

    def __init__(self, hosted: HostedReplica, store: MetadataStore, router: NodeRouter) -> None:
        self._hosted = hosted
        self._store = store
        self._router = router

    async def confirm(self) -> None:
        """Wait until this node has the metadata of the primary; raises as `NodeRouter.catch_up` does."""
        await self._router.catch_up()

    def policy(self) -> RetentionPolicy:
        """Return the policy by the metadata that this node has now."""
        return derive_policy(self._store.view(), self._hosted)


def derive_policy(view: View, hosted: HostedReplica) -> RetentionPolicy:
    """Return the retention policy of a replica; it keeps everything if the topic is no longer known."""
    topic = view.topics.get(hosted.key[0])
    if topic is None:
        return RetentionPolicy()
    bounds = topic.retention
    consumers = view.consumers_on(*hosted.key) if bounds.until_consumed else None
    return RetentionPolicy(
        age_ms=bounds.ms,
        size_bytes=bounds.bytes,
        consumers=consumers or None,
        held_offset=view.held_offset(*hosted.key),
    )


def _affected_topics(view: View, changed: WatchEvent) -> set[TopicId]:
    """Return the topics whose policy may have changed; a removed consumer may have consumed any topic."""
    if changed.view is not None:
        return set(view.topics)
    affected: set[TopicId] = set()
    if any(change.table is Table.CONSUMERS and change.row is None for change in changed.changes):
        affected.update(topic_id for topic_id, topic in view.topics.items() if topic.retention.until_consumed)
    for change in changed.changes:
        if change.table is Table.TOPICS:
            affected.add(change.key)
        elif change.table is Table.HOLDS:
            affected.add(change.key[0])
        elif isinstance(change.row, ConsumerRow):
            affected.update(item.topic_id for item in change.row.registrations)
    return affected

"""Tell replicas how long records are kept, by their topics, their consumers and who holds them back.

Only leaders act on it, but every replica is told, since any may lead next. Where records are kept until they are
consumed, consumers that come and go change what may go: a partition that nobody consumes keeps everything. A hold is
honoured for as long as it is in the metadata: only the primary says when it is over.
"""

from __future__ import annotations

from quiver.broker.table import Held, PartitionTable
from quiver.metadata import ConsumerRow, MetadataStore, Table, View, WatchEvent
from quiver.model import Index, TopicId
from quiver.partition import Replica, RetentionPolicy


class RetentionRules:
    """The one who tells replicas how long records are kept. `run` is its life."""

    def __init__(self, table: PartitionTable, store: MetadataStore) -> None:
        self._table = table
        self._store = store

    async def run(self) -> None:
        """Follow topics, consumers and holds until the store closes."""
        async for changed in self._store.watch(Index(0)):
            view = self._store.view()
            concerned = _concerned_topics(view, changed)
            for held, replica in self._table.open_replicas() if concerned else ():
                if held.key[0] in concerned:
                    self.tell(held, replica)

    def tell(self, held: Held, replica: Replica) -> None:
        """Tell a replica what holds now."""
        replica.set_retention(find_retention(self._store.view(), held))


def find_retention(view: View, held: Held) -> RetentionPolicy:
    """Return how long records of a replica's partition are kept; for good if its topic is not known any more."""
    topic = view.topics.get(held.key[0])
    if topic is None:
        return RetentionPolicy()
    bounds = topic.retention
    consumers = frozenset(
        consumer_id
        for consumer_id in (view.consumers_of(topic.topic_id) if bounds.until_consumed else ())
        if any(item.covers(*held.key) for item in view.consumers[consumer_id].registrations)
    )
    return RetentionPolicy(
        age_ms=bounds.ms,
        size_bytes=bounds.bytes,
        consumers=consumers or None,
        held_offset=view.held_offset(*held.key),
    )


def _concerned_topics(view: View, changed: WatchEvent) -> set[TopicId]:
    """Return the topics whose rules may have changed; of a consumer that is gone nobody knows which they were."""
    if changed.view is not None:
        return set(view.topics)
    concerned: set[TopicId] = set()
    for change in changed.changes:
        if change.table is Table.TOPICS:
            concerned.add(change.key)
        elif change.table is Table.HOLDS:
            concerned.add(change.key[0])
        elif isinstance(change.row, ConsumerRow):
            concerned.update(item.topic_id for item in change.row.registrations)
        elif change.table is Table.CONSUMERS:
            concerned.update(topic_id for topic_id, topic in view.topics.items() if topic.retention.until_consumed)
    return concerned

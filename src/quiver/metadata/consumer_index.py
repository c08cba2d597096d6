"""The registered consumers by what they are registered for: whole topics, or single partitions.

It follows the table of consumers row by row, so that "who must read this partition" never costs a pass over all of
them. A consumer that is registered for a whole topic counts there, and not at the topic's partitions as well. Like the
tables, an index that was copied must not change any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import chain

from quiver.metadata.bucket_table import BucketTable, by_id
from quiver.metadata.rows import ALL_PARTITIONS, ConsumerRow
from quiver.model import ConsumerId, PartitionId, TopicId

_Part = tuple[TopicId, PartitionId]
"""A partition, or a whole topic with `ALL_PARTITIONS`."""
_Readers = BucketTable[ConsumerId, None]


class PartitionConsumers(Set[ConsumerId]):
    """The consumers registered for one partition. Iteration is in the order of their history: the fastest."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: _Readers) -> None:
        self._parts = parts
        """They have no consumer in common."""

    @classmethod
    def _from_iterable(cls, it: object) -> Set[ConsumerId]:  # type: ignore[override] # results of | and & are plain sets
        return frozenset(it)  # type: ignore[call-overload, no-any-return] # an iterable

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[ConsumerId]:
        return chain.from_iterable(part.unordered() for part in self._parts)

    def __contains__(self, consumer_id: object) -> bool:
        for part in self._parts:  # noqa: SIM110 - asked for each cursor of a partition, where `any` costs more
            if consumer_id in part:
                return True
        return False


class ConsumerIndex:
    """The registered consumers by topic and partition."""

    __slots__ = ("_own", "_readers", "_topics")

    def __init__(self) -> None:
        self._readers: dict[_Part, _Readers] = {}
        self._own: set[_Part] = set()
        """The tables of `_readers` that no other index has."""
        self._topics: dict[TopicId, int] = {}
        """Entries of `_readers` by topic; none if it has none."""

    def copy(self) -> ConsumerIndex:
        """Return an equal index that may change; this one must not change any more."""
        copied = ConsumerIndex()
        copied._readers, copied._topics = self._readers.copy(), self._topics.copy()
        return copied

    def has_consumers(self, topic_id: TopicId) -> bool:
        """Return whether a consumer is registered for a topic, or for some of its partitions."""
        return topic_id in self._topics

    def consumers_on(self, topic_id: TopicId, partition_id: PartitionId) -> PartitionConsumers:
        """Return the consumers registered for a partition."""
        found = map(self._readers.get, ((topic_id, ALL_PARTITIONS), (topic_id, partition_id)))
        return PartitionConsumers(*(readers for readers in found if readers is not None))

    def replace(self, old: ConsumerRow | None, new: ConsumerRow | None) -> None:
        """Follow the change of a row; None: there is none."""
        before, after = _parts_of(old), _parts_of(new)
        for part, consumer_id in before.items():
            if part not in after:
                self._remove(part, consumer_id)
        for part, consumer_id in after.items():
            if part not in before:
                self._take(part)[consumer_id] = None
                self._topics[part[0]] = self._topics.get(part[0], 0) + 1

    def _remove(self, part: _Part, consumer_id: ConsumerId) -> None:
        readers = self._take(part)
        del readers[consumer_id]
        if not readers:
            del self._readers[part]
            self._own.discard(part)
        self._topics[part[0]] -= 1
        if not self._topics[part[0]]:
            del self._topics[part[0]]

    def _take(self, part: _Part) -> _Readers:
        """Return the consumers of a part to change."""
        if part not in self._own:
            self._own.add(part)
            known = self._readers.get(part)
            self._readers[part] = BucketTable(by_id) if known is None else known.copy()
        return self._readers[part]


def _parts_of(row: ConsumerRow | None) -> dict[_Part, ConsumerId]:
    """Return the parts at which a consumer counts."""
    if row is None:
        return {}
    found = {(item.topic_id, item.partition_id): row.consumer_id for item in row.registrations}
    if len(found) == 1:
        return found
    return {
        part: consumer_id
        for part, consumer_id in found.items()
        if part[1] == ALL_PARTITIONS or (part[0], ALL_PARTITIONS) not in found
    }

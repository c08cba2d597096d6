"""The inputs of every placement plan: how many replicas each broker has, and how many more moves may start. Pure.

`ReplicaLoad` counts a begun move as completed. Planning updates it, so each step of a plan sees the steps before it.
`MoveBudget` limits how many moves may run at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from quiver.metadata import BrokerState, MoveRow, MoveState, PartitionRow, TopicState, View
from quiver.model import NodeId, PartitionId, TopicId

PartitionKey = tuple[TopicId, PartitionId]

GONE = (BrokerState.DEAD, BrokerState.REMOVED)
"""The states of brokers that do not serve."""


class ReplicaLoad:
    """The replicas and preferred leaders of each broker."""

    def __init__(self, view: View) -> None:
        brokers = [broker for _, broker in sorted(view.brokers.items())]
        self.eligible = [broker.broker_id for broker in brokers if broker.is_eligible]
        self._racks = {broker.broker_id: broker.rack for broker in brokers if broker.rack}
        self.members = {key: partition.replicas for key, partition in view.partitions.items()}
        for move in view.moves.values():
            key = (move.topic_id, move.partition_id)
            self.members[key] = _after(view.partitions[key], move)
        self.replicas = Counter(chain.from_iterable(self.members.values()))
        self.leaders = Counter([members[0] for members in self.members.values()])

    @property
    def has_racks(self) -> bool:
        """Return whether any broker has a rack."""
        return bool(self._racks)

    def rack_of(self, broker: NodeId) -> str:
        """Return a broker's rack; a broker without one counts as its own rack."""
        return self._racks.get(broker) or f"\0{broker}"

    def is_even(self, counted: Counter[NodeId]) -> bool:
        """Return whether no two eligible brokers differ by more than one."""
        counts = [counted[broker] for broker in self.eligible]
        return not counts or max(counts) - min(counts) <= 1

    def expect(self, members: Sequence[NodeId]) -> None:
        """Count the replicas of a partition that will be created, the preferred leader first."""
        self.replicas.update(members)
        self.leaders[members[0]] += 1

    def replace(self, key: PartitionKey, source: NodeId | None, target: NodeId) -> None:
        """Count a planned move as completed."""
        before = self.members[key]
        if source is None:
            after = (*before, target)
        else:
            after = tuple(target if broker == source else broker for broker in before)
            self.replicas[source] -= 1
        self.replicas[target] += 1
        self.leaders[before[0]] -= 1
        self.leaders[after[0]] += 1
        self.members[key] = after

    def prefer(self, key: PartitionKey, leader: NodeId) -> None:
        """Count a planned change of the preferred leader as completed."""
        before = self.members[key]
        self.leaders[before[0]] -= 1
        self.leaders[leader] += 1
        self.members[key] = (leader, *(broker for broker in before if broker != leader))


class MoveBudget:
    """How many more moves may begin: in total, per broker, and one per partition; None means no limit.

    Moves that cannot progress are not counted, and neither is a source that is dead or removed.
    """

    def __init__(self, view: View, *, moves_max: int | None = None, broker_moves_max: int | None = None) -> None:
        self._view = view
        self._moves_max = moves_max
        self._broker_moves_max = broker_moves_max
        self._moving = {(move.topic_id, move.partition_id) for move in view.moves.values()}
        self._moves = 0
        self._busy: Counter[NodeId] = Counter()
        for move in view.moves.values():
            if can_move(view, view.partitions[move.topic_id, move.partition_id]):
                self._count(move.source, move.target)

    @property
    def is_full(self) -> bool:
        """Return whether no more moves may begin."""
        return self._moves_max is not None and self._moves >= self._moves_max

    def admits(self, broker: NodeId) -> bool:
        """Return whether a broker may take part in one more move."""
        return self._broker_moves_max is None or self._busy[broker] < self._broker_moves_max

    def admits_partition(self, partition: PartitionRow) -> bool:
        """Return whether a move of a partition can begin: it has none, and its group can complete one."""
        return partition.key not in self._moving and can_move(self._view, partition)

    def take(self, key: PartitionKey, source: NodeId | None, target: NodeId) -> None:
        """Count a planned move against the budget."""
        self._moving.add(key)
        self._count(source, target)

    def movable(self, found: Iterable[PartitionRow]) -> Iterator[PartitionRow]:
        """Yield the partitions whose move can begin, in order, until the budget is used up."""
        for partition in sorted(found, key=_key_of):
            if self.is_full:
                return
            if self.admits_partition(partition):
                yield partition

    def _count(self, source: NodeId | None, target: NodeId) -> None:
        self._moves += 1
        self._busy[target] += 1
        if source is not None and is_living(self._view, source):
            self._busy[source] += 1


def can_move(view: View, partition: PartitionRow) -> bool:
    """Return whether a partition's group can change members: its topic is active and a majority is alive."""
    living = sum(is_living(view, broker) for broker in partition.replicas)
    return view.topics[partition.topic_id].state is TopicState.ACTIVE and 2 * living > len(partition.replicas)


def is_living(view: View, broker: NodeId) -> bool:
    """Return whether a broker is neither dead, removed nor unknown."""
    return broker in view.brokers and view.brokers[broker].state not in GONE


def count_racks(load: ReplicaLoad, brokers: Collection[NodeId]) -> int:
    """Return the number of racks of some brokers."""
    return len({load.rack_of(broker) for broker in brokers})


def _after(partition: PartitionRow, move: MoveRow) -> tuple[NodeId, ...]:
    if move.state is MoveState.PROMOTED:
        return partition.replicas
    if move.source is None:
        return (*partition.replicas, move.target)
    return tuple(move.target if broker == move.source else broker for broker in partition.replicas)


def _key_of(partition: PartitionRow) -> PartitionKey:
    return partition.key

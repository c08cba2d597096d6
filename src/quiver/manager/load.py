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
"""The states of brokers that do nothing."""


class ReplicaLoad:
    """Who holds what."""

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
        """Tell whether any broker says where it stands."""
        return bool(self._racks)

    def rack_of(self, broker: NodeId) -> str:
        """Return a broker's rack; one that does not say where it stands is a rack of its own."""
        return self._racks.get(broker) or f"\0{broker}"

    def is_even(self, counted: Counter[NodeId]) -> bool:
        """Tell whether no two eligible brokers differ by more than one."""
        counts = [counted[broker] for broker in self.eligible]
        return not counts or max(counts) - min(counts) <= 1

    def expect(self, members: Sequence[NodeId]) -> None:
        """Count the replicas of a partition that is about to be, the preferred leader first."""
        self.replicas.update(members)
        self.leaders[members[0]] += 1

    def replace(self, key: PartitionKey, source: NodeId | None, target: NodeId) -> None:
        """Count a planned move as done."""
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
        """Count a preferred leader as named."""
        before = self.members[key]
        self.leaders[before[0]] -= 1
        self.leaders[leader] += 1
        self.members[key] = (leader, *(broker for broker in before if broker != leader))


class MoveBudget:
    """How many more moves may be begun: in all, for each broker, and one for each partition; None stands for any.

    Moves that cannot come forward take no room, nor does a source that is gone.
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
        """Tell whether no move may be begun at all."""
        return self._moves_max is not None and self._moves >= self._moves_max

    def admits(self, broker: NodeId) -> bool:
        """Tell whether a broker may have one more move."""
        return self._broker_moves_max is None or self._busy[broker] < self._broker_moves_max

    def admits_partition(self, partition: PartitionRow) -> bool:
        """Tell whether a partition can have a move begun: it has none, and its group could carry it out."""
        return partition.key not in self._moving and can_move(self._view, partition)

    def take(self, key: PartitionKey, source: NodeId | None, target: NodeId) -> None:
        """Take room for a planned move."""
        self._moving.add(key)
        self._count(source, target)

    def movable(self, found: Iterable[PartitionRow]) -> Iterator[PartitionRow]:
        """Yield those of some partitions that a move may be begun for, in order, as long as there is room."""
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
    """Tell whether a partition's group can change its members: it is in use, and a majority of it lives."""
    living = sum(is_living(view, broker) for broker in partition.replicas)
    return view.topics[partition.topic_id].state is TopicState.ACTIVE and 2 * living > len(partition.replicas)


def is_living(view: View, broker: NodeId) -> bool:
    """Tell whether a broker does anything, as far as known."""
    return broker in view.brokers and view.brokers[broker].state not in GONE


def count_racks(load: ReplicaLoad, brokers: Collection[NodeId]) -> int:
    """Return in how many racks brokers stand."""
    return len({load.rack_of(broker) for broker in brokers})


def _after(partition: PartitionRow, move: MoveRow) -> tuple[NodeId, ...]:
    if move.state is MoveState.PROMOTED:
        return partition.replicas
    if move.source is None:
        return (*partition.replicas, move.target)
    return tuple(move.target if broker == move.source else broker for broker in partition.replicas)


def _key_of(partition: PartitionRow) -> PartitionKey:
    return partition.key

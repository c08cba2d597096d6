"""Where replicas go: for new topics, in the place of lost ones, off brokers that are to be emptied, evenly over all.

Pure and deterministic: the same view gives the same plan, ties go to the smaller id. Nothing is changed here; a plan is
a list of steps that the primary turns into commands, a few at a time, planning anew from what has come of them.

What holds for every plan: no broker gets two replicas of a partition; only eligible brokers get any; a partition's
replicas lie in as many racks as there are to be had. Among the brokers that this leaves, the one with the fewest
replicas is taken, and of a partition's brokers the one that is preferred least often so far becomes its preferred
leader. A move that was begun counts as if it were done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from quiver.errors import ConflictError, UnavailableError
from quiver.metadata import Broker, BrokerState, Move, MoveState, Partition, TopicState, View
from quiver.model import NodeId, PartitionId, TopicId

Key = tuple[TopicId, PartitionId]

REPLICAS_DEFAULT = 3
"""How many replicas a partition gets unless something else is said, if there are as many brokers."""


class PlannedMove(msgspec.Struct, frozen=True):
    """A replica that should go to `target`, from `source`, or as one more if that is None."""

    topic_id: TopicId
    partition_id: PartitionId
    source: NodeId | None
    target: NodeId


class PlannedLeader(msgspec.Struct, frozen=True):
    """A replica that should be preferred as its partition's leader."""

    topic_id: TopicId
    partition_id: PartitionId
    leader: NodeId


class Rebalance(msgspec.Struct, frozen=True):
    """What would spread replicas and leaders evenly; nothing if they are."""

    moves: tuple[PlannedMove, ...] = ()
    leaders: tuple[PlannedLeader, ...] = ()


# -- plans -------------------------------------------------------------------------------------------


def default_replicas(view: View) -> int:
    """Return how many replicas a partition gets when nobody says how many."""
    return max(1, min(REPLICAS_DEFAULT, count_brokers(view)))


def count_brokers(view: View) -> int:
    """Return how many brokers are meant to hold replicas, dead ones included."""
    found = view.brokers.values()
    return sum(broker.state is not BrokerState.REMOVED and not broker.is_unwanted for broker in found)


def place_topic(view: View, *, partitions: int, replicas: int) -> tuple[tuple[NodeId, ...], ...]:
    """Return the brokers of each new partition's replicas, the preferred leader first.

    While brokers are dead a majority of the replicas will do; the others are added when there is somebody to take them.

    Raises:
        ConflictError: `too_few_brokers`; there are not as many brokers as replicas wanted.
        UnavailableError: too many brokers are dead at the moment, or none has joined yet.
    """
    load, known = _Load(view), count_brokers(view)
    if not known:
        raise UnavailableError("not done: no broker has joined yet", code="no_brokers")
    if replicas > known:
        raise ConflictError(
            f"not done: {replicas} replicas need as many brokers, and there are {known}", code="too_few_brokers"
        )
    if len(load.eligible) <= replicas // 2:
        raise UnavailableError(f"not done: only {len(load.eligible)} of {known} brokers live", code="brokers_dead")
    return tuple(_place_partition(load, min(replicas, len(load.eligible))) for _ in range(partitions))


def place_replacement(view: View, partition: Partition, losing: NodeId | None) -> NodeId | None:
    """Return who should get a replica in the place of `losing`, or one more; None if nobody can."""
    load = _Load(view)
    kept = [broker for broker in load.members[partition.key] if broker != losing]
    return _choose(load, kept, excluded=() if losing is None else (losing,))


def plan_drain(view: View) -> list[PlannedMove]:
    """Return moves off the brokers whose operators want them empty, as far as others can take the replicas."""
    losing = {broker.broker_id for broker in view.brokers.values() if broker.is_unwanted}
    return _plan_loss(view, losing)


def plan_rebuild(view: View, dead: Iterable[NodeId]) -> list[PlannedMove]:
    """Return moves that build the replicas of dead brokers anew elsewhere, as far as others can take them."""
    return _plan_loss(view, set(dead))


def plan_growth(view: View) -> list[PlannedMove]:
    """Return moves that give a replica more to partitions that have fewer than are meant, as far as brokers can."""
    load = _Load(view)
    planned = []
    for partition in _movable(view):
        if len(partition.replicas) < view.topics[partition.topic_id].replicas:
            planned += _plan_move(load, partition, source=None)
    return planned


def plan_rebalance(view: View, *, moves_max: int | None = None) -> Rebalance:
    """Return what brings the eligible brokers' counts of replicas, and of preferred leaders, within one of each other.

    Each move takes a replica from the fullest broker straight to the emptiest, so none could be left out. A broker
    may stay fuller where racks leave nothing to move. Leaders come last: moves take preferred leaderships along.
    """
    load = _Load(view)
    moves = tuple(islice(_even_out(view, load), moves_max))
    return Rebalance(moves, () if moves or view.moves else tuple(_even_out_leaders(view, load)))


def is_lost(broker: Broker, *, now_ms: int, rebuild_after_ms: int) -> bool:
    """Tell whether a broker was removed, or has been dead for so long that its replicas are to be built anew."""
    is_long_dead = broker.state is BrokerState.DEAD and now_ms - broker.changed_ms >= rebuild_after_ms
    return is_long_dead or broker.state is BrokerState.REMOVED


# -- what is where -----------------------------------------------------------------------------------


class _Load:
    """Who holds what, with begun moves as if they were done; changed by planning on."""

    def __init__(self, view: View) -> None:
        self.eligible = [broker for _, broker in sorted(view.brokers.items()) if broker.is_eligible]
        self.racks = {broker.broker_id: broker.rack for broker in view.brokers.values()}
        moves = {(move.topic_id, move.partition_id): move for move in view.moves.values()}
        self.members = {key: _after(partition, moves.get(key)) for key, partition in view.partitions.items()}
        self.keys = sorted(self.members)
        self.replicas = Counter(broker for members in self.members.values() for broker in members)
        self.leaders = Counter(members[0] for members in self.members.values() if members)

    def rack_of(self, broker: NodeId) -> str:
        """Return a broker's rack; without racks every broker is one of its own."""
        return self.racks.get(broker) or f"\0{broker}"

    def replace(self, key: Key, source: NodeId | None, target: NodeId) -> None:
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

    def prefer(self, key: Key, leader: NodeId) -> None:
        """Count a preferred leader as named."""
        before = self.members[key]
        self.leaders[before[0]] -= 1
        self.leaders[leader] += 1
        self.members[key] = (leader, *(broker for broker in before if broker != leader))


def _after(partition: Partition, move: Move | None) -> tuple[NodeId, ...]:
    if move is None or move.state is MoveState.PROMOTED:
        return partition.replicas
    if move.source is None:
        return (*partition.replicas, move.target)
    return tuple(move.target if broker == move.source else broker for broker in partition.replicas)


def _movable(view: View) -> Iterator[Partition]:
    """Yield, in order, the partitions that a move could be begun for: each can have one at a time."""
    moving = {(move.topic_id, move.partition_id) for move in view.moves.values()}
    for key in sorted(view.partitions):
        if key not in moving and can_move(view, view.partitions[key]):
            yield view.partitions[key]


def can_move(view: View, partition: Partition) -> bool:
    """Tell whether a partition's group can change its members: it is in use, and a majority of it lives."""
    gone = (BrokerState.DEAD, BrokerState.REMOVED)
    living = sum(view.brokers[broker].state not in gone for broker in partition.replicas if broker in view.brokers)
    return view.topics[partition.topic_id].state is TopicState.ACTIVE and 2 * living > len(partition.replicas)


# -- steps -------------------------------------------------------------------------------------------


def _place_partition(load: _Load, replicas: int) -> tuple[NodeId, ...]:
    chosen: list[NodeId] = []
    for _ in range(replicas):
        target = _choose(load, chosen)
        assert target is not None, "there are as many eligible brokers as replicas"
        chosen.append(target)
        load.replicas[target] += 1
    chosen.sort(key=lambda broker: (load.leaders[broker], broker))
    load.leaders[chosen[0]] += 1
    return tuple(chosen)


def _choose(load: _Load, kept: Sequence[NodeId], *, excluded: Sequence[NodeId] = ()) -> NodeId | None:
    """Return the best broker beside those that have a replica: a new rack first, then the fewest replicas."""
    racks = Counter(load.rack_of(broker) for broker in kept)
    candidates = [
        broker.broker_id
        for broker in load.eligible
        if broker.broker_id not in kept and broker.broker_id not in excluded
    ]
    return min(
        candidates, key=lambda broker: (racks[load.rack_of(broker)], load.replicas[broker], broker), default=None
    )


def _plan_move(load: _Load, partition: Partition, *, source: NodeId | None) -> list[PlannedMove]:
    """Return the move of one replica, counted as done; nothing if nobody can take it."""
    kept = [broker for broker in load.members[partition.key] if broker != source]
    target = _choose(load, kept, excluded=() if source is None else (source,))
    if target is None:
        return []
    load.replace(partition.key, source, target)
    return [PlannedMove(partition.topic_id, partition.partition_id, source, target)]


def _plan_loss(view: View, losing: set[NodeId]) -> list[PlannedMove]:
    """Plan one move for each partition that has a replica on a broker that is to lose what it has."""
    load = _Load(view)
    planned = []
    for partition in _movable(view):
        source = next((broker for broker in partition.replicas if broker in losing), None)
        if source is not None:
            planned += _plan_move(load, partition, source=source)
    return planned


def _even_out(view: View, load: _Load) -> Iterator[PlannedMove]:
    """Move replicas from full brokers to empty ones until no pair differs by more than one, or nothing can move."""
    settled = {partition.key for partition in _movable(view)}
    while True:
        found = _find_shift(load, settled)
        if found is None:
            return
        key, source, target = found
        load.replace(key, source, target)
        settled.remove(key)  # one move at a time for each partition; what is left is planned when it is done
        yield PlannedMove(*key, source, target)


def _find_shift(load: _Load, settled: Container[Key]) -> tuple[Key, NodeId, NodeId] | None:
    """Return a shift from one of the fullest brokers to one of the emptiest, if they differ by two.

    Where only a partition could be shifted that moves already, nothing is: the next best brokers would move more
    than is needed. Where racks allow no shift ever, the next best are taken.
    """
    held = load.replicas
    brokers = [broker.broker_id for broker in load.eligible]
    pairs = [(source, target) for source in brokers for target in brokers if held[source] - held[target] >= 2]
    pairs.sort(key=lambda pair: (-held[pair[0]], held[pair[1]], pair))
    waits_for: tuple[int, int] | None = None
    for source, target in pairs:
        counts = (held[source], held[target])
        if waits_for is not None and counts != waits_for:
            return None
        for key in _shiftable(load, source, target):
            if key in settled:
                return key, source, target
            waits_for = counts
    return None


def _shiftable(load: _Load, source: NodeId, target: NodeId) -> Iterator[Key]:
    """Yield the partitions that one broker could hold instead of another, in order."""
    for key in load.keys:
        members = load.members[key]
        if source in members and target not in members and _keeps_racks(load, members, source, target):
            yield key


def _keeps_racks(load: _Load, members: Sequence[NodeId], source: NodeId, target: NodeId) -> bool:
    """Tell whether a partition lies in as many racks after a move as before."""
    before = {load.rack_of(broker) for broker in members}
    after = {load.rack_of(target if broker == source else broker) for broker in members}
    return len(after) >= len(before)


def _even_out_leaders(view: View, load: _Load) -> Iterator[PlannedLeader]:
    """Name other preferred leaders until nobody among a partition's replicas could take one over to good effect.

    It ends: each step makes the counts more alike.
    """
    eligible = {broker.broker_id for broker in load.eligible}
    named: dict[Key, NodeId] = {}
    is_changed = True
    while is_changed:
        is_changed = False
        for key in sorted(view.partitions):
            members = load.members[key]
            target = min(
                (broker for broker in members if broker in eligible),
                key=lambda broker: (load.leaders[broker], broker),
                default=members[0],
            )
            if load.leaders[members[0]] - load.leaders[target] >= 2:
                load.prefer(key, target)
                named[key] = target
                is_changed = True
    for (topic_id, partition_id), leader in sorted(named.items()):
        yield PlannedLeader(topic_id, partition_id, leader)

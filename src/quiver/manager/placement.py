"""Where replicas go: for new topics, lost brokers, draining brokers and rebalancing.

Pure and deterministic: the same view gives the same plan, ties go to the smaller id. A plan changes nothing. It is a
list of steps that the primary turns into commands, a few at a time; then it plans again from the new metadata.

Every plan keeps these rules. A broker has at most one replica of a partition. Only eligible brokers get replicas. The
replicas of a partition are spread over as many racks as possible; brokers without a rack that publish the same host
are in one rack, because they fail together. Among the brokers that remain, one that is not suspect, and of those the
one with the fewest replicas is chosen; among a partition's brokers, the one that is the preferred leader of the fewest
partitions becomes its preferred leader.

`ReplicaLoad` counts the replicas of each broker; a begun move counts as completed. Planning updates it, so each step of
a plan sees the steps before it. `MoveBudget` limits how many moves may run at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, product

import msgspec

from quiver.errors import ConflictError, UnavailableError
from quiver.metadata import BrokerRow, BrokerState, MoveRow, MoveState, PartitionRow, View
from quiver.model import NodeId, PartitionId, TopicId

PartitionKey = tuple[TopicId, PartitionId]

GONE = (BrokerState.DEAD, BrokerState.REMOVED)
"""The states of brokers that do not serve."""


class ReplicaLoad:
    """The replicas and preferred leaders of each broker."""

    def __init__(self, view: View) -> None:
        brokers = [broker for _, broker in sorted(view.brokers.items())]
        self.eligible = [broker.broker_id for broker in brokers if broker.is_eligible]
        self.suspects = frozenset(one.broker_id for one in brokers if one.state is BrokerState.SUSPECT)
        """Brokers that may be dead already: a partition whose replicas are all lost never gets a leader."""
        self._racks = {broker.broker_id: _rack_of(broker) for broker in brokers}
        self.has_racks = 1 < len(set(self._racks.values())) < len(self._racks)
        """Whether it matters which brokers share a rack: some do, and not all."""
        self.members = {key: partition.replicas for key, partition in view.partitions.items()}
        for move in view.moves.values():
            key = (move.topic_id, move.partition_id)
            self.members[key] = _after(view.partitions[key], move)
        self.replicas = Counter(chain.from_iterable(self.members.values()))
        self.leaders = Counter([members[0] for members in self.members.values()])

    def rack_of(self, broker: NodeId) -> str:
        """Return a broker's rack; without one, its host; a broker that is unknown counts as its own rack."""
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


class EmptiestBrokers:
    """The eligible brokers by rack, the best first: takes the brokers of one new partition after the other.

    It chooses as `_choose` does, in logarithmic instead of linear time per replica: a topic may have thousands of
    partitions on hundreds of brokers, and the primary's event loop waits.
    """

    def __init__(self, load: ReplicaLoad) -> None:
        self._load = load
        self._racks: dict[str, list[_Candidate]] = {}
        for broker in load.eligible:
            self._racks.setdefault(load.rack_of(broker), []).append(self._rate(broker))
        for brokers in self._racks.values():
            heapify(brokers)
        self._best = [(brokers[0], rack) for rack, brokers in self._racks.items()]
        """The best broker of each rack. An entry that is no longer its rack's best is stale."""
        heapify(self._best)

    def take(self, replicas: int) -> list[NodeId]:
        """Return the brokers of the next partition, at most the eligible ones, and count its replicas.

        The preferred leader is first.
        """
        chosen: list[NodeId] = []
        touched: set[str] = set()
        wanted = min(replicas, len(self._load.eligible))
        while len(chosen) < wanted:
            taken = self._take_round(wanted - len(chosen))
            touched.update(map(self._load.rack_of, taken))
            chosen += taken
        chosen.sort(key=lambda broker: (self._load.leaders[broker], broker))
        self._load.expect(chosen)
        for broker in chosen:
            heappush(self._racks[self._load.rack_of(broker)], self._rate(broker))
        self._offer(touched)
        return chosen

    def _take_round(self, count: int) -> list[NodeId]:
        """Take the best broker of each rack, of the best racks first."""
        taken: list[NodeId] = []
        used: set[str] = set()
        while self._best and len(taken) < count:
            candidate, rack = heappop(self._best)
            brokers = self._racks[rack]
            if rack not in used and brokers and brokers[0] == candidate:
                used.add(rack)
                taken.append(heappop(brokers)[-1])
        self._offer(used)
        return taken

    def _offer(self, racks: Iterable[str]) -> None:
        for rack in racks:
            if self._racks[rack]:
                heappush(self._best, (self._racks[rack][0], rack))

    def _rate(self, broker: NodeId) -> _Candidate:
        return (broker in self._load.suspects, self._load.replicas[broker], broker)


_Candidate = tuple[bool, int, NodeId]
"""A broker after what decides between those of one rack: whether it is suspect, and its replicas."""


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
    """Return whether a partition's group can change members: a majority is alive."""
    return 2 * sum(is_living(view, broker) for broker in partition.replicas) > len(partition.replicas)


def is_living(view: View, broker: NodeId) -> bool:
    """Return whether a broker is neither dead, removed nor unknown."""
    return broker in view.brokers and view.brokers[broker].state not in GONE


def _rack_of(broker: BrokerRow) -> str:
    """Return a broker's failure domain: its rack, or the host that it publishes."""
    return broker.rack or f"\0{broker.wire_address.rpartition(':')[0].lower()}"


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


Assignments = tuple[tuple[NodeId, ...], ...]
"""The brokers of each partition's replicas, the preferred leader first."""

REPLICAS_DEFAULT = 3
"""Default number of replicas, if there are as many brokers."""


class PlannedMove(msgspec.Struct, frozen=True):
    """A replica to move from `source` to `target`; without a source, an additional replica."""

    topic_id: TopicId
    partition_id: PartitionId
    source: NodeId | None
    target: NodeId


class PlannedLeader(msgspec.Struct, frozen=True):
    """A replica that should become its partition's preferred leader."""

    topic_id: TopicId
    partition_id: PartitionId
    leader: NodeId


class RebalancePlan(msgspec.Struct, frozen=True):
    """The next steps of a rebalance; empty if replicas and leaders are even."""

    moves: tuple[PlannedMove, ...] = ()
    leaders: tuple[PlannedLeader, ...] = ()


# -- plans -------------------------------------------------------------------------------------------


def default_replicas(view: View, managers: Iterable[NodeId] = ()) -> int:
    """Return the number of replicas of a topic created without a number.

    `managers` that have not registered yet count as brokers, which most are: a topic that is created while a cluster
    starts gets its missing replicas when they register.
    """
    starting = set(managers) - view.brokers.keys()
    return max(1, min(REPLICAS_DEFAULT, count_brokers(view) + len(starting)))


def count_brokers(view: View) -> int:
    """Return the number of brokers that should hold replicas, dead ones included."""
    found = view.brokers.values()
    return sum(broker.state is not BrokerState.REMOVED and not broker.is_unwanted for broker in found)


def place_topic(
    view: View, *, partitions: int, replicas: int, underway: Iterable[tuple[NodeId, ...]] = ()
) -> Assignments:
    """Return the brokers of each new partition's replicas, the preferred leader first.

    `underway` are assignments in flight to the metadata; they count as if they were in it. While brokers are dead, a
    majority of the replicas is enough; the others are added when brokers become available.

    Raises:
        ConflictError: `too_few_brokers`; there are fewer brokers than requested replicas.
        UnavailableError: too many brokers are dead, or none has joined yet.
    """
    load, known = ReplicaLoad(view), count_brokers(view)
    if not known:
        raise UnavailableError("not done: no broker has joined the cluster yet; retry", code="no_brokers")
    if replicas > known:
        raise ConflictError(
            f"not done: {replicas} replicas need as many brokers, but there are {known}",
            code="too_few_brokers",
        )
    if len(load.eligible) <= replicas // 2:
        raise UnavailableError(f"not done: only {len(load.eligible)} of {known} brokers are alive", code="brokers_dead")
    for members in underway:
        load.expect(members)
    brokers = EmptiestBrokers(load)
    return tuple(tuple(brokers.take(replicas)) for _ in range(partitions))


def plan_drain(view: View, budget: MoveBudget | None = None) -> list[PlannedMove]:
    """Return the moves off draining brokers, as far as other brokers are available."""
    losing = {broker.broker_id for broker in view.brokers.values() if broker.is_unwanted}
    return _plan_loss(view, losing, budget or MoveBudget(view))


def plan_rebuild(view: View, lost: Iterable[NodeId], budget: MoveBudget | None = None) -> list[PlannedMove]:
    """Return the moves that rebuild the replicas of lost brokers on other brokers, as far as available."""
    return _plan_loss(view, set(lost), budget or MoveBudget(view))


def plan_growth(view: View, budget: MoveBudget | None = None) -> list[PlannedMove]:
    """Return the moves that add a replica to under-replicated partitions, as far as brokers are available."""
    wanted = {topic.topic_id: topic.replicas for topic in view.topics.values()}
    rows = view.partitions.values()
    found = [partition for partition in rows if len(partition.replicas) < wanted[partition.topic_id]]
    if not found:
        return []
    load, budget = ReplicaLoad(view), budget or MoveBudget(view)
    return [move for partition in budget.movable(found) for move in _plan_move(load, partition, None, budget)]


def plan_rebalance(view: View, budget: MoveBudget | None = None) -> RebalancePlan:
    """Return the steps after which the eligible brokers' replicas, and preferred leaders, differ by at most one.

    First, replicas that share a rack while another rack is free are moved there. Then each move goes directly from the
    fullest broker to the emptiest, so the plan is minimal. A broker may keep more where racks allow no move. Leaders
    come last, because moves also move preferred leaderships.
    """
    load, budget = ReplicaLoad(view), budget or MoveBudget(view)
    moves = (*_spread_over_racks(view, load, budget), *_even_out(view, load, budget))
    return RebalancePlan(moves, () if moves or view.moves else tuple(_even_out_leaders(load)))


def is_lost(broker: BrokerRow, *, now_ms: int, rebuild_after_ms: int) -> bool:
    """Return whether a broker was removed, or has been dead for so long that its replicas must be rebuilt.

    Wall clocks jump and differ: a time that is far in the future counts as one that is far in the past, so that a clock
    that was moved back, or a primary whose clock is behind, delays a repair by at most `rebuild_after_ms`.
    """
    is_long_dead = broker.state is BrokerState.DEAD and abs(now_ms - broker.changed_ms) >= rebuild_after_ms
    return is_long_dead or broker.state is BrokerState.REMOVED


# -- steps -------------------------------------------------------------------------------------------


def _choose(load: ReplicaLoad, kept: Sequence[NodeId], candidates: Iterable[NodeId]) -> NodeId | None:
    """Return the best broker without a replica: a new rack first, then one that is heard, then the fewest replicas."""
    racks = Counter(load.rack_of(broker) for broker in kept)
    return min(
        (broker for broker in candidates if broker not in kept),
        key=lambda broker: (
            racks[load.rack_of(broker)],
            broker in load.suspects,
            load.replicas[broker],
            broker,
        ),
        default=None,
    )


def _plan_loss(view: View, losing: Collection[NodeId], budget: MoveBudget) -> list[PlannedMove]:
    """Plan one move for each partition that has a replica on one of these brokers."""
    sources = frozenset(broker for broker in losing if budget.admits(broker))
    rows = view.partitions.values() if sources else ()
    found = [partition for partition in rows if not sources.isdisjoint(partition.replicas)]
    if not found:
        return []
    load, planned = ReplicaLoad(view), []
    for partition in budget.movable(found):
        source = next((broker for broker in partition.replicas if broker in sources and budget.admits(broker)), None)
        if source is not None:
            planned += _plan_move(load, partition, source, budget)
    return planned


def _plan_move(
    load: ReplicaLoad, partition: PartitionRow, source: NodeId | None, budget: MoveBudget
) -> list[PlannedMove]:
    """Return the move of one replica and count it; empty if no broker is available."""
    kept = [broker for broker in load.members[partition.key] if broker != source]
    target = _choose(load, kept, (broker for broker in load.eligible if broker != source and budget.admits(broker)))
    if target is None:
        return []
    load.replace(partition.key, source, target)
    budget.take(partition.key, source, target)
    return [PlannedMove(partition.topic_id, partition.partition_id, source, target)]


def _spread_over_racks(view: View, load: ReplicaLoad, budget: MoveBudget) -> Iterator[PlannedMove]:
    """Yield a move for each partition with two replicas in one rack, if a broker in an unused rack can take one."""
    racks = {load.rack_of(broker) for broker in load.eligible} if load.has_racks else set()
    crowded = [
        key
        for key, members in (load.members.items() if racks else ())
        if count_racks(load, members) < min(len(members), len(racks))
    ]
    for partition in budget.movable(view.partitions[key] for key in crowded):
        members = load.members[partition.key]
        used = Counter(map(load.rack_of, members))
        shared = [broker for broker in members if used[load.rack_of(broker)] > 1 and budget.admits(broker)]
        free = [broker for broker in load.eligible if load.rack_of(broker) not in used and budget.admits(broker)]
        target = _choose(load, members, free)
        if shared and target is not None:
            source = max(shared, key=lambda broker: (load.replicas[broker], broker))
            load.replace(partition.key, source, target)
            budget.take(partition.key, source, target)
            yield PlannedMove(*partition.key, source, target)


def _even_out(view: View, load: ReplicaLoad, budget: MoveBudget) -> Iterator[PlannedMove]:
    """Yield moves from full brokers to empty ones until no pair differs by more than one, or none can move."""
    keys = [] if load.is_even(load.replicas) else sorted(load.members)
    while not budget.is_full:
        found = _find_shift(view, load, keys, budget)
        if found is None:
            return
        key, source, target = found
        load.replace(key, source, target)
        budget.take(key, source, target)
        yield PlannedMove(*key, source, target)


def _find_shift(
    view: View, load: ReplicaLoad, keys: Sequence[PartitionKey], budget: MoveBudget
) -> tuple[PartitionKey, NodeId, NodeId] | None:
    """Return a shift from one of the fullest brokers to one of the emptiest, if they differ by two.

    If the budget or a move under way blocks this shift, return None and wait: the next best brokers would move more
    than is needed. If racks never allow this shift, try the next best brokers.
    """
    waits_for: tuple[int, int] | None = None
    for source, target in _uneven_pairs(load):
        counts = (load.replicas[source], load.replicas[target])
        if waits_for is not None and counts != waits_for:
            return None
        has_room = budget.admits(source) and budget.admits(target)
        for key in _shiftable(load, keys, source, target):
            if has_room and budget.admits_partition(view.partitions[key]):
                return key, source, target
            waits_for = counts
            if not has_room:
                break
    return None


def _uneven_pairs(load: ReplicaLoad) -> Iterator[tuple[NodeId, NodeId]]:
    """Yield the pairs of a fuller and an emptier broker that differ by two or more, the fullest and emptiest first.

    One by one: there are as many as the square of the brokers, and the first is nearly always the one that is used.
    """
    by_count: dict[int, list[NodeId]] = {}
    for broker in load.eligible:
        by_count.setdefault(load.replicas[broker], []).append(broker)
    for high in sorted(by_count, reverse=True):
        for low in sorted(by_count):
            if high - low < 2:
                break
            yield from product(by_count[high], by_count[low])


def _shiftable(
    load: ReplicaLoad, keys: Sequence[PartitionKey], source: NodeId, target: NodeId
) -> Iterator[PartitionKey]:
    """Yield the partitions that can shift between two brokers without using fewer racks, in order."""
    for key in keys:
        members = load.members[key]
        if source in members and target not in members:
            after = [target if broker == source else broker for broker in members]
            if not load.has_racks or count_racks(load, after) >= count_racks(load, members):
                yield key


def _even_out_leaders(load: ReplicaLoad) -> Iterator[PlannedLeader]:
    """Yield new preferred leaders until no change makes the counts more even.

    It terminates: each step reduces the difference between the counts.
    """
    eligible = frozenset(load.eligible)
    named: dict[PartitionKey, NodeId] = {}
    is_changed = not load.is_even(load.leaders)
    keys = sorted(load.members) if is_changed else []
    while is_changed:
        is_changed = False
        for key in keys:
            members = load.members[key]
            target = min(
                (broker for broker in members if broker in eligible),
                key=lambda broker: (load.leaders[broker], broker),
                default=members[0],
            )
            if load.leaders[members[0]] - load.leaders[target] > 1:
                load.prefer(key, target)
                named[key] = target
                is_changed = True
    for (topic_id, partition_id), leader in sorted(named.items()):
        yield PlannedLeader(topic_id, partition_id, leader)

"""Which member of a group should own which partition: balanced, sticky, close. Pure and deterministic.

Three rules, in this order:

1. *Balance.* No partition can be moved to a member that subscribes to its topic and has at least two fewer. With equal
   subscriptions, the numbers of partitions differ by at most one.
2. *Stickiness.* A partition stays with its owner unless balance needs it elsewhere: a member that joins gets its share
   and nothing else moves, and of a member that leaves only its own partitions move.
3. *Closeness.* A partition that moves anyway goes to a member in the rack of its leader, or of another of its replicas,
   as far as balance allows.

Members with the same subscription and rack are alike: they share one heap by number of partitions, so that the cost
grows with partitions and members, not with their product. `Assignor.steps` counts the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

from quiver.model import PartitionId, TopicId

MemberName = str
PartitionKey = tuple[TopicId, PartitionId]


class AssignablePartition(msgspec.Struct, frozen=True):
    """A partition, the rack of its leader, and those of all its replicas; racks without a name are left out."""

    key: PartitionKey
    leader_rack: str = ""
    racks: tuple[str, ...] = ()


class Subscription(msgspec.Struct, frozen=True):
    """What a member reads, and where it runs."""

    topics: frozenset[TopicId]
    rack: str = ""


class _Kind(NamedTuple):
    """Members that are alike: any of them may have what another one has, at the same distance."""

    topics: frozenset[TopicId]
    rack: str


def assign(
    members: Mapping[MemberName, Subscription],
    partitions: Iterable[AssignablePartition],
    owners: Mapping[PartitionKey, MemberName],
) -> dict[PartitionKey, MemberName]:
    """Return the owner that every partition should have; those that no member subscribes to are left out."""
    return Assignor(members, partitions, owners).run()


class Assignor:
    """One computation of an assignment."""

    def __init__(
        self,
        members: Mapping[MemberName, Subscription],
        partitions: Iterable[AssignablePartition],
        owners: Mapping[PartitionKey, MemberName],
    ) -> None:
        self.steps = 0
        """Candidates looked at: the cost of the computation."""
        self._partitions = {one.key: one for one in sorted(partitions, key=lambda one: one.key)}
        self._owners = owners
        kinds: dict[_Kind, _Kind] = {}  # one object per kind: equal ones are compared by identity
        for subscription in members.values():
            kind = _Kind(subscription.topics, subscription.rack)
            kinds.setdefault(kind, kind)
        self._kind = {name: kinds[_Kind(members[name].topics, members[name].rack)] for name in sorted(members)}
        self._target: dict[PartitionKey, MemberName] = {}
        self._owned: dict[MemberName, set[PartitionKey]] = {name: set() for name in self._kind}
        self._count = dict.fromkeys(self._kind, 0)
        self._topic_count: defaultdict[tuple[MemberName, TopicId], int] = defaultdict(int)
        self._kinds_of: defaultdict[TopicId, list[_Kind]] = defaultdict(list)
        self._poorest: dict[_Kind, list[tuple[int, MemberName]]] = defaultdict(list)
        """Per kind a heap of its members by number of partitions; entries with another number are outdated."""
        for key in self._partitions:
            owner = owners.get(key)
            if owner in self._kind and key[0] in self._kind[owner].topics:
                self._put(key, owner)
        for name, kind in self._kind.items():
            self._poorest[kind].append((self._count[name], name))
        for kind, heap in self._poorest.items():
            heapify(heap)
            for topic_id in kind.topics:
                self._kinds_of[topic_id].append(kind)

    def run(self) -> dict[PartitionKey, MemberName]:
        """Return the target."""
        self._place_free()
        while self._balance():
            pass
        return self._target

    # -- partitions without an owner -------------------------------------------------------------

    def _place_free(self) -> None:
        """Give every free partition to a member with few partitions; near ones first, within the members' shares."""
        free = [key for key in self._partitions if key not in self._target and self._kinds_of[key[0]]]
        room = self._share_out(free)
        for distance in (0, 1):
            free = [key for key in free if not self._place_near(key, distance, room)]
        for key in free:
            self._put(key, self._poorest_of(self._kinds_of[key[0]], self._partitions[key]))
        # Counts have changed without the heaps: near placement follows the shares, not the heaps.
        for heap in self._poorest.values():
            heap[:] = [(self._count[name], name) for _, name in heap]
            heapify(heap)

    def _share_out(self, free: list[PartitionKey]) -> dict[_Kind, list[MemberName]]:
        """Return, per kind, the members that would get free partitions if racks did not matter, once per partition."""
        count, poorest = dict(self._count), {kind: list(heap) for kind, heap in self._poorest.items()}
        room: dict[_Kind, list[MemberName]] = defaultdict(list)
        if not any(self._partitions[key].leader_rack or self._partitions[key].racks for key in free):
            return room
        for key in free:
            kinds = self._kinds_of[key[0]]
            self.steps += len(kinds)
            kind = min(kinds, key=lambda one: poorest[one][0])
            _, name = heappop(poorest[kind])
            count[name] += 1
            heappush(poorest[kind], (count[name], name))
            room[kind].append(name)
        for names in room.values():
            names.reverse()
        return room

    def _place_near(self, key: PartitionKey, distance: int, room: Mapping[_Kind, list[MemberName]]) -> bool:
        partition = self._partitions[key]
        for kind in self._kinds_of[key[0]]:
            self.steps += 1
            if _distance(partition, kind.rack) == distance and room.get(kind):
                self._put(key, room[kind].pop())
                return True
        return False

    def _poorest_of(self, kinds: list[_Kind], partition: AssignablePartition) -> MemberName:
        """Return the member with the fewest partitions; of several, one that is near."""
        best: tuple[int, int, MemberName] | None = None
        for kind in kinds:
            count, name = self._top(kind)
            found = (count, _distance(partition, kind.rack), name)
            best = found if best is None else min(best, found)
        assert best is not None, "only called for topics that somebody subscribes to"
        return best[2]

    def _top(self, kind: _Kind) -> tuple[int, MemberName]:
        """Return the member of a kind with the fewest partitions; bring outdated entries up to date on the way."""
        heap = self._poorest[kind]
        while True:
            self.steps += 1
            count, name = heap[0]
            if count == self._count[name]:
                return count, name
            heappop(heap)
            heappush(heap, (self._count[name], name))

    # -- balance ---------------------------------------------------------------------------------

    def _balance(self) -> bool:
        """Let every member, the poorest first, take what balance gives it; return whether anything moved.

        What a member takes may allow another one, which was done before, to take more: the caller repeats it.
        """
        donors = self._donors()
        offers: dict[tuple[MemberName, _Kind], list[PartitionKey]] = {}
        taken = 0
        heap = sorted((count, name) for name, count in self._count.items())
        while heap:
            self.steps += 1
            count, name = heappop(heap)
            if count != self._count[name]:  # it has given one away since
                heappush(heap, (self._count[name], name))
                continue
            if self._take(name, donors, offers):
                taken += 1
                heappush(heap, (self._count[name], name))
        return bool(taken)

    def _donors(self) -> dict[TopicId, list[tuple[int, MemberName]]]:
        """Return, per topic, a heap of its owners, those with the most partitions first."""
        owners: defaultdict[TopicId, set[MemberName]] = defaultdict(set)
        for (topic_id, _), name in self._target.items():
            owners[topic_id].add(name)
        donors = {
            topic_id: [(-self._count[name], name) for name in sorted(names)] for topic_id, names in owners.items()
        }
        for heap in donors.values():
            heapify(heap)
        return donors

    def _take(
        self,
        name: MemberName,
        donors: dict[TopicId, list[tuple[int, MemberName]]],
        offers: dict[tuple[MemberName, _Kind], list[PartitionKey]],
    ) -> bool:
        """Move a partition to a member from the richest owner that it can take one from; return whether it did."""
        kind = self._kind[name]
        richest: tuple[int, MemberName] | None = None
        for topic_id in kind.topics:
            found = self._richest(donors.get(topic_id, []), topic_id)
            if found is not None and (richest is None or found < richest):
                richest = found
        if richest is None or -richest[0] < self._count[name] + 2:
            return False
        key = self._offer(richest[1], kind, offers)
        self._put(key, name)
        heappush(donors[key[0]], (-self._count[name], name))
        return True

    def _richest(self, heap: list[tuple[int, MemberName]], topic_id: TopicId) -> tuple[int, MemberName] | None:
        """Return the owner of a topic's partitions with the most partitions in all; bring the heap up to date."""
        while heap:
            self.steps += 1
            count, name = heap[0]
            if -count == self._count[name] and self._topic_count[name, topic_id]:
                return heap[0]
            heappop(heap)
            if self._topic_count[name, topic_id]:
                heappush(heap, (-self._count[name], name))
        return None

    def _offer(
        self, donor: MemberName, kind: _Kind, offers: dict[tuple[MemberName, _Kind], list[PartitionKey]]
    ) -> PartitionKey:
        """Return the partition that a donor gives to a member of a kind.

        It is one that the donor does not have yet, if there is one; else one far from the donor and near to the other.
        """
        found = offers.get((donor, kind))
        while True:
            if found is None:
                found = offers[donor, kind] = self._list_offers(donor, kind)
            while found:
                self.steps += 1
                key = found.pop()
                if self._target[key] == donor:
                    return key
            found = None  # it received partitions after the list was made

    def _list_offers(self, donor: MemberName, kind: _Kind) -> list[PartitionKey]:
        own_rack = self._kind[donor].rack

        def rank(key: PartitionKey) -> tuple[bool, int, PartitionKey]:
            partition, is_new = self._partitions[key], self._owners.get(key) != donor
            return (is_new, _distance(partition, own_rack) - _distance(partition, kind.rack), key)

        offered = [key for key in self._owned[donor] if key[0] in kind.topics]
        self.steps += len(offered)
        return sorted(offered, key=rank)

    # -- bookkeeping -----------------------------------------------------------------------------

    def _put(self, key: PartitionKey, name: MemberName) -> None:
        before = self._target.get(key)
        if before is not None:
            self._count[before] -= 1
            self._owned[before].remove(key)
            self._topic_count[before, key[0]] -= 1
        self._target[key] = name
        self._count[name] += 1
        self._owned[name].add(key)
        self._topic_count[name, key[0]] += 1


def _distance(partition: AssignablePartition, rack: str) -> int:
    """Return 0 for the rack of a partition's leader, 1 for that of another replica, 2 for any other."""
    if not rack:
        return 2
    if rack == partition.leader_rack:
        return 0
    return 1 if rack in partition.racks else 2

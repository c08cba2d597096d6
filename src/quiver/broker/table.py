"""The replicas on this node, by partition and by group, and how far each has come.

The table is changed by the keeper alone; everybody else looks things up. It never opens or closes anything. What a
client asks for is looked up here: the answer is the replica that leads, or the error that says where to go instead.

    opening → open → closing          as the metadata wants it
    opening → unusable                its files are damaged, or were lost: it stays so until it is moved away or fixed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from quiver.clock import Clock
from quiver.errors import NotFoundError, NotLeaderError, UnavailableError
from quiver.metadata import PartitionRow, TopicState, View
from quiver.model import GroupId, NodeId, PartitionId, TopicId
from quiver.partition import Replica
from quiver.replication import find_in_sync
from quiver.wire.admin_messages import ReplicaInfo

Key = tuple[TopicId, PartitionId]
"""How a partition is found."""


class HeldState(StrEnum):
    """How far a replica on this node has come."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    UNUSABLE = "unusable"


class Held:
    """One replica that this node holds, or is about to hold or to let go of; `replica` is set while it is open."""

    __slots__ = ("group", "is_given_up", "key", "problem", "replica", "state")

    def __init__(self, key: Key, group: GroupId) -> None:
        self.key = key
        self.group = group
        self.state = HeldState.OPENING
        self.replica: Replica | None = None
        self.problem = ""
        """Why it is unusable, for people."""
        self.is_given_up = False
        """Whether it will not be tried again to open it."""

    @property
    def is_leader(self) -> bool:
        """Tell whether the replica is open and leads, ready or not."""
        return self.replica is not None and self.replica.member.is_leader

    def open(self, replica: Replica) -> None:
        """Take the open replica."""
        self.replica, self.state = replica, HeldState.OPEN

    def close(self) -> Replica | None:
        """Give the replica back to be closed; from now on nobody finds it here."""
        replica, self.replica = self.replica, None
        self.state = HeldState.CLOSING
        return replica

    def give_up(self, problem: str) -> None:
        """Take note that the replica can never be opened."""
        self.note_problem(problem)
        self.is_given_up = True

    def note_problem(self, problem: str) -> None:
        """Take note that the replica could not be opened this time."""
        self.state, self.problem = HeldState.UNUSABLE, problem


class PartitionTable:
    """The replicas on one node."""

    def __init__(self, node: NodeId, view: Callable[[], View], *, clock: Clock, silence_ms_max: int) -> None:
        self._node = node
        self._view = view
        self._clock = clock
        self._silence_ms_max = silence_ms_max
        self._held: dict[Key, Held] = {}
        self._by_group: dict[GroupId, Held] = {}

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Held | None:
        """Return the replica of a partition, in whatever state."""
        return self._held.get(key)

    def get_group(self, group: GroupId) -> Held | None:
        """Return the replica that belongs to a group, in whatever state."""
        return self._by_group.get(group)

    def open_replicas(self) -> list[tuple[Held, Replica]]:
        """Return those that are open, sorted by partition."""
        return [(held, held.replica) for _, held in sorted(self._held.items()) if held.replica is not None]

    def led(self) -> list[tuple[Held, Replica]]:
        """Return those that lead, sorted by partition."""
        return [(held, replica) for held, replica in self.open_replicas() if held.is_leader]

    def in_sync(self, replica: Replica) -> tuple[NodeId, ...]:
        """Return the voters that keep up with a replica that leads, itself included; none if it does not.

        Stricter than what is shown: leadership is handed to one of them, who must be there.
        """
        status = replica.member.raft_status()
        return find_in_sync(status, now_ms=self._clock.monotonic_ms(), silence_ms_max=self._silence_ms_max)

    def describe(self, held: Held) -> ReplicaInfo:
        """Return what people and other nodes see of a replica."""
        topic_id, partition_id = held.key
        if held.replica is None:
            return ReplicaInfo(
                topic_id=topic_id, partition_id=partition_id, group=held.group, role=held.state, epoch=0, is_ready=False
            )
        status = held.replica.status(now_ms=self._clock.monotonic_ms())
        return ReplicaInfo(
            topic_id=topic_id,
            partition_id=partition_id,
            group=held.group,
            role=status.role,
            epoch=status.epoch,
            leader=status.leader,
            first_offset=status.first_offset,
            end_offset=status.end_offset,
            bytes=status.size_bytes,
            in_sync=status.in_sync,
            voters=status.voters,
            learners=status.learners,
        )

    def add(self, key: Key, group: GroupId) -> Held:
        """Begin to hold a replica."""
        held = Held(key, group)
        self._held[key] = self._by_group[group] = held
        return held

    def remove(self, held: Held) -> None:
        """Hold a replica no longer."""
        del self._held[held.key]
        del self._by_group[held.group]

    def find_leader(self, topic_id: TopicId, partition_id: PartitionId) -> Replica:
        """Return the replica that a client's request about a partition is for.

        Raises:
            NotFoundError: there is no such topic or partition, as far as this node knows.
            NotLeaderError: another node leads, or none that is known here.
            UnavailableError: the replica is being opened, or its files cannot be used.
        """
        held = self._held.get((topic_id, partition_id))
        if held is not None and held.replica is not None:
            if held.is_leader:
                return held.replica
            raise _not_leader(held.replica.member.leader)
        partition = find_partition(self._view(), topic_id, partition_id)
        if held is not None and held.state is HeldState.OPENING:
            raise UnavailableError("not done: this node is opening its replica", code="opening")
        raise _not_leader(partition.leader if partition.leader != self._node else None)

    def find_replica(self, topic_id: TopicId, partition_id: PartitionId) -> Replica:
        """Return this node's own replica of a partition, whether it leads or not.

        Raises:
            NotFoundError: there is no such topic or partition, or this node has no replica of it (`no_replica`).
            UnavailableError: the replica is being opened, or its files cannot be used.
        """
        held = self._held.get((topic_id, partition_id))
        if held is not None and held.replica is not None:
            return held.replica
        find_partition(self._view(), topic_id, partition_id)
        if held is None:
            message = f"node {self._node} has no replica of partition {partition_id} of topic {topic_id}"
            raise NotFoundError(f"not done: {message}", code="no_replica")
        raise UnavailableError(f"not done: the replica is {held.state}: {held.problem}", code=f"replica_{held.state}")


def find_partition(view: View, topic_id: TopicId, partition_id: PartitionId) -> PartitionRow:
    """Return a partition of a topic in use.

    Raises:
        NotFoundError: there is none, as far as this node knows.
    """
    topic = view.topics.get(topic_id)
    if topic is None or topic.state is not TopicState.ACTIVE:
        raise NotFoundError(f"not done: there is no topic with id {topic_id}", code="unknown_topic")
    partition = view.partitions.get((topic_id, partition_id))
    if partition is None:
        raise NotFoundError(f"not done: topic {topic.name!r} has no partition {partition_id}", code="unknown_partition")
    return partition


def _not_leader(leader: NodeId | None) -> NotLeaderError:
    hint = "no leader is known yet" if leader is None else f"node {leader} leads"
    return NotLeaderError(f"not done: this node does not lead the partition; {hint}", leader=leader)

"""The replicas on this node, by partition and by group, with their state.

Only the `ReplicaManager` changes the table; everything else reads it. It never opens or closes a replica. Client
requests are resolved here: to the leading replica, or to the error that names the leader.

    opening → open → closing          as the metadata requires
    opening → unusable                its files are damaged or lost, until the replica is moved away or repaired
    open → stopped → open             an error escaped its code: it is reopened from its files after a pause

An open replica that met an entry of a newer program is shown as `needs_upgrade`: it follows and votes, but never leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum

from quiver.clock import Clock
from quiver.errors import NotFoundError, NotLeaderError, UnavailableError
from quiver.metadata import PartitionRow, TopicState, View
from quiver.model import GroupId, NodeId, PartitionId, TopicId
from quiver.partition import Replica
from quiver.replication import Successor, find_successors
from quiver.tasks import timeout
from quiver.wire.admin_messages import ReplicaInfo

PartitionKey = tuple[TopicId, PartitionId]
"""A topic and a partition of it."""


class ReplicaState(StrEnum):
    """State of a replica on this node."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    UNUSABLE = "unusable"
    STOPPED = "stopped"
    NEEDS_UPGRADE = "needs_upgrade"


class HostedReplica:
    """One replica on this node, in any state; `replica` is set while it is open."""

    __slots__ = (
        "_problem",
        "_state",
        "group",
        "halted",
        "is_paused",
        "is_retried",
        "key",
        "opened_ms",
        "replica",
        "stops",
    )

    def __init__(self, key: PartitionKey, group: GroupId) -> None:
        self.key = key
        self.group = group
        self.replica: Replica | None = None
        self.halted: Replica | None = None
        """The stopped replica, whose files must be closed before they are opened again."""
        self.stops = 0
        """How often it was stopped, since it last ran for long."""
        self.opened_ms = 0
        self.is_paused = False
        """Whether it was stopped and is not opened again yet, whatever changes meanwhile."""
        self._state = ReplicaState.OPENING
        self._problem = ""
        self.is_retried = True
        """Whether opening it is retried after a failure."""

    @property
    def state(self) -> ReplicaState:
        """Return the state of the replica."""
        if self.replica is not None and self.replica.member.needs_upgrade:
            return ReplicaState.NEEDS_UPGRADE
        return self._state

    @property
    def problem(self) -> str:
        """Return why it is unusable, stopped or in need of an upgrade, for operators; empty if it is not."""
        return self._problem if self.replica is None else self.replica.member.needs_upgrade

    @property
    def is_leader(self) -> bool:
        """Return whether the replica is open and leads, ready or not."""
        return self.replica is not None and self.replica.member.is_leader

    def open(self, replica: Replica) -> None:
        """Set the open replica."""
        self.replica, self._state, self._problem = replica, ReplicaState.OPEN, ""

    def close(self) -> Replica | None:
        """Return the replica for closing; lookups no longer find it."""
        replica, self.replica = self.replica or self.halted, None
        self.halted, self._state = None, ReplicaState.CLOSING
        return replica

    def stop(self, problem: str) -> None:
        """Take the open replica out of service: an error escaped its code."""
        self.halted, self.replica = self.replica, None
        self.stops += 1
        self.is_paused = True
        self._state, self._problem = ReplicaState.STOPPED, problem

    def fail_permanently(self, problem: str) -> None:
        """Mark the replica as unusable; opening it is not retried."""
        self.fail(problem)
        self.is_retried = False

    def fail(self, problem: str) -> None:
        """Mark the replica as unusable until opening it succeeds."""
        self._state, self._problem = ReplicaState.UNUSABLE, problem


class ReplicaTable:
    """The replicas on one node."""

    def __init__(self, node: NodeId, view: Callable[[], View], *, clock: Clock, silence_ms_max: int) -> None:
        self._node = node
        self._view = view
        self._clock = clock
        self._silence_ms_max = silence_ms_max
        self._replicas: dict[PartitionKey, HostedReplica] = {}
        self._by_group: dict[GroupId, HostedReplica] = {}
        self._led: dict[PartitionKey, HostedReplica] = {}
        """Those that have announced that they lead; some of them may have lost leadership since."""
        self._elected: dict[PartitionKey, set[asyncio.Future[None]]] = {}
        """Done when a leader is known: of the requests that wait for a new partition's first one."""

    def __iter__(self) -> Iterator[HostedReplica]:
        return iter(list(self._replicas.values()))

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, key: PartitionKey) -> HostedReplica | None:
        """Return the replica of a partition, in any state."""
        return self._replicas.get(key)

    def get_group(self, group: GroupId) -> HostedReplica | None:
        """Return the replica of a group, in any state."""
        return self._by_group.get(group)

    def open_replicas(self) -> list[tuple[HostedReplica, Replica]]:
        """Return the open replicas, sorted by partition."""
        return [(hosted, hosted.replica) for _, hosted in sorted(self._replicas.items()) if hosted.replica is not None]

    def led(self) -> list[tuple[HostedReplica, Replica]]:
        """Return the leading replicas, sorted by partition."""
        led = ((hosted, hosted.replica) for _, hosted in sorted(self._led.items()) if hosted.is_leader)
        return [(hosted, replica) for hosted, replica in led if replica is not None]

    def note_role(self, hosted: HostedReplica, *, is_leader: bool) -> None:
        """Record that a replica leads, or follows."""
        if is_leader:
            self._led[hosted.key] = hosted
        elif self._led.get(hosted.key) is hosted:
            del self._led[hosted.key]

    def successors(self, replica: Replica, full_nodes: Collection[NodeId]) -> list[Successor]:
        """Return the voters that a leading replica can transfer leadership to, those with room first.

        There are none if it does not lead. The silence limit is stricter than in `ReplicaStatus`.
        """
        return find_successors(
            replica.member.raft_status(),
            now_ms=self._clock.monotonic_ms(),
            silence_ms_max=self._silence_ms_max,
            full_nodes=full_nodes,
        )

    def describe(self, hosted: HostedReplica) -> ReplicaInfo:
        """Return a replica as `DescribeNode` shows it."""
        topic_id, partition_id = hosted.key
        if hosted.replica is None:
            return ReplicaInfo(
                topic_id=topic_id,
                partition_id=partition_id,
                group=hosted.group,
                role=hosted.state,
                epoch=0,
                is_ready=False,
                problem=hosted.problem,
            )
        status = hosted.replica.status(now_ms=self._clock.monotonic_ms())
        return ReplicaInfo(
            topic_id=topic_id,
            partition_id=partition_id,
            group=hosted.group,
            role=hosted.state if hosted.problem else status.role,
            is_ready=not hosted.problem,
            problem=hosted.problem,
            epoch=status.epoch,
            leader=status.leader,
            first_offset=status.first_offset,
            end_offset=status.end_offset,
            bytes=status.size_bytes,
            in_sync=status.in_sync,
            voters=status.voters,
            learners=status.learners,
        )

    def add(self, key: PartitionKey, group: GroupId) -> HostedReplica:
        """Add a replica, in state opening."""
        hosted = HostedReplica(key, group)
        self._replicas[key] = self._by_group[group] = hosted
        return hosted

    def remove(self, hosted: HostedReplica) -> None:
        """Remove a replica; of a partition that began again as another group, the later one stays."""
        self.note_role(hosted, is_leader=False)
        if self._replicas.get(hosted.key) is hosted:
            del self._replicas[hosted.key]
        del self._by_group[hosted.group]

    def find_leader(self, topic_id: TopicId, partition_id: PartitionId) -> Replica:
        """Return this node's leading replica of a partition.

        Raises:
            NotFoundError: the topic or partition is unknown to this node.
            NotLeaderError: another node leads, or no leader is known.
            UnavailableError: the replica is being opened, or has a problem and no other one is known to lead.
        """
        hosted = self._replicas.get((topic_id, partition_id))
        if hosted is not None and hosted.replica is not None:
            if hosted.is_leader:
                return hosted.replica
            if hosted.problem and hosted.replica.member.leader is None:
                raise self._troubled(hosted)
            raise _not_leader(topic_id, partition_id, hosted.replica.member.leader)
        partition = find_partition(self._view(), topic_id, partition_id)
        if hosted is not None and hosted.problem and partition.leader in (None, self._node):
            raise self._troubled(hosted)
        if hosted is not None and hosted.state is ReplicaState.OPENING:
            message = (
                f"not done: this node is opening its replica of partition {partition_id} of topic {topic_id}; retry"
            )
            raise UnavailableError(message, code="opening")
        raise _not_leader(topic_id, partition_id, partition.leader if partition.leader != self._node else None)

    async def wait_first_leader(self, key: PartitionKey, error: UnavailableError, *, wait_ms: float) -> Replica:
        """Return this node's leading replica once a new partition has its first leader, instead of a refusal.

        Of many new partitions each would be refused several times, and each refusal costs as much as serving it.

        Raises:
            UnavailableError: as `find_leader` does now or would later; immediately if there has been a leader.
        """
        partition = self._view().partitions.get(key)
        is_new = partition is not None and not partition.epoch and partition.is_on(self._node)
        is_led = isinstance(error, NotLeaderError) and error.leader is not None
        hosted = self._replicas.get(key)
        if not is_new or is_led or (hosted is not None and hosted.problem):
            raise error
        elected = asyncio.get_running_loop().create_future()
        self._elected.setdefault(key, set()).add(elected)
        try:
            async with timeout(wait_ms / 1000):
                await elected
        except TimeoutError:
            pass  # then `find_leader` says what is missing
        finally:
            if key in self._elected:
                self._elected[key].discard(elected)
                if not self._elected[key]:
                    del self._elected[key]
        return self.find_leader(*key)

    def note_leader(self, key: PartitionKey) -> None:
        """Wake the requests that wait for a leader: one is known."""
        for elected in self._elected.pop(key, ()):
            if not elected.done():
                elected.set_result(None)

    def find_replica(self, topic_id: TopicId, partition_id: PartitionId) -> Replica:
        """Return this node's own replica of a partition, whether it leads or not.

        Raises:
            NotFoundError: there is no such topic or partition, or this node has no replica of it (`no_replica`).
            UnavailableError: the replica is being opened, or its files are unusable.
        """
        hosted = self._replicas.get((topic_id, partition_id))
        if hosted is not None and hosted.replica is not None:
            return hosted.replica
        find_partition(self._view(), topic_id, partition_id)
        if hosted is None:
            message = f"node {self._node} has no replica of partition {partition_id} of topic {topic_id}"
            raise NotFoundError(f"not done: {message}", code="no_replica")
        raise self._troubled(hosted)

    def _troubled(self, hosted: HostedReplica) -> UnavailableError:
        """Return the error for a request to a replica that does not serve."""
        state, (topic_id, partition_id) = hosted.state, hosted.key
        code = state.value if state is ReplicaState.NEEDS_UPGRADE else f"replica_{state}"
        message = (
            f"not done: the replica of partition {partition_id} of topic {topic_id} on node {self._node} is {state}"
        )
        return UnavailableError(f"{message}: {hosted.problem}", code=code)


def find_partition(view: View, topic_id: TopicId, partition_id: PartitionId) -> PartitionRow:
    """Return a partition of an active topic.

    Raises:
        NotFoundError: the topic or partition is unknown to this node.
    """
    topic = view.topics.get(topic_id)
    if topic is None or topic.state is not TopicState.ACTIVE:
        raise NotFoundError(f"not done: unknown topic with id {topic_id}", code="unknown_topic")
    partition = view.partitions.get((topic_id, partition_id))
    if partition is None:
        raise NotFoundError(f"not done: topic {topic.name!r} has no partition {partition_id}", code="unknown_partition")
    return partition


def _not_leader(topic_id: TopicId, partition_id: PartitionId, leader: NodeId | None) -> NotLeaderError:
    hint = "no leader is known yet; retry" if leader is None else f"node {leader} leads it"
    message = f"not done: this node does not lead partition {partition_id} of topic {topic_id}"
    return NotLeaderError(f"{message}; {hint}", leader=leader)

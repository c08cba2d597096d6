"""Caches a cluster's metadata: nodes and their addresses, topics, and the presumed leader of each partition.

Pure data: it sends no requests (`router` does) and never waits. An entry may be stale, which is safe because a node
refuses requests that it must not serve. For each partition the nodes that failed or refused since the last success are
*doubted*: they are tried last, so that wrong leader hints cannot make a client loop between the same nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quiver.clock import Clock
from quiver.errors import NotFoundError
from quiver.model import Index, NodeId, PartitionId, TopicId
from quiver.wire.messages import MetadataFound, NodeInfo, PartitionInfo, TopicInfo

Key = tuple[TopicId, PartitionId]


@dataclass(slots=True)
class Route:
    """The presumed leader of a partition and the nodes that are doubted."""

    leader: NodeId | None = None
    epoch: int = -1
    """The epoch of the last leader that was adopted from metadata."""
    doubted: set[NodeId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _KnownTopic:
    info: TopicInfo
    updated_ms: int


class MetadataCache:
    """The last known nodes, topics and leaders."""

    def __init__(self, clock: Clock, seeds: tuple[str, ...] = ()) -> None:
        self.seeds = seeds
        """Wire addresses to start with; they stay in use even if no node advertises them."""
        self.cluster_id = ""
        self.known_index = Index(0)
        """The highest metadata index that the client has seen; a node with an older state waits before it answers."""
        self.nodes: dict[NodeId, NodeInfo] = {}
        self._clock = clock
        self._topics: dict[str, _KnownTopic] = {}
        self._routes: dict[Key, Route] = {}
        self._preferred = ""

    # -- any node --------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Return every known address once: the preferred one, live nodes, seeds, then dead nodes."""
        known = (node.wire_address for node in self.nodes.values() if node.state != "dead")
        doubtful = (node.wire_address for node in self.nodes.values() if node.state == "dead")
        return [address for address in dict.fromkeys((self._preferred, *known, *self.seeds, *doubtful)) if address]

    def prefer(self, address: str) -> None:
        """Ask this address first from now on; the empty string clears the preference."""
        self._preferred = address

    # -- topics ----------------------------------------------------------------------------------

    def update(self, found: MetadataFound, *, topic: str | None) -> None:
        """Store a node's answer; `topic` is the one topic that was requested, None for all."""
        now_ms = self._clock.monotonic_ms()
        self.cluster_id = found.cluster_id or self.cluster_id
        self.nodes = {node.node: node for node in found.nodes} or self.nodes
        self.record_index(found.index)
        if topic is None:
            self._topics.clear()
        else:
            self._topics.pop(topic, None)
        for info in found.topics:
            self._topics[info.topic] = _KnownTopic(info, now_ms)
            for partition in info.partitions:
                self._update_leader(info.topic_id, partition)

    def record_index(self, index: Index) -> None:
        """Record a metadata index that the client has seen."""
        self.known_index = max(self.known_index, index)

    def topic(self, name: str, *, age_ms_max: int) -> TopicInfo | None:
        """Return a topic that was fetched at most `age_ms_max` ago, else None."""
        known = self._topics.get(name)
        if known is None or self._clock.monotonic_ms() - known.updated_ms > age_ms_max:
            return None
        return known.info

    def forget_topic(self, name: str) -> None:
        """Drop a topic, so that it is fetched again when it is next needed."""
        self._topics.pop(name, None)

    # -- leaders ---------------------------------------------------------------------------------

    def choose(self, topic: TopicInfo, partition_id: PartitionId) -> NodeId | None:
        """Return the node to ask as a partition's leader; None if all candidates are doubted: back off.

        After a None the doubts are cleared and the search starts again.
        """
        info = find_partition(topic, partition_id)
        route = self._route(topic.topic_id, partition_id)
        candidates = [route.leader, *info.replicas, *info.learners]
        for node in candidates:
            if node is not None and node in self.nodes and node not in route.doubted:
                return node
        route.doubted.clear()
        return None

    def confirm(self, topic_id: TopicId, partition_id: PartitionId, node: NodeId) -> None:
        """Record that a node answered as leader."""
        route = self._route(topic_id, partition_id)
        route.leader = node
        route.doubted.clear()

    def doubt(self, topic_id: TopicId, partition_id: PartitionId, node: NodeId, *, hint: NodeId | None = None) -> None:
        """Record that a node failed or refused; `hint` is the leader that it named."""
        route = self._route(topic_id, partition_id)
        route.doubted.add(node)
        route.leader = hint if hint is not None else (None if route.leader == node else route.leader)

    def count_partitions(self) -> int:
        """Return the number of partitions whose leader was looked up or used."""
        return len(self._routes)

    def _update_leader(self, topic_id: TopicId, partition: PartitionInfo) -> None:
        """Adopt the leader that metadata names, unless that epoch was adopted before."""
        route = self._route(topic_id, partition.partition_id)
        if partition.leader is not None and partition.epoch > route.epoch:
            route.leader, route.epoch = partition.leader, partition.epoch
            route.doubted.discard(partition.leader)

    def _route(self, topic_id: TopicId, partition_id: PartitionId) -> Route:
        return self._routes.setdefault((topic_id, partition_id), Route())


def find_partition(topic: TopicInfo, partition_id: PartitionId) -> PartitionInfo:
    """Return a partition of a topic; raise `NotFoundError` if the topic does not have it."""
    if not 0 <= partition_id < len(topic.partitions):
        message = f"topic {topic.topic!r} has no partition {partition_id}, it has {len(topic.partitions)}"
        raise NotFoundError(message, code="unknown_partition")
    return topic.partitions[partition_id]

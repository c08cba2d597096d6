"""What a client knows about its cluster: nodes and their addresses, topics, and who seems to lead each partition.

Pure data: it asks nobody (`router` does) and never waits. Knowledge here is a hint and may be stale; what makes it
safe is that a wrong node refuses. For each partition the nodes that have failed or refused since the last success are
*doubted*: they are tried last, so that no answer, however wrong, is followed in a circle.
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
    """Where a partition's leader is looked for."""

    leader: NodeId | None = None
    epoch: int = -1
    """Of the metadata's word on the leader that was last believed."""
    doubted: set[NodeId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _KnownTopic:
    info: TopicInfo
    heard_ms: int


class MetadataCache:
    """Nodes, topics and leaders as they were last heard of."""

    def __init__(self, clock: Clock, seeds: tuple[str, ...] = ()) -> None:
        self.seeds = seeds
        """Wire addresses to begin with; they stay in use even if no node names them as its own."""
        self.cluster_id = ""
        self.known_index = Index(0)
        """How far in the metadata the client has seen: nodes that know less wait before they answer it."""
        self.nodes: dict[NodeId, NodeInfo] = {}
        self._clock = clock
        self._topics: dict[str, _KnownTopic] = {}
        self._routes: dict[Key, Route] = {}
        self._preferred = ""

    # -- any node --------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Return every known address once: the one that answered last, then the nodes', then the seeds."""
        known = (node.wire_address for node in self.nodes.values() if node.state != "dead")
        doubtful = (node.wire_address for node in self.nodes.values() if node.state == "dead")
        return [address for address in dict.fromkeys((self._preferred, *known, *self.seeds, *doubtful)) if address]

    def prefer(self, address: str) -> None:
        """Ask this address first from now on; the empty one: nobody in particular."""
        self._preferred = address

    # -- topics ----------------------------------------------------------------------------------

    def take(self, found: MetadataFound, *, asked: str | None) -> None:
        """Take over what a node answered; `asked` is the one topic that it was asked about, None for all."""
        now_ms = self._clock.monotonic_ms()
        self.cluster_id = found.cluster_id or self.cluster_id
        self.nodes = {node.node: node for node in found.nodes} or self.nodes
        self.see(found.index)
        if asked is None:
            self._topics.clear()
        else:
            self._topics.pop(asked, None)
        for info in found.topics:
            self._topics[info.topic] = _KnownTopic(info, now_ms)
            for partition in info.partitions:
                self._hear(info.topic_id, partition)

    def see(self, index: Index) -> None:
        """Take note of an index of the metadata that the client has seen."""
        self.known_index = max(self.known_index, index)

    def topic(self, name: str, *, age_ms_max: int) -> TopicInfo | None:
        """Return a topic that was heard of no longer ago than so."""
        known = self._topics.get(name)
        if known is None or self._clock.monotonic_ms() - known.heard_ms > age_ms_max:
            return None
        return known.info

    def forget_topic(self, name: str) -> None:
        """Ask anew for a topic when it is needed next."""
        self._topics.pop(name, None)

    # -- leaders ---------------------------------------------------------------------------------

    def choose(self, topic: TopicInfo, partition_id: PartitionId) -> NodeId | None:
        """Return the node to ask as a partition's leader; None if all of them were asked in vain: time to wait.

        After a None the doubts are forgotten and the search begins anew.
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
        """Take note that a node answered as leader."""
        route = self._route(topic_id, partition_id)
        route.leader = node
        route.doubted.clear()

    def doubt(self, topic_id: TopicId, partition_id: PartitionId, node: NodeId, *, hint: NodeId | None = None) -> None:
        """Take note that a node failed or refused; `hint` is whom it named as leader."""
        route = self._route(topic_id, partition_id)
        route.doubted.add(node)
        route.leader = hint if hint is not None else (None if route.leader == node else route.leader)

    def _hear(self, topic_id: TopicId, partition: PartitionInfo) -> None:
        """Believe the metadata's word on a leader unless the same word has been acted on before."""
        route = self._route(topic_id, partition.partition_id)
        if partition.leader is not None and partition.epoch > route.epoch:
            route.leader, route.epoch = partition.leader, partition.epoch
            route.doubted.discard(partition.leader)

    def _route(self, topic_id: TopicId, partition_id: PartitionId) -> Route:
        return self._routes.setdefault((topic_id, partition_id), Route())


def find_partition(topic: TopicInfo, partition_id: PartitionId) -> PartitionInfo:
    """Return one of a topic's partitions; raise `NotFoundError` if it has none of that number."""
    if not 0 <= partition_id < len(topic.partitions):
        message = f"topic {topic.topic!r} has no partition {partition_id}"
        raise NotFoundError(message, code="unknown_partition")
    return topic.partitions[partition_id]

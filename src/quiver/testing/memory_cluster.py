"""A cluster in memory that answers the SDK's requests as brokers do, without disks, elections or replication.

It is a `Transport`: what is called reaches a node of the cluster after a while, and the answer travels back. It keeps
the promises that clients rely on (sequences, epochs, cursors, high watermark, refusals that name the leader) over real
batches, and breaks what a network may break: requests and answers get lost, nodes stop and come back, leaders move.
For tests of programs that use the SDK, the SDK's own among them; it says nothing about how brokers keep their promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from quiver.clock import Clock, Rng
from quiver.errors import (
    ConflictError,
    NotAllowedError,
    NotFoundError,
    NotLeaderError,
    OutcomeUnknownError,
    QuiverError,
    UnavailableError,
)
from quiver.model import (
    NO_PRODUCER,
    Buffer,
    ConsumerId,
    GroupId,
    Index,
    NodeId,
    Offset,
    PartitionId,
    ProducerId,
    TopicId,
)
from quiver.record import Batch, Record
from quiver.record.decoded import decoded_bytes, record_bytes
from quiver.tasks import timeout
from quiver.testing.memory_groups import MemoryGroups
from quiver.testing.memory_partition import MemoryPartition
from quiver.testing.memory_queues import MemoryQueues
from quiver.testing.randomness import Latency
from quiver.wire import admin_messages, requests
from quiver.wire import messages as wire
from quiver.wire.admin_messages import HoldInfo, HoldsFound, ListHolds, PlaceHoldRequest, ReleaseHoldRequest
from quiver.wire.consumed_records import encode_consumed
from quiver.wire.explain_messages import ExplainReplica, ReplicaExplained
from quiver.wire.group_messages import GroupRequest
from quiver.wire.queue_messages import GetQueue, QueueReceive, QueueSettle

R = TypeVar("R", bound=requests.Response)


class CallFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How likely a call goes wrong."""

    lost_request: float = 0.0
    """The request never arrives; the caller gets *not done*."""
    dropped_request: float = 0.0
    """The request never arrives, and the caller cannot know."""
    lost_answer: float = 0.0
    """The request is carried out, and the caller cannot know."""


@dataclass(slots=True)
class MemoryTopic:
    """A topic and its partitions."""

    name: str
    topic_id: TopicId
    partitions: list[MemoryPartition]
    retention: wire.RetentionInfo
    is_deleted: bool = False


class MemoryCluster:
    """Nodes, topics and clients in memory, behind the `Transport` seam."""

    def __init__(self, *, clock: Clock, rng: Rng, node_count: int = 3, latency: Latency | None = None) -> None:
        self.faults = CallFaults()
        self.calls: list[tuple[str, str]] = []
        """Every call that arrived: the address, and what was asked."""
        self.nodes = {NodeId(number): f"node-{number}:9002" for number in range(1, node_count + 1)}
        self.stopped: set[NodeId] = set()
        self.blank: set[NodeId] = set()
        """Nodes that know no node of the cluster: their disks were wiped, and they have not joined again yet."""
        self.topics: dict[str, MemoryTopic] = {}
        self.producers: dict[ProducerId, tuple[str, int, set[str]]] = {}
        self.consumers: dict[ConsumerId, tuple[str, set[str]]] = {}
        self.holds: dict[tuple[TopicId, str], HoldInfo] = {}
        self.metadata_lag: dict[str, NodeId] = {}
        self.refusals: dict[bytes, QuiverError] = {}
        """What batches are refused with that begin with a value."""
        self._clock, self._rng = clock, rng
        self._latency = latency or Latency(minimum_ms=0.2, spread_ms=1.0)
        self._index = 1
        self._requests: dict[str, Any] = {}
        self.groups = MemoryGroups(self, clock, self._register_group)
        self.queues = MemoryQueues(self, clock)

    # -- steering --------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The nodes' addresses."""
        return list(self.nodes.values())

    def partition(self, topic: str, partition_id: int) -> MemoryPartition:
        """Return a partition."""
        return self.topics[topic].partitions[partition_id]

    def move_leader(self, topic: str, partition_id: int, leader: int) -> None:
        """Let another node lead a partition."""
        partition = self.partition(topic, partition_id)
        partition.leader, partition.epoch = NodeId(leader), partition.epoch + 1

    def stop(self, node: int) -> None:
        """Stop a node; what it leads goes to the next one that runs."""
        self.stopped.add(NodeId(node))
        running = [candidate for candidate in self.nodes if candidate not in self.stopped]
        for topic in self.topics.values():
            for number, partition in enumerate(topic.partitions):
                if partition.leader == node and running:
                    self.move_leader(topic.name, number, running[number % len(running)])

    def start(self, node: int) -> None:
        """Let a stopped node run again."""
        self.stopped.discard(NodeId(node))

    # -- the seam --------------------------------------------------------------------------------

    async def call(
        self, address: str, request: requests.Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Carry a request to a node and its answer back, unless a fault prevents it."""
        data = b"".join(payload)
        try:
            async with timeout(timeout_ms / 1000):
                return await self._carry(address, request, data)
        except TimeoutError:
            raise self._unanswered(request, "time ran out") from None

    async def _carry(self, address: str, request: requests.Request[R], data: bytes) -> tuple[R, memoryview]:
        node = next((node for node, known in self.nodes.items() if known == address), None)
        if node is None or node in self.stopped or self._happens(self.faults.lost_request):
            await self._travel()
            raise UnavailableError(f"{address} was not reached", code="not_reached")
        if self._happens(self.faults.dropped_request):
            await self._travel()
            raise self._unanswered(request, "the connection broke")
        await self._travel()
        self.calls.append((address, requests.request_name(request)))
        response, parts = await self._answer(node, request, data)
        await self._travel()
        if node in self.stopped or self._happens(self.faults.lost_answer):
            raise self._unanswered(request, "the connection broke")
        return cast("R", response), memoryview(b"".join(parts))

    async def _travel(self) -> None:
        await asyncio.sleep(self._latency.draw_ns(self._rng) / 1e9)

    def _happens(self, probability: float) -> bool:
        return bool(probability) and self._rng.random() < probability

    def _unanswered(self, request: requests.Request[Any], why: str) -> QuiverError:
        return UnavailableError(why, code="unanswered") if request.is_read else OutcomeUnknownError(why)

    # -- nodes -----------------------------------------------------------------------------------

    async def _answer(self, node: NodeId, request: Any, data: bytes) -> tuple[requests.Response, list[bytes]]:
        match request:
            case wire.Produce() | wire.Fetch() | wire.FindOffset() | wire.Consume() | wire.BeginEpoch():
                return await self._answer_leader(node, request, data)
            case wire.MoveCursor() | wire.GetCursors() | wire.ConsumeMany():
                return await self._answer_leader(node, request, data)
            case QueueReceive() | QueueSettle() | GetQueue():
                return await self._answer_leader(node, request, data)
            case _ if isinstance(request, GroupRequest):
                return await self.groups.answer(request), []
            case _:
                return self._answer_any(node, request), []

    def _answer_any(self, node: NodeId, request: Any) -> requests.Response:
        match request:
            case wire.GetMetadata():
                return self._metadata(node, request)
            case wire.CreateTopicRequest():
                return self._create_topic(request)
            case wire.RegisterProducerRequest():
                return self._register_producer(request)
            case wire.RegisterConsumerRequest():
                return self._register_consumer(request)
            case admin_messages.ListClients():
                return self._list_clients(request)
            case admin_messages.DescribeNode():
                return self._describe(node, request)
            case ExplainReplica():
                return self._explain(node, request)
            case admin_messages.ListMoves():
                return admin_messages.MovesFound()
            case wire.DrainBroker() | wire.RemoveBroker():
                if request.broker not in self.nodes:
                    raise NotFoundError(f"there is no broker {request.broker}", code="unknown_broker")
                return self.done()
            case admin_messages.ListManagers():
                return self._list_managers()
            case PlaceHoldRequest():
                return self._place_hold(request)
            case ReleaseHoldRequest():
                for key in [key for key in self.holds if key[1] == request.name]:
                    if request.topic_id in (None, key[0]):
                        del self.holds[key]
                return self.done()
            case ListHolds():
                return HoldsFound(holds=tuple(self.holds[key] for key in sorted(self.holds)))
            case wire.ForgetClientRequest():
                (self.consumers if request.kind == "consumer" else self.producers).pop(request.id, None)  # type: ignore[call-overload] # an int
                return self.done()
            case _:
                return self._change_topic(request)

    def _list_managers(self) -> admin_messages.ManagersFound:
        found = (
            admin_messages.ManagerInfo(node=node, is_voter=True, state="alive", wire_address=address)
            for node, address in self.nodes.items()
        )
        return admin_messages.ManagersFound(managers=tuple(found))

    def _place_hold(self, request: PlaceHoldRequest) -> requests.Done:
        topic = next(topic for topic in self.topics.values() if topic.topic_id == request.topic_id)
        self.holds[request.topic_id, request.name] = HoldInfo(
            name=request.name,
            topic=topic.name,
            topic_id=request.topic_id,
            offsets=request.offsets,
            owner=request.owner,
            expires_ms=self._clock.wall_ms() + request.lasting_ms,
        )
        return self.done()

    @property
    def index(self) -> int:
        """The index of the last change of the metadata."""
        return self._index

    def done(self) -> requests.Done:
        """Advance the index of the metadata."""
        self._index += 1
        return requests.Done(index=Index(self._index))

    def _find(self, name: str) -> MemoryTopic:
        topic = self.topics.get(name)
        if topic is None or topic.is_deleted:
            raise NotFoundError(f"there is no topic {name!r}", code="unknown_topic")
        return topic

    def _metadata(self, node: NodeId, request: wire.GetMetadata) -> wire.MetadataFound:
        if node in self.blank:
            return wire.MetadataFound(cluster_id="", index=Index(0))
        topics = [topic for topic in self.topics.values() if not topic.is_deleted]
        wanted = [topic for topic in topics if request.topics is None or topic.name in request.topics]
        return wire.MetadataFound(
            cluster_id="memory",
            index=Index(self._index),
            primary=next(iter(self.nodes)),
            nodes=tuple(wire.NodeInfo(node=node, wire_address=address) for node, address in self.nodes.items()),
            topics=tuple(self._topic_info(topic) for topic in wanted),
        )

    def _topic_info(self, topic: MemoryTopic) -> wire.TopicInfo:
        partitions = (
            wire.PartitionInfo(
                partition_id=PartitionId(number),
                group=GroupId(100 * topic.topic_id + number),
                replicas=tuple(self.nodes),
                leader=self.metadata_lag.get(topic.name, partition.leader),
                epoch=partition.epoch,
            )
            for number, partition in enumerate(topic.partitions)
        )
        return wire.TopicInfo(
            topic=topic.name,
            topic_id=topic.topic_id,
            replicas=len(self.nodes),
            partitions=tuple(partitions),
            retention=topic.retention,
        )

    def _create_topic(self, request: wire.CreateTopicRequest) -> wire.TopicCreated:
        found = self.topics.get(request.topic)
        known = self.make_topic(request) if found is None or found.is_deleted else found
        if self._requests.get(request.request_id) is not known:
            raise ConflictError(f"topic {request.topic!r} exists", code="topic_exists")
        return wire.TopicCreated(topic_id=known.topic_id, partitions=len(known.partitions), index=Index(self._index))

    def make_topic(self, request: wire.CreateTopicRequest) -> MemoryTopic:
        """Create a topic that does not exist."""
        nodes = list(self.nodes)
        partitions = [MemoryPartition(nodes[number % len(nodes)]) for number in range(request.partitions)]
        topic = MemoryTopic(request.topic, TopicId(self._index), partitions, request.retention)
        self.topics[request.topic] = topic
        self._requests[request.request_id] = topic
        self._index += 1
        self.groups.handle_topics_changed()
        return topic

    def _change_topic(self, request: Any) -> requests.Done:
        match request:
            case wire.DeleteTopicRequest():
                self._find(request.topic).is_deleted = True
            case wire.RestoreTopicRequest():
                if request.topic not in self.topics:
                    raise NotFoundError(f"there is no topic {request.topic!r}", code="unknown_topic")
                self.topics[request.topic].is_deleted = False
            case wire.AddPartitionsRequest():
                topic, nodes = self._find(request.topic), list(self.nodes)
                numbers = range(len(topic.partitions), request.partitions)
                topic.partitions += [MemoryPartition(nodes[number % len(nodes)]) for number in numbers]
            case wire.ConfigureTopicRequest():
                self._find(request.topic).retention = request.retention
            case _:
                raise ConflictError(f"{requests.request_name(request)} is not for this cluster", code="unknown_request")
        self.groups.handle_topics_changed()
        return self.done()

    def _register_producer(self, request: wire.RegisterProducerRequest) -> wire.ProducerRegistered:
        topics = {self._find(selection.topic).name for selection in request.topics}
        known_id = request.producer_id
        if known_id is None and request.name:
            known_id = next((id_ for id_, (name, _, _) in self.producers.items() if name == request.name), None)
        if known_id is None:
            known_id = ProducerId(max(self.producers, default=0) + self.done().index)
            self.producers[known_id] = (request.name, -1, set())
        name, epoch, before = self.producers[known_id]
        self.producers[known_id] = (name, epoch + 1, before | topics)
        return wire.ProducerRegistered(producer_id=known_id, epoch=epoch + 1, index=self.done().index)

    def _register_consumer(self, request: wire.RegisterConsumerRequest) -> wire.ConsumerRegistered:
        self.groups.require_inactive(request.request_id)
        return self._register(request)

    def _register(self, request: wire.RegisterConsumerRequest) -> wire.ConsumerRegistered:
        topics = {self._find(selection.topic).name for selection in request.topics}
        known_id = request.consumer_id
        if known_id is None and request.request_id:
            known_id = next((id_ for id_, (name, _) in self.consumers.items() if name == request.request_id), None)
        if known_id is None:
            known_id = ConsumerId(len(self.consumers) + 1)
            self.consumers[known_id] = (request.request_id, set())
        if known_id not in self.consumers:
            raise NotFoundError(f"there is no consumer {known_id}", code="unknown_consumer")
        self.consumers[known_id][1].update(topics)
        return wire.ConsumerRegistered(consumer_id=known_id, index=self.done().index)

    def _register_group(self, name: str, topics: tuple[str, ...]) -> wire.ConsumerRegistered:
        selections = tuple(wire.Selection(topic=topic) for topic in topics)
        return self._register(wire.RegisterConsumerRequest(topics=selections, request_id=name))

    def _list_clients(self, request: admin_messages.ListClients) -> admin_messages.ClientsFound:
        producers = [
            admin_messages.ClientInfo(kind="producer", id=id_, name=name, epoch=epoch, topics=tuple(sorted(topics)))
            for id_, (name, epoch, topics) in self.producers.items()
        ]
        consumers = [
            admin_messages.ClientInfo(kind="consumer", id=id_, name=name, topics=tuple(sorted(topics)))
            for id_, (name, topics) in self.consumers.items()
        ]
        wanted = [info for info in producers + consumers if request.kind in ("", info.kind)]
        return admin_messages.ClientsFound(
            clients=tuple(info for info in wanted if request.topic is None or request.topic in info.topics)
        )

    def _describe(self, node: NodeId, request: admin_messages.DescribeNode) -> admin_messages.NodeDescribed:
        replicas = [
            admin_messages.ReplicaInfo(
                topic_id=topic.topic_id,
                partition_id=PartitionId(number),
                group=GroupId(100 * topic.topic_id + number),
                role="leader" if partition.leader == node else "follower",
                epoch=partition.epoch,
                leader=partition.leader,
                first_offset=partition.first_offset,
                end_offset=partition.end_offset,
                bytes=sum(len(batch.data) for batch in partition.batches),
                in_sync=tuple(self.nodes) if partition.leader == node else (),
            )
            for topic in self.topics.values()
            if request.topic in (None, topic.name)
            for number, partition in enumerate(topic.partitions)
        ]
        roles = ("manager", "broker", "gateway")
        return admin_messages.NodeDescribed(
            node=node, version="0", pid=0, roles=roles, started_ms=0, is_ready=True, replicas=tuple(replicas)
        )

    def _explain(self, node: NodeId, request: ExplainReplica) -> ReplicaExplained:
        topic = next((one for one in self.topics.values() if one.topic_id == request.topic_id), None)
        if topic is None:
            return ReplicaExplained(node=node, state="missing")
        partition = topic.partitions[request.partition_id]
        return ReplicaExplained(
            node=node,
            state="open",
            role="leader" if partition.leader == node else "follower",
            epoch=partition.epoch,
            leader=partition.leader,
            is_ready=partition.leader == node,
            first_offset=partition.first_offset,
            log_end_offset=partition.end_offset,
            high_watermark=partition.end_offset,
            voters=tuple(self.nodes),
            in_sync=tuple(self.nodes) if partition.leader == node else (),
        )

    # -- partitions ------------------------------------------------------------------------------

    async def _answer_leader(self, node: NodeId, request: Any, data: bytes) -> tuple[requests.Response, list[bytes]]:
        topic = next((topic for topic in self.topics.values() if topic.topic_id == request.topic_id), None)
        if topic is None or topic.is_deleted:
            raise NotFoundError(f"there is no topic {request.topic_id}", code="unknown_topic")
        partition = topic.partitions[request.partition_id]
        if partition.leader != node:
            raise NotLeaderError(f"node {node} does not lead", leader=partition.leader)
        self.groups.check_plain(request)
        match request:
            case wire.Produce():
                return self._produce(topic, partition, data), []
            case wire.Fetch():
                return await self._fetch(partition, request)
            case wire.Consume():
                return await self._consume(partition, request)
            case wire.ConsumeMany():
                return self._consume_many(partition, request)
            case QueueReceive() | QueueSettle() | GetQueue():
                return await self.queues.answer(topic, partition, request)
            case wire.BeginEpoch():
                return wire.EpochBegun(next_sequence=partition.begin_epoch(request.producer_id, request.epoch)), []
            case _:
                return self._answer_place(partition, request), []

    def _produce(self, topic: MemoryTopic, partition: MemoryPartition, data: bytes) -> wire.Produced:
        batch = Batch.decode(data)
        if (refusal := self.refusals.get(batch.values()[0] or b"")) is not None:
            raise refusal
        producer_id = batch.header.producer_id
        if producer_id != NO_PRODUCER and producer_id not in self.producers:
            raise NotFoundError(f"not done: unknown producer {producer_id}", code="unknown_producer")
        if producer_id != NO_PRODUCER and topic.name not in self.producers[producer_id][2]:
            raise NotAllowedError(f"producer {producer_id} is not registered", code="not_registered")
        return partition.append(data, now_ms=self._clock.wall_ms())

    async def _consume(self, partition: MemoryPartition, request: wire.Consume) -> tuple[wire.Consumed, list[bytes]]:
        cursor = partition.cursors.get(request.consumer_id, partition.first_offset)
        first = cursor if request.offset is None else request.offset
        partition.require_offset(first)
        if first == partition.end_offset and request.wait_ms:
            await partition.wait_grown(request.wait_ms)
        end = Offset(max(first, min(first + request.records_max, partition.end_offset)))
        parts = partition.read(first, request.bytes_max) if end > first else []
        size_bytes = sum(decoded_bytes(Batch.decode(part)) for part in parts)
        if size_bytes > (request.decoded_bytes_max or size_bytes):
            nowhere = Offset(0)
            return wire.Consumed(first_offset=nowhere, cursor=nowhere, end_offset=nowhere, large_bytes=size_bytes), []
        if parts:
            end = min(end, Batch.decode(parts[-1]).header.end_offset)
        if end > first:
            partition.cursors[request.consumer_id] = end
        return wire.Consumed(first_offset=first, cursor=end, end_offset=partition.end_offset), parts

    def _consume_many(self, partition: MemoryPartition, request: Any) -> tuple[wire.ManyConsumed, list[bytes]]:
        consumed: list[Record | None] = []
        for consumer_id in request.consumer_ids:
            offset = partition.cursors.get(consumer_id, partition.first_offset)
            parts = partition.read(offset, 1) if offset < partition.end_offset else []
            record = Batch.decode(parts[0]).records(offset, Offset(offset + 1))[0] if parts else None
            size_bytes = 0 if record is None else record_bytes(record)
            if size_bytes > (request.decoded_bytes_max or size_bytes):
                return wire.ManyConsumed(large_bytes=0 if consumed else size_bytes), [encode_consumed(consumed)]
            consumed.append(record)
            if record is not None:
                partition.cursors[consumer_id] = Offset(offset + 1)
        return wire.ManyConsumed(), [encode_consumed(consumed)]

    async def _fetch(self, partition: MemoryPartition, request: wire.Fetch) -> tuple[requests.Response, list[bytes]]:
        if request.reader is not None:
            partition.begin_session(*request.reader)
        partition.require_offset(request.offset)
        if request.offset == partition.end_offset and request.wait_ms:
            await partition.wait_grown(request.wait_ms)
        parts = partition.read(request.offset, request.bytes_max)
        return wire.Fetched(first_offset=partition.first_offset, end_offset=partition.end_offset), parts

    def _answer_place(self, partition: MemoryPartition, request: Any) -> requests.Response:
        match request:
            case wire.FindOffset(at="earliest"):
                return wire.OffsetFound(offset=partition.first_offset)
            case wire.FindOffset(at="latest"):
                return wire.OffsetFound(offset=partition.end_offset)
            case wire.FindOffset():
                records = (record for batch in partition.batches for record in batch.records())
                found = (record.offset for record in records if record.timestamp >= cast("int", request.at))
                return wire.OffsetFound(offset=next(found, partition.end_offset))
            case wire.MoveCursor():
                for consumer_id, offset in request.cursors:
                    if consumer_id not in self.consumers:
                        raise NotFoundError(f"not done: unknown consumer {consumer_id}", code="unknown_consumer")
                    if request.session:
                        partition.begin_session(consumer_id, request.session)
                    if not (request.only_new and consumer_id in partition.cursors):
                        partition.cursors[consumer_id] = partition.end_offset if offset == "latest" else offset
                return self.done()
            case wire.GetCursors():
                cursors = tuple(partition.cursors.get(id_, partition.first_offset) for id_ in request.consumer_ids)
                return wire.CursorsFound(
                    cursors=cursors, first_offset=partition.first_offset, end_offset=partition.end_offset
                )
            case _:
                raise ConflictError(f"{requests.request_name(request)} is not for this cluster", code="unknown_request")

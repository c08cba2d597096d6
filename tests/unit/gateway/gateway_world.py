"""A gateway over a cluster in memory, on simulated time and without sockets: requests in, responses out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from quiver.access import AccessControl, AuditLog, Authenticator
from quiver.clock import SystemClock
from quiver.config import GatewaySettings, WireSettings
from quiver.errors import NotAllowedError
from quiver.gateway import Gateway, GatewayServices
from quiver.gateway.access import HttpAccess
from quiver.gateway.http import HttpRequest, HttpResponse
from quiver.metadata import (
    ALL_PARTITIONS,
    ConsumerRow,
    GroupKind,
    GroupRow,
    MetadataState,
    ProducerRow,
    Registration,
    Retention,
    TopicRow,
    TopicState,
    View,
)
from quiver.model import Buffer, ConsumerId, Index, NodeId, PartitionId, ProducerId, TopicId
from quiver.record.decoded import DecodedBatchBudget
from quiver.testing import Latency, RandomStreams, SimulatedClock, SimulatedLoop
from quiver.testing.memory_cluster import MemoryCluster
from quiver.testing.memory_partition import MemoryPartition
from quiver.wire import Caller, requests
from quiver.wire import messages as wire
from quiver.wire.answer_memory import make_answer_memory
from quiver.wire.messages import ConsumeMany, ManyConsumed

T = TypeVar("T")


class GatewayCluster(MemoryCluster):
    """What a cluster in memory lacks for HTTP: consuming, topics made by registering, and the metadata as a view."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.selections: dict[tuple[str, int], list[tuple[str, tuple[PartitionId, ...]]]] = {}
        self.heard: list[tuple[str, int]] = []
        self.hidden: set[tuple[str, int]] = set()
        """Clients that this node has not heard of yet."""
        self.linearizable_reads = 0
        self.consumers_max = 1_000
        """Consumers served in one answer to `ConsumeMany`."""
        self.unwelcome: set[ConsumerId] = set()
        """Consumers that leaders do not know, although this node does."""
        self.are_leaders_behind = False
        """Whether leaders know no client, except in requests that make them catch up with the metadata first."""
        self.delays_s: dict[str, float] = {}
        """Time that this node takes to answer requests, by their name."""

    def view(self) -> View:
        """Return the metadata as this node knows it."""
        return MetadataState(
            [*self._topic_rows(), *self._producer_rows(), *self._consumer_rows(), *self._group_rows()]
        ).view()

    def register_elsewhere(self, name: str, topic: str) -> ProducerId:
        """Register a producer through another gateway, of which this one has the metadata only."""
        request = wire.RegisterProducerRequest(topics=(wire.Selection(topic=topic),), name=name)
        registered = self._answer_any(NodeId(2), request)
        assert isinstance(registered, wire.ProducerRegistered)
        return registered.producer_id

    def record_client(self, kind: str, id_: int) -> None:
        self.heard.append((kind, id_))

    async def handle(
        self, caller: Caller, request: wire.AnyRequest, payload: memoryview
    ) -> tuple[requests.Response, Sequence[Buffer]]:
        """Answer as the first node does, without a network in between."""
        name = requests.request_name(request)
        self.calls.append(("self", name))
        await asyncio.sleep(self.delays_s.get(name, 0.0))
        return await self._answer(NodeId(1), request, bytes(payload))

    async def _answer_leader(self, node: NodeId, request: Any, data: bytes) -> tuple[requests.Response, list[bytes]]:
        if self.are_leaders_behind and request.known_index < self._index:
            raise NotAllowedError("not done: epoch 1 was never assigned to producer 1", code="unknown_epoch")
        return await super()._answer_leader(node, request, data)

    def _answer_any(self, node: NodeId, request: Any) -> requests.Response:
        match request:
            case wire.GetMetadata(is_linearizable=True):
                self.linearizable_reads += 1
                self.hidden.clear()
            case wire.RegisterProducerRequest():
                self._make_missing(request.topics)
                registered = self._register_producer(request)
                self._select("producer", registered.producer_id, request.topics)
                return registered
            case wire.RegisterConsumerRequest():
                consumer = self._register_consumer(request)
                self._select("consumer", consumer.consumer_id, request.topics)
                return consumer
        return super()._answer_any(node, request)

    def _create_topic(self, request: wire.CreateTopicRequest) -> wire.TopicCreated:
        made = self._requests.get(request.request_id)
        if made is None or not made.is_deleted:
            return super()._create_topic(request)
        # As a primary does: a repeat does not bring a deleted topic back.
        return wire.TopicCreated(topic_id=made.topic_id, partitions=len(made.partitions), index=Index(self._index))

    def _consume_many(self, partition: MemoryPartition, request: ConsumeMany) -> tuple[ManyConsumed, list[bytes]]:
        for consumer_id in self.unwelcome.intersection(request.consumer_ids):
            raise NotAllowedError(f"consumer {consumer_id} is not registered", code="not_registered")
        served = request.consumer_ids[: self.consumers_max]
        return super()._consume_many(partition, msgspec.structs.replace(request, consumer_ids=served))

    def _make_missing(self, selections: Sequence[wire.Selection]) -> None:
        for selection in selections:
            if selection.topic not in self.topics:
                self._create_topic(wire.CreateTopicRequest(topic=selection.topic, request_id=f"auto-{selection.topic}"))

    def _select(self, kind: str, id_: int, selections: Sequence[wire.Selection]) -> None:
        known = self.selections.setdefault((kind, id_), [])
        known += [(selection.topic, selection.partitions) for selection in selections]

    def _topic_rows(self) -> list[TopicRow]:
        return [
            TopicRow(
                topic_id=topic.topic_id,
                name=topic.name,
                partitions=len(topic.partitions),
                replicas=3,
                retention=Retention(),
                state=TopicState.DELETED if topic.is_deleted else TopicState.ACTIVE,
                created_ms=0,
                purge_ms=0 if topic.is_deleted else None,
                request_id="",
            )
            for topic in self.topics.values()
        ]

    def _producer_rows(self) -> list[ProducerRow]:
        return [
            ProducerRow(
                producer_id=id_,
                name=name,
                epoch=epoch,
                registered_ms=0,
                registrations=self._registrations("producer", id_),
            )
            for id_, (name, epoch, _) in self.producers.items()
            if ("producer", id_) not in self.hidden
        ]

    def _consumer_rows(self) -> list[ConsumerRow]:
        return [
            ConsumerRow(
                consumer_id=ConsumerId(id_),
                registered_ms=0,
                registrations=self._registrations("consumer", id_),
                request_id=name,
            )
            for id_, (name, _) in self.consumers.items()
            if ("consumer", id_) not in self.hidden
        ]

    def _group_rows(self) -> list[GroupRow]:
        return [
            GroupRow(group_id=group.group_id, kind=GroupKind(group.kind), created_ms=0)
            for group in self.groups.groups.values()
        ]

    def _registrations(self, kind: str, id_: int) -> tuple[Registration, ...]:
        made: list[Registration] = []
        for name, partitions in self.selections.get((kind, id_), []):
            topic_id: TopicId = self.topics[name].topic_id
            made += [Registration(topic_id=topic_id, partition_id=one) for one in partitions or (ALL_PARTITIONS,)]
        return tuple(made)


class World:
    """One seeded run of a gateway on the first node of a cluster in memory."""

    def __init__(self, seed: int = 1, *, settings: GatewaySettings | None = None) -> None:
        self.streams = RandomStreams(seed)
        self.loop = SimulatedLoop(self.streams.schedule, time_max_s=3600.0)
        self.clock = SimulatedClock(self.loop)
        latency = Latency(minimum_ms=0.2, spread_ms=1.0)
        self.cluster = GatewayCluster(clock=self.clock, rng=self.streams.network, latency=latency)
        self._settings = settings or GatewaySettings()
        self.decoded = DecodedBatchBudget(self._settings.decoded_bytes_max)
        self.answers = make_answer_memory(WireSettings())
        self.gateway: Gateway

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, T]]) -> T:
        """Run a scenario with the gateway open, without its server."""

        async def main() -> T:
            services = GatewayServices(
                node=NodeId(1),
                wire_address=lambda: self.cluster.nodes[NodeId(1)],
                handler=self.cluster.handle,
                transport=self.cluster,
                view=self.cluster.view,
                access=open_access(self.cluster.view),
                on_client_seen=self.cluster.record_client,
                decoded=self.decoded,
                answers=self.answers,
            )
            self.gateway = Gateway(
                services,
                listen="127.0.0.1:0",
                settings=self._settings,
                clock=self.clock,
                rng=self.streams.workload,
            )
            try:
                return await scenario(self)
            finally:
                await self.gateway.close()

        try:
            return self.loop.run_until_complete(main())
        finally:
            self.loop.close()

    async def ask(self, method: str, path: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        """Ask with parameters as a JSON body; return the status and the decoded body."""
        response = await self.ask_raw(method, path, body=msgspec.json.encode(parameters) if parameters else b"")
        return response.status, msgspec.json.decode(response.body) if response.body else {}

    async def ask_raw(self, method: str, path: str, *, body: bytes = b"", query: bytes = b"") -> HttpResponse:
        request = HttpRequest(method=method, path=path, query=query, headers={b"host": b"localhost"}, body=body)
        answer = self.gateway.application.handle(request)
        response = answer if isinstance(answer, HttpResponse) else await answer
        return response if response.room is None else await read_stream(response)

    async def get(self, path: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        return await self.ask("GET", path, **parameters)

    async def post(self, path: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        return await self.ask("POST", path, **parameters)

    async def register_producer(self, topic: str = "t", **parameters: Any) -> int:
        status, answer = await self.post("/producer/register", topic=topic, **parameters)
        assert status == 200, answer
        return int(answer["producer_id"])

    async def register_consumer(self, topic: str = "t", **parameters: Any) -> int:
        status, answer = await self.post("/consumer/register", topic=topic, **parameters)
        assert status == 200, answer
        return int(answer["consumer_id"])


async def read_stream(response: HttpResponse) -> HttpResponse:
    """Return a response with the body that was made while it was read, as a connection does."""
    assert response.stream is not None
    assert response.room is not None
    body = b"".join([piece async for piece in response.stream])
    response.room.release()
    return msgspec.structs.replace(response, body=body, stream=None, room=None)


def open_access(view: Callable[[], View] | None = None) -> HttpAccess:
    """Return the access of a gateway that needs no credentials."""
    view, clock = view or MetadataState().view, SystemClock()
    audit = AuditLog(node=NodeId(1), clock=clock)
    control = AccessControl(view=view, clock=clock, is_open=True, audit=audit)
    return HttpAccess(control, Authenticator(view=view, clock=clock, audit=audit))


async def make_topic(world: World, *, messages: int = 6) -> None:
    """Make the topic `t` of two partitions, and spread messages over them."""
    await world.post("/topics", topic_name="t", partitions=2)
    producer_id = await world.register_producer()
    for number in range(messages):
        given = {"topic": "t", "producer_id": producer_id, "message": str(number), "partition_id": number % 2}
        assert (await world.post("/producer/produce", **given))[0] == 200

"""One manager and many brokers on virtual time, with everything counted that the control plane costs.

The manager is a real `Node`: its store on SQLite, dispatch, placement, liveness and reconciliation are what runs in
production. Brokers are `LightBroker`s. `ControlPlaneCosts` is the difference between two moments.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from quiver.config import BrokerSettings, ManagerSettings, NodeSettings, Settings
from quiver.metadata import View, open_database
from quiver.model import Buffer, NodeId
from quiver.node import Node
from quiver.testing.clock import SimulatedClock
from quiver.testing.clusters.host import Medium, SimulatedEnvironment
from quiver.testing.control_plane.broker import DataPlane, LightBroker, SharedMetadata
from quiver.testing.disk import SimulatedDisk
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.harness import QUICK_DISK
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import SimulatedNetwork
from quiver.testing.randomness import RandomStreams
from quiver.testing.transport import SimulatedRequester, SimulatedTransport
from quiver.wire.messages import CreateTopicRequest
from quiver.wire.requests import Request, Response, request_name

R = TypeVar("R", bound=Response)

TOPIC_PARTITIONS = 1_000
"""Partitions of one topic; a cluster has as many topics as it needs."""
ELECTION_MS = 1_500
"""Time after which the partitions of a dead broker have other leaders."""
_WAIT_S_MAX = 1_200


class ControlPlaneCosts(msgspec.Struct, frozen=True):
    """What happened between two moments."""

    seconds: float
    """Virtual time."""
    primary_cpu_s: float
    """Real time of the primary's callbacks, its database and simulated disk and sockets included."""
    requests: dict[str, int]
    request_bytes: dict[str, int]
    commands: dict[str, int]
    command_bytes: dict[str, int]
    sent_bytes: int
    """From the primary to the brokers: the metadata's log, and Raft's heartbeats."""
    sent_messages: int

    def since(self, before: ControlPlaneCosts) -> ControlPlaneCosts:
        """Return what happened after another moment."""
        return ControlPlaneCosts(
            self.seconds - before.seconds,
            self.primary_cpu_s - before.primary_cpu_s,
            _subtract(self.requests, before.requests),
            _subtract(self.request_bytes, before.request_bytes),
            _subtract(self.commands, before.commands),
            _subtract(self.command_bytes, before.command_bytes),
            self.sent_bytes - before.sent_bytes,
            self.sent_messages - before.sent_messages,
        )


def _subtract(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return dict(Counter(after) - Counter(before))


class _CountedNetwork(SimulatedNetwork):
    """A network that counts what one node sends."""

    counted = NodeId(0)
    counted_bytes = 0
    counted_messages = 0

    def send(self, source: NodeId, target: NodeId, parts: Sequence[Buffer]) -> None:
        if source == self.counted:
            self.counted_bytes += sum(map(len, parts))
            self.counted_messages += 1
        super().send(source, target, parts)


class _CountedRequester(SimulatedRequester):
    """A way to ask nodes that counts requests by name."""

    def __init__(self, world: ControlPlane, node: NodeId) -> None:
        super().__init__(world.medium.transport, node, f"node-{node}")
        self._world = world

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        name = request_name(request)
        self._world.requests[name] += 1
        self._world.request_bytes[name] += len(msgspec.msgpack.encode(request)) + sum(map(len, payload))
        return await super().call(address, request, payload, timeout_ms=timeout_ms)


class ControlPlane:
    """A cluster of one manager and `brokers` brokers, `per_host` of them on each host."""

    def __init__(
        self, *, brokers: int, per_host: int = 1, copy_ms: int = 1_000, manager: ManagerSettings, seed: int = 0
    ) -> None:
        self.streams = RandomStreams(seed)
        self.loop = SimulatedLoop(self.streams.schedule)
        network = _CountedNetwork(self.loop, self.streams.network, keep_order=True)
        transport = SimulatedTransport(self.loop, network, self.streams.stream("transport"))
        self.medium = Medium(network, transport)
        self.primary, self.address, self.copy_ms = NodeId(1), "manager:9002", copy_ms
        node = NodeSettings(id=1, cluster="simulated", roles="manager", data="/data", wire=self.address)
        self.settings = Settings(node=node, manager=manager, broker=BrokerSettings())
        self.shared = SharedMetadata()
        self.data = DataPlane(self)
        ids = [NodeId(number) for number in range(2, brokers + 2)]
        self.brokers = {id_: LightBroker(self, id_, host=f"host{(id_ - 2) // per_host}") for id_ in ids}
        self.requests: Counter[str] = Counter()
        self.request_bytes: Counter[str] = Counter()
        self._network, self._cpu_s, self._last_s = network, 0.0, time.thread_time()
        network.counted = self.primary
        self.loop.after_event(self._charge)

    # -- steps of a run --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all nodes; return when every broker is registered."""
        with self.loop.node_scope(self.primary):
            self.loop.create_task(self._run_manager())
        for broker in self.brokers.values():
            broker.start()
        await self.wait(lambda: len(self.view().brokers) == len(self.brokers) + 1)

    async def create_partitions(self, partitions: int, *, replicas: int = 3) -> None:
        """Create topics; return when every partition has a leader."""
        client = self.medium.transport.port(name="client")
        for first in range(0, partitions, TOPIC_PARTITIONS):
            count = min(TOPIC_PARTITIONS, partitions - first)
            request = CreateTopicRequest(topic=f"topic-{first}", partitions=count, replicas=replicas)
            await client.call(self.address, request, timeout_ms=60_000)
        await self.wait(lambda: self.is_led)

    def kill(self, node: NodeId) -> None:
        """Kill a broker; its partitions get other leaders after an election timeout."""
        self.brokers[node].kill()
        self.loop.call_later(ELECTION_MS / 1000, self.data.elect, node)

    async def wait(self, condition: Callable[[], bool], *, poll_s: float = 0.1) -> None:
        """Wait until something holds, in virtual time."""
        end_s = self.loop.time() + _WAIT_S_MAX
        while not condition():
            if self.loop.time() > end_s:
                raise TimeoutError(f"not within {_WAIT_S_MAX} s of virtual time")
            await asyncio.sleep(poll_s)

    # -- what is seen ----------------------------------------------------------------------------

    def view(self) -> View:
        """Return the metadata as the most advanced broker has it."""
        return self.shared.machine.state.view()

    @property
    def is_led(self) -> bool:
        """Return whether the metadata has a living leader for every partition."""
        rows, up = self.view().partitions.values(), {id_ for id_, broker in self.brokers.items() if broker.is_up}
        return bool(rows) and all(row.leader in up for row in rows)

    def replicas_on(self, node: NodeId) -> int:
        """Return how many replicas a broker has."""
        return sum(node in row.replicas for row in self.view().partitions.values())

    def imbalance(self) -> int:
        """Return by how many replicas the living brokers differ."""
        held = Counter(node for row in self.view().partitions.values() for node in row.replicas)
        counts = [held[id_] for id_, broker in self.brokers.items() if broker.is_up]
        return max(counts) - min(counts)

    def costs(self) -> ControlPlaneCosts:
        """Return everything since the start."""
        return ControlPlaneCosts(
            self.loop.time(),
            self._cpu_s,
            dict(self.requests),
            dict(self.request_bytes),
            dict(self.shared.commands),
            dict(self.shared.command_bytes),
            self._network.counted_bytes,
            self._network.counted_messages,
        )

    def requester(self, node: NodeId) -> SimulatedRequester:
        """Return a broker's way to ask the manager, counted."""
        return _CountedRequester(self, node)

    async def _run_manager(self) -> None:
        clock, rng = SimulatedClock(self.loop), self.streams.stream("manager")
        environment = SimulatedEnvironment(
            clock=clock,
            rng=rng,
            disk=SimulatedDisk(),
            executor=SimulatedExecutor(self.loop, rng, QUICK_DISK),
            database=open_database("sqlite://"),
            incarnation=1,
            fresh_identity="identity-1",
            address=self.address,
            medium=self.medium,
        )
        async with Node(self.settings, environment):
            await asyncio.Event().wait()

    def _charge(self) -> None:
        now_s = time.thread_time()
        if self.loop.running_node == self.primary:
            self._cpu_s += now_s - self._last_s
        self._last_s = now_s


def run_simulated(world: ControlPlane, work: Callable[[ControlPlane], Any]) -> Any:
    """Run a simulation to its end and return what it returns."""
    try:
        return world.loop.run_until_complete(work(world))
    finally:
        world.loop.close()

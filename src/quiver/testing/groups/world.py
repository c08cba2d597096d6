"""A world of consensus groups: nodes with the real core, driver and log, and their clients.

It adds to `SimulatedWorld` what only groups have: the checkers that watch every event, the clients, the fault budget by
group, and the repair of groups that lost a member.

`SimulatedRpc` transports the calls of clients to nodes: they take time, get lost, are doubled, and wait for paused
nodes. The work of a call runs in the scope of the node that serves it: it dies with the node, and then the caller gets
no answer. A call to a node that does not run is refused or lost.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from quiver.clock import Rng
from quiver.errors import QuiverError, UnavailableError
from quiver.model import ConsumerId, GroupId, NodeId, ProducerId
from quiver.raft import Configuration
from quiver.storage.inspection import verify_directory
from quiver.testing.checkers.observer import Observer
from quiver.testing.groups.consumers import CursorConsumer, OffsetConsumer, make_consumer
from quiver.testing.groups.history import ClientHistory
from quiver.testing.groups.node import SimulatedNode
from quiver.testing.groups.operations import find_leader, repair
from quiver.testing.groups.producers import GroupProducer, GroupReader
from quiver.testing.groups.swarm import GroupKnobs
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.simulator.world import SimulatedWorld, SimulationRun

T = TypeVar("T")
Work = Callable[[SimulatedNode], Awaitable[T]]


class SimulatedRpc:
    """Carry calls to nodes and their answers back; `p_loss` and `p_double` may be changed at any time."""

    def __init__(self, world: GroupWorld, rng: Rng) -> None:
        self.p_loss = 0.0
        self.p_double = 0.0
        self._world = world
        self._rng = rng
        self._no_scope = contextvars.Context()

    def call(self, node: NodeId, work: Work[T]) -> asyncio.Future[T]:
        """Let a node do `work`; the answer, or the error it raised, may never come.

        A doubled call is done twice. An error is reported only when no other copy can succeed: "not done" must be true.
        """
        call = _Call(node, work, self._world.loop.create_future())
        call.copies = 2 if self._rng.random() < self.p_double else 1
        for _ in range(call.copies):
            if self._rng.random() >= self.p_loss:
                self._later(self._arrive, call)
        return call.reply

    def _arrive(self, call: _Call[T]) -> None:
        target = self._world.nodes[call.node]
        if target.is_up:
            with self._world.loop.node_scope(call.node):
                self._world.loop.create_task(self._serve(target, call))
        elif self._rng.random() < 0.7:
            call.fail(UnavailableError("not done: the connection was refused"))

    async def _serve(self, target: SimulatedNode, call: _Call[T]) -> None:
        try:
            result = await call.work(target)
        except QuiverError as error:
            self._answer(call.fail, error)
        else:
            self._answer(call.succeed, result)

    def _answer(self, callback: Callable[..., object], *arguments: object) -> None:
        if self._rng.random() >= self.p_loss:
            self._later(callback, *arguments)

    def _later(self, callback: Callable[..., object], *arguments: object) -> None:
        delay_ns = self._world.network.rates.latency.draw_ns(self._rng)
        self._world.loop.call_later_ns(delay_ns, callback, *arguments, context=self._no_scope)


class _Call(Generic[T]):
    """One call and its copies on the way."""

    def __init__(self, node: NodeId, work: Work[T], reply: asyncio.Future[T]) -> None:
        self.node = node
        self.work = work
        self.reply = reply
        self.copies = 1
        self._error: QuiverError | None = None

    def succeed(self, result: T) -> None:
        """Take an answer."""
        if not self.reply.done():
            self.reply.set_result(result)

    def fail(self, error: QuiverError) -> None:
        """Take an error of one copy."""
        self.copies -= 1
        if self._error is None or error.outcome == "unknown":
            self._error = error
        if not self.copies and not self.reply.done():
            self.reply.set_exception(self._error)


_DELIVERY_TIMEOUT_WHEN_HEALED_MS = 120_000


class GroupWorld(SimulatedWorld[GroupKnobs, SimulatedNode]):
    """The nodes of one run, their groups and their clients."""

    def __init__(self, run: SimulationRun, knobs: GroupKnobs) -> None:
        super().__init__(run, knobs)
        self.groups = tuple(GroupId(number + 1) for number in range(knobs.groups))
        self.observer = Observer(self.groups, run.trace)
        self.history = ClientHistory()
        # The name of a stream is part of what a seed means: it stays, although the class has another name now.
        self.rpc = SimulatedRpc(self, run.streams.stream("courier"))
        self.producers: list[GroupProducer] = []
        self.readers: list[GroupReader] = []
        self.consumers: list[CursorConsumer | OffsetConsumer] = []
        self.wants_load = True
        self.is_healed = False
        self.voters_min = max(1, knobs.voters - 1)
        self.changes = 0
        """How many membership changes were proposed."""
        self.operating = 0
        """How many membership changes are under way."""
        self.repairing: set[NodeId] = set()
        """Retired nodes whose successors are not yet voters everywhere."""
        self._consumer_ids = 0
        run.loop.after_event(self._observe)

    @property
    def delivery_timeout_ms(self) -> int:
        """Return how long a producer retries a batch."""
        return _DELIVERY_TIMEOUT_WHEN_HEALED_MS if self.is_healed else self.knobs.delivery_timeout_ms

    def next_consumer(self) -> ConsumerId:
        """Return a consumer id that was never used."""
        self._consumer_ids += 1
        return ConsumerId(self._consumer_ids)

    # -- setting up ------------------------------------------------------------------------------

    def populate(self) -> None:
        """Create and start the nodes: the voters of every group, and spare ones."""
        voters = tuple(NodeId(number + 1) for number in range(self.knobs.voters))
        for _ in range(self.knobs.voters + self.knobs.spares):
            node = self.add_node()
            if node.id in voters:
                for group in self.groups:
                    node.bootstrap(group, Configuration(voters=voters))
            node.start()

    def add_node(self) -> SimulatedNode:
        """Create a machine with an empty disk, under an id that was never used."""
        node = SimulatedNode(self, NodeId(len(self.nodes) + 1))
        self.nodes[node.id] = node
        return node

    def begin_load(self) -> None:
        """Start the clients."""
        for _ in range(self.knobs.producers):
            producer = self.add_producer(self.groups[len(self.producers) % len(self.groups)])
            self.spawn(producer.run())
        for number in range(self.knobs.readers):
            group = self.groups[number % len(self.groups)]
            self.readers.append(GroupReader(self, group, self.streams.stream(f"reader-{number}")))
            self.spawn(self.readers[-1].run())
        for number in range(self.knobs.consumers):
            self.consumers.append(make_consumer(self, self.groups[number % len(self.groups)], number))
            self.spawn(self.consumers[-1].run())

    def add_producer(self, group: GroupId) -> GroupProducer:
        """Return a new producer, which sends nothing by itself."""
        number = len(self.producers)
        producer = GroupProducer(self, group, ProducerId(number + 1), self.streams.stream(f"producer-{number}"))
        self.producers.append(producer)
        return producer

    async def end_load(self) -> None:
        """Let the clients finish what they have begun."""
        self.wants_load = False
        await asyncio.gather(*self._tasks)

    # -- targets ---------------------------------------------------------------------------------

    def serving_nodes(self) -> list[NodeId]:
        """Return the nodes that clients know."""
        return [node.id for node in self.live_nodes()]

    def pick_group(self, rng: Rng) -> GroupId:
        """Return any group."""
        return self.groups[rng.randrange(len(self.groups))]

    def pick_node(self, rng: Rng) -> SimulatedNode | None:
        """Return a target for a fault: a leader half of the time, else any node."""
        group = self.pick_group(rng)
        leader = find_leader(self, group)
        if leader is not None and rng.random() < 0.5:
            return leader[0]
        nodes = self.live_nodes()
        return nodes[rng.randrange(len(nodes))] if nodes else None

    def is_impatient(self) -> bool:
        """Return whether an operator proposes again although a change is under way."""
        return self._rng.random() < 0.3

    # -- the network -----------------------------------------------------------------------------

    def set_loss(self, share: float | None) -> None:
        """Lose a share of messages and calls; None: of messages what the knobs say."""
        super().set_loss(share)
        self.rpc.p_loss = share or 0.0

    def set_doubling(self, share: float | None) -> None:
        """Deliver a share of messages and calls twice; None: of messages what the knobs say."""
        super().set_doubling(share)
        self.rpc.p_double = share or 0.0

    def _heal_requests(self) -> None:
        self.is_healed = True
        self.rpc.p_loss = self.rpc.p_double = 0.0

    # -- the fault budget ------------------------------------------------------------------------

    def has_damaged_nodes(self) -> bool:
        """Return whether acknowledged bytes of some node may be damaged or gone."""
        self._refresh_damage()
        return bool(self.repairing) or any(node.is_damaged for node in self.live_nodes())

    def can_damage(self, node: SimulatedMachine) -> bool:
        """Return whether a node's disk may be damaged: a majority of every electorate keeps undamaged disks."""
        if self.operating:
            return False
        self._refresh_damage()
        damaged = {other.id for other in self.live_nodes() if other.is_damaged} | self.repairing | {node.id}
        for group in self.groups:
            leader = find_leader(self, group)
            if leader is None:
                return False
            configurations = leader[1].raft._state.log.configurations
            if configurations.active.is_joint or configurations.active_index > leader[1].commit_index:
                return False
            voters = configurations.active.voters
            if len(damaged.intersection(voters)) > (len(voters) - 1) // 2:
                return False
        return True

    def _refresh_damage(self) -> None:
        """Clear the mark of disks whose every byte has been restored."""
        for node in self.live_nodes():
            if node.is_damaged and node.is_running and len(node.replicas) == len(self.groups):
                node.is_damaged = not all(self._is_whole(node, group) for group in self.groups)

    def _is_whole(self, node: SimulatedNode, group: GroupId) -> bool:
        if node.replicas[group].member.raft_status().recovering:
            return False
        return verify_directory(node.disk.clone(), node.directory(group)).is_whole

    # -- the operator ----------------------------------------------------------------------------

    def _handle_replaced(self, lost: SimulatedMachine, successor: SimulatedNode) -> None:
        self.repairing.add(lost.id)
        self.spawn(repair(self, lost.id, successor.id))

    def _observe(self) -> None:
        node = self.loop.running_node
        if node is not None:
            self.observer.look(node)  # type: ignore[arg-type] # only nodes have scopes here

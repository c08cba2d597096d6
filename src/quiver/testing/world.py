"""A simulated cluster: nodes with the real core, driver and log, the network between them, and their clients.

It owns everything that a seed sets up, and offers what faults and clients need: to pick a node, to know whom
the atlas still allows to be damaged, to have a lost node replaced, and to heal it all. The phases of a run
are `Simulation`'s.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from quiver.clock import Rng
from quiver.model import ConsumerId, GroupId, NodeId, ProducerId
from quiver.raft import Configuration, Safeguard
from quiver.storage.inspect import verify_directory
from quiver.testing.checkers.observer import Observer
from quiver.testing.consumers import Keeper, Taker, make_consumer
from quiver.testing.history import History
from quiver.testing.latency import Latency
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import NetworkFaults, SimulatedNetwork
from quiver.testing.node import SimulatedNode
from quiver.testing.operations import find_leader, repair
from quiver.testing.randomness import RandomStreams
from quiver.testing.rpc import Courier
from quiver.testing.swarm import Knobs
from quiver.testing.trace import Trace
from quiver.testing.workload import ProducingClient, Reader

_RESTART_MS = (50, 1_500)
_GIVE_UP_WHEN_HEALED_MS = 120_000


class World:
    """One cluster and all that happens to it."""

    def __init__(
        self, loop: SimulatedLoop, trace: Trace, streams: RandomStreams, knobs: Knobs, disabled: frozenset[Safeguard]
    ) -> None:
        self.loop = loop
        self.trace = trace
        self.streams = streams
        self.knobs = knobs
        self.disabled = disabled
        self.groups = tuple(GroupId(number + 1) for number in range(knobs.groups))
        self.observer = Observer(self.groups, trace)
        self.history = History()
        rates = NetworkFaults(knobs.network_latency, knobs.p_loss, knobs.p_double)
        self.network = SimulatedNetwork(loop, streams.network, rates, keep_order=knobs.keep_order)
        self.courier = Courier(self, streams.stream("courier"))
        self.nodes: dict[NodeId, SimulatedNode] = {}
        self.producers: list[ProducingClient] = []
        self.readers: list[Reader] = []
        self.consumers: list[Taker | Keeper] = []
        self.wants_load = True
        self.is_healed = False
        self.voters_min = max(1, knobs.voters - 1)
        self.changes = 0
        self.operating = 0
        self.repairing: set[NodeId] = set()
        self._incarnation = 0
        self._consumer_ids = 0
        self._rng = streams.stream("world")
        self._tasks: list[asyncio.Task[Any]] = []
        loop.after_event(self._observe)

    @property
    def now_ms(self) -> int:
        """Return virtual time in milliseconds."""
        return self.loop.now_ns // 1_000_000

    @property
    def give_up_ms(self) -> int:
        """Return how long a producer tries to send a batch."""
        return _GIVE_UP_WHEN_HEALED_MS if self.is_healed else self.knobs.give_up_ms

    def next_consumer(self) -> ConsumerId:
        """Return an id that no consumer has had."""
        self._consumer_ids += 1
        return ConsumerId(self._consumer_ids)

    def next_incarnation(self) -> int:
        """Return a number for a node's new life."""
        self._incarnation += 1
        return self._incarnation

    # -- setting up ------------------------------------------------------------------------------

    def populate(self) -> None:
        """Make and start the nodes: the voters of every group, and spare ones."""
        voters = tuple(NodeId(number + 1) for number in range(self.knobs.voters))
        for _ in range(self.knobs.voters + self.knobs.spares):
            node = self._add_node()
            if node.id in voters:
                for group in self.groups:
                    node.bootstrap(group, Configuration(voters=voters))
            node.start()

    def begin_load(self) -> None:
        """Start the clients."""
        for number in range(self.knobs.producers):
            group = self.groups[number % len(self.groups)]
            producer = ProducingClient(self, group, ProducerId(number + 1), self.streams.stream(f"producer-{number}"))
            self.producers.append(producer)
            self.spawn(producer.run())
        for number in range(self.knobs.readers):
            group = self.groups[number % len(self.groups)]
            self.readers.append(Reader(self, group, self.streams.stream(f"reader-{number}")))
            self.spawn(self.readers[-1].run())
        for number in range(self.knobs.consumers):
            self.consumers.append(make_consumer(self, self.groups[number % len(self.groups)], number))
            self.spawn(self.consumers[-1].run())

    def probe(self, group: GroupId) -> ProducingClient:
        """Return a new producer that sends only when asked to."""
        number = len(self.producers)
        producer = ProducingClient(self, group, ProducerId(number + 1), self.streams.stream(f"producer-{number}"))
        self.producers.append(producer)
        return producer

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that belongs to no node; its failure ends the run."""
        # Whoever calls may belong to a node that is dying.
        self._tasks.append(self.loop.create_task(work, context=contextvars.Context()))

    def raise_failures(self) -> None:
        """Raise what a task of the world has failed with."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()

    async def end_load(self) -> None:
        """Let the clients finish what they have begun."""
        self.wants_load = False
        await asyncio.gather(*self._tasks)

    def _add_node(self) -> SimulatedNode:
        node = SimulatedNode(self, NodeId(len(self.nodes) + 1))
        self.nodes[node.id] = node
        return node

    def is_impatient(self) -> bool:
        """Tell whether an operator asks again although a change is under way."""
        return self._rng.random() < 0.3

    # -- choosing --------------------------------------------------------------------------------

    def live_nodes(self) -> list[SimulatedNode]:
        """Return the nodes that are not gone for good, running or not."""
        return [node for node in self.nodes.values() if not node.is_retired]

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

    # -- the network -----------------------------------------------------------------------------

    def set_latency(self, latency: Latency | None) -> None:
        """Let messages and calls take so long; None: as long as the knobs say."""
        self.network.rates.latency = latency or self.knobs.network_latency

    def set_loss(self, share: float | None) -> None:
        """Lose such a share of messages and calls; None: of messages what the knobs say."""
        self.network.rates.p_loss = self.knobs.p_loss if share is None else share
        self.courier.p_loss = share or 0.0

    def set_doubling(self, share: float | None) -> None:
        """Deliver such a share of messages and calls twice; None: of messages what the knobs say."""
        self.network.rates.p_double = self.knobs.p_double if share is None else share
        self.courier.p_double = share or 0.0

    # -- the atlas of damage ---------------------------------------------------------------------

    def has_tainted_nodes(self) -> bool:
        """Tell whether acknowledged bytes of some node may be damaged or gone."""
        self._refresh_taints()
        return bool(self.repairing) or any(node.is_tainted for node in self.live_nodes())

    def may_taint(self, node: SimulatedNode) -> bool:
        """Tell whether a node's disk may be damaged: a majority of every electorate stays whole."""
        if self.operating:
            return False
        self._refresh_taints()
        tainted = {other.id for other in self.live_nodes() if other.is_tainted} | self.repairing | {node.id}
        for group in self.groups:
            leader = find_leader(self, group)
            if leader is None:
                return False
            configurations = leader[1].raft._state.log.configurations
            if configurations.active.is_joint or configurations.active_index > leader[1].commit_index:
                return False
            voters = configurations.active.voters
            if len(tainted.intersection(voters)) > (len(voters) - 1) // 2:
                return False
        return True

    def _refresh_taints(self) -> None:
        """Trust those disks again whose every byte has been restored."""
        for node in self.live_nodes():
            if node.is_tainted and node.is_running and len(node.replicas) == len(self.groups):
                node.is_tainted = not all(self._is_whole(node, group) for group in self.groups)

    def _is_whole(self, node: SimulatedNode, group: GroupId) -> bool:
        if node.replicas[group].member.raft_status().recovering:
            return False
        return verify_directory(node.disk.clone(), node.directory(group)).is_whole

    # -- the supervisor and the operator ---------------------------------------------------------

    def restart_later(self, node: SimulatedNode) -> None:
        """Start a node that died by itself, after a while."""
        delay_ms = node.restart_after_ms or _RESTART_MS[0] + self._rng.randrange(_RESTART_MS[1])
        node.restart_after_ms = 0
        self.spawn(self._start_after(node, delay_ms))

    async def _start_after(self, node: SimulatedNode, delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        node.start()

    def replace(self, node: SimulatedNode) -> None:
        """Give a node up with its disk, and bring a new one in its place under a new id (R22)."""
        if node.is_retired:
            return
        node.retire()
        successor = self._add_node()
        self.trace.record("replace", self.now_ms, node.id, successor.id)
        self.repairing.add(node.id)
        successor.start()
        self.spawn(repair(self, node, successor))

    # -- healing ---------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults: the network carries, the disks work, every node that is not gone for good runs."""
        self.trace.record("heal", self.now_ms)
        self.is_healed = True
        self.network.heal()
        self.network.rates = NetworkFaults(self.knobs.network_latency)
        self.courier.p_loss = self.courier.p_double = 0.0
        for node in self.live_nodes():
            node.heal()

    def fault_counts(self) -> Counter[str]:
        """Return what disks and network did, by kind, beside what the nemesis planned."""
        counts: Counter[str] = Counter()
        for node in self.nodes.values():
            counts.update({f"disk_{kind}": count for kind, count in node.disk.faults.items()})
        counts.update({f"network_{kind}": count for kind, count in self.network.faults.items()})
        return counts

    def _observe(self) -> None:
        node = self.loop.running_node
        if node is not None:
            self.observer.look(node)  # type: ignore[arg-type] # only nodes have scopes here

"""A simulated cluster of whole nodes, its clients and its operator, and all that faults need of them.

It owns everything that a seed sets up: machines, network, transport, clients and the history that they write. The
phases of a run are `simulation`'s.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from quiver.client.cluster import AsyncCluster
from quiver.clock import Rng
from quiver.config import NodeSettings, Settings
from quiver.metadata import View
from quiver.model import GroupId, NodeId
from quiver.partition import Replica
from quiver.testing.clock import SimulatedClock
from quiver.testing.clusters.environment import Medium
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.swarm import ClusterKnobs
from quiver.testing.finding import require
from quiver.testing.judge import Recorder
from quiver.testing.latency import Latency
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import NetworkFaults, SimulatedNetwork
from quiver.testing.randomness import RandomStreams
from quiver.testing.trace import Trace
from quiver.testing.transport import SimulatedTransport, TransportFaults

DATA = "/data"
_RESTART_MS = (50, 1_500)
_HOSTS_MAX = 10
"""A cluster never has more machines, those that are gone included."""


class ClusterWorld:
    """One cluster and all that happens to it."""

    def __init__(self, loop: SimulatedLoop, trace: Trace, streams: RandomStreams, knobs: ClusterKnobs) -> None:
        self.loop = loop
        self.trace = trace
        self.streams = streams
        self.knobs = knobs
        self.network = SimulatedNetwork(loop, streams.network, keep_order=knobs.keep_order)
        self.transport = SimulatedTransport(loop, self.network, streams.stream("transport"))
        self.medium = Medium(self.network, self.transport)
        self.history = io.StringIO()
        self.recorder = Recorder(self.history, lambda: loop.now_ns)
        self.hosts: dict[NodeId, SimulatedHost] = {}
        self.counts: Counter[str] = Counter()
        """What clients and operators did, by kind and outcome."""
        self.is_over = False
        """Whether clients are to end."""
        self.digests: dict[int, str] = {}
        """The metadata's digest at each index that some node was seen at."""
        self._incarnation = 0
        self._rng = streams.stream("world")
        self._tasks: list[asyncio.Task[Any]] = []
        self._set_usual_rates()

    @property
    def now_ms(self) -> int:
        """Return virtual time in milliseconds."""
        return self.loop.now_ns // 1_000_000

    def next_incarnation(self) -> int:
        """Return a number for a node's new life."""
        self._incarnation += 1
        return self._incarnation

    # -- setting up ------------------------------------------------------------------------------

    def populate(self) -> None:
        """Make and start the nodes: managers, which are brokers too, and plain brokers."""
        for number in range(self.knobs.managers + self.knobs.brokers):
            self.add_host(is_manager=number < self.knobs.managers).start()

    def add_host(self, *, is_manager: bool = False) -> SimulatedHost:
        """Make a machine with an empty disk, under an id that nobody has had."""
        host = SimulatedHost(self, NodeId(len(self.hosts) + 1), is_manager=is_manager)
        self.hosts[host.id] = host
        return host

    @property
    def has_room(self) -> bool:
        """Tell whether one more machine may be added."""
        return len(self.hosts) < _HOSTS_MAX

    def settings_of(self, host: SimulatedHost) -> Settings:
        """Return what a node is started with."""
        join = ",".join(f"{host.id}@{host.address}" for host in self.hosts.values() if host.is_manager)
        node = NodeSettings(
            id=host.id,
            cluster="simulated",
            roles="manager,broker" if host.is_manager else "broker",
            data=DATA,
            wire=host.address,
            join=join,
        )
        return msgspec.structs.replace(self.knobs.settings, node=node)

    def connect(self, name: str) -> AsyncCluster:
        """Return the SDK for one client, which knows the managers' addresses."""
        addresses = [f"quiver://{host.address}" for host in self.hosts.values() if host.is_manager]
        return AsyncCluster(
            addresses,
            transport=self.transport.port(name=name),
            clock=SimulatedClock(self.loop),
            rng=self.streams.stream(f"sdk-{name}"),
            options=self.knobs.client,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that belongs to no node; its failure ends the run."""
        # Whoever calls may belong to a node that is dying.
        task = self.loop.create_task(work, context=contextvars.Context())
        self._tasks.append(task)
        return task

    def raise_failures(self) -> None:
        """Raise what a task of the world has failed with."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()
        self._tasks = [task for task in self._tasks if not task.done()]

    # -- choosing --------------------------------------------------------------------------------

    def live_nodes(self) -> list[SimulatedHost]:
        """Return the machines that are not gone for good, running or not."""
        return [host for host in self.hosts.values() if not host.is_retired]

    def running(self) -> list[SimulatedHost]:
        """Return the machines whose node runs."""
        return [host for host in self.hosts.values() if host.is_running]

    def pick_node(self, rng: Rng) -> SimulatedHost | None:
        """Return a target for a fault: the primary a third of the time, else any node."""
        primary = self.primary()
        if primary is not None and rng.random() < 0.33:
            return primary
        nodes = self.live_nodes()
        return nodes[rng.randrange(len(nodes))] if nodes else None

    def primary(self) -> SimulatedHost | None:
        """Return who leads the managers, if somebody does."""
        return next((host for host in self.running() if host.node and host.node._store.is_primary), None)

    def view(self) -> View | None:
        """Return the metadata as the node knows it that knows most."""
        views = [host.node._store.view() for host in self.running() if host.node is not None]
        return max(views, key=lambda view: view.index, default=None)

    def replicas(self, host: SimulatedHost) -> dict[GroupId, Replica]:
        """Return the open replicas of a node, by group."""
        node = host.node
        if node is None:
            return {}
        return {held.group: replica for held, replica in node._broker._table.open_replicas()}

    def leader(self, group: GroupId) -> tuple[SimulatedHost, Replica] | None:
        """Return who leads a partition's group with the newest term, if somebody does."""
        found = [
            (host, replica)
            for host in self.running()
            if (replica := self.replicas(host).get(group)) is not None and replica.member.is_leader
        ]
        return max(found, key=lambda pair: pair[1].member.term, default=None)

    # -- the atlas of damage ---------------------------------------------------------------------

    def may_taint(self, host: SimulatedHost) -> bool:
        """Tell whether a disk may be lost: a majority of the managers and of every partition's voters stays whole."""
        view = self.view()
        gone = {other.id for other in self.hosts.values() if other.is_retired or other.is_tainted} | {host.id}
        managers = {other.id for other in self.hosts.values() if other.is_manager}
        if view is None or self.is_over or not self.has_room or _is_majority(gone & managers, managers):
            return False
        for partition in view.partitions.values():
            leader = self.leader(partition.group_id)
            if leader is None:
                return False
            configurations = leader[1].member.raft._state.log.configurations
            if configurations.active.is_joint or configurations.active_index > leader[1].member.commit_index:
                return False
            voters = set(configurations.active.voters)
            if _is_majority(gone & voters, voters) or set(partition.replicas) != voters:
                return False
        return True

    # -- the supervisor and the operator ---------------------------------------------------------

    def restart_later(self, host: SimulatedHost) -> None:
        """Start a node that ended by itself, after a while."""
        delay_ms = host.restart_after_ms or _RESTART_MS[0] + self._rng.randrange(_RESTART_MS[1])
        host.restart_after_ms = 0
        self.spawn(self._start_after(host, delay_ms))

    async def _start_after(self, host: SimulatedHost, delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        host.start()

    def replace(self, host: SimulatedHost) -> None:
        """Give a node up with its disk, and bring a new broker under a new id (R22)."""
        if not host.is_retired:
            host.retire()
            successor = self.add_host()
            self.trace.record("replace", self.now_ms, host.id, successor.id)
            successor.start()

    # -- the network -----------------------------------------------------------------------------

    def _set_usual_rates(self) -> None:
        knobs = self.knobs
        self.network.rates = NetworkFaults(knobs.network_latency, knobs.p_loss, knobs.p_double)
        self.transport.rates = TransportFaults(knobs.network_latency, knobs.p_break, knobs.p_break)

    def set_latency(self, latency: Latency | None) -> None:
        """Let messages and requests take so long; None: as long as the knobs say."""
        self.network.rates.latency = self.transport.rates.latency = latency or self.knobs.network_latency

    def set_loss(self, share: float | None) -> None:
        """Lose such a share of Raft's messages; None: what the knobs say."""
        self.network.rates.p_loss = self.knobs.p_loss if share is None else share

    def set_doubling(self, share: float | None) -> None:
        """Deliver such a share of Raft's messages twice; None: what the knobs say."""
        self.network.rates.p_double = self.knobs.p_double if share is None else share

    def set_breaks(self, share: float | None) -> None:
        """Break such a share of connections with a request, or its answer, on the way; None: what the knobs say."""
        share = self.knobs.p_break if share is None else share
        self.transport.rates.p_break_before = self.transport.rates.p_break_after = share

    # -- healing and looking ---------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults: the network carries, the disks work, every node that is not gone for good runs."""
        self.trace.record("heal", self.now_ms)
        self.network.heal()
        self.network.rates = NetworkFaults(self.knobs.network_latency)
        self.transport.rates = TransportFaults(self.knobs.network_latency)
        for host in self.live_nodes():
            if host.is_tainted:
                self.replace(host)
            else:
                host.heal()

    def compare_metadata(self) -> None:
        """Demand that all nodes have the same metadata at the same index, in memory, now and ever."""
        for host in self.running():
            assert host.node is not None
            view = host.node._store.view()
            digest = self.digests.setdefault(view.index, view.digest())
            require(digest == view.digest(), "F2", "two nodes' metadata differ", node=host.id, index=view.index)

    def close(self) -> None:
        """Free what the machines hold, at the end of the run."""
        for host in self.hosts.values():
            host.database.dispose()

    def fault_counts(self) -> Counter[str]:
        """Return what disks, databases, network and transport did, by kind, beside what the nemesis planned."""
        counts: Counter[str] = Counter()
        for host in self.hosts.values():
            counts.update({f"disk_{kind}": count for kind, count in host.disk.faults.items()})
            counts.update({f"database_{kind}": count for kind, count in host.database.faults.items()})
        counts.update({f"network_{kind}": count for kind, count in self.network.faults.items()})
        counts.update({f"requests_{kind}": count for kind, count in self.transport.faults.items()})
        return counts


def _is_majority(part: set[NodeId], whole: set[NodeId]) -> bool:
    return len(part) > (len(whole) - 1) // 2

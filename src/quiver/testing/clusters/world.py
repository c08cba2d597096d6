"""A world of whole nodes, their clients and their operator.

It adds to `SimulatedWorld` what only clusters have: requests between nodes, databases, SDK clients with their recorded
history, and the fault budget over managers and partitions.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from quiver.client.cluster import AsyncCluster
from quiver.clock import Rng
from quiver.config import EncryptionSettings, NodeSettings, Settings
from quiver.metadata import BrokerState, View
from quiver.model import GroupId, NodeId
from quiver.partition import Replica
from quiver.testing.clock import DEFAULT_WALL_START_MS, SimulatedClock
from quiver.testing.clusters.host import Medium, SimulatedHost
from quiver.testing.clusters.swarm import ClusterKnobs
from quiver.testing.history import CheckResult, Recorder
from quiver.testing.randomness import Latency
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.simulator.report import require
from quiver.testing.simulator.world import SimulatedWorld, SimulationRun
from quiver.testing.transport import SimulatedTransport, TransportFaults

if TYPE_CHECKING:
    from quiver.testing.clusters.clients import ClientWorkload

DATA = "/data"
_HOSTS_MAX = 10
"""A cluster never has more machines, retired ones included."""
_DRIFT_MS_MAX = 100
"""How far clocks may drift between two looks at them, and what rounding adds."""
_LOOK_MS_MAX = 1_000
"""Time between two looks at the metadata after which too much may have happened in between to say what was first."""


class ClusterWorld(SimulatedWorld[ClusterKnobs, SimulatedHost]):
    """The machines of one run, their nodes and their clients."""

    def __init__(self, run: SimulationRun, knobs: ClusterKnobs) -> None:
        super().__init__(run, knobs)
        self.transport = SimulatedTransport(run.loop, self.network, run.streams.stream("transport"))
        self.transport.rates = TransportFaults(knobs.network_latency, knobs.p_break, knobs.p_break)
        self.medium = Medium(self.network, self.transport)
        self.history = io.StringIO()
        self.recorder = Recorder(self.history, lambda: run.loop.now_ns)
        self.clients: list[ClientWorkload] = []
        self.client_tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[str] = Counter()
        """Calls of clients and operators, by kind and outcome."""
        self.is_changing_managers = False
        """Whether an operator is changing the managers; no disk is lost meanwhile."""
        self.is_adding_partitions = False
        """Whether an operator is adding partitions; no disk is lost meanwhile."""
        self.leaving: set[NodeId] = set()
        """The brokers whose drain is in flight, or has an unknown outcome."""
        self.is_healed = False
        """Whether all faults are over: processes of clients are neither killed nor stopped any more."""
        self.is_over = False
        """Whether clients are to end."""
        self.clocks = ClockErrors(self)
        self.too_old: list[tuple[NodeId, int]] = []
        """The nodes that ended because their program is too old, with the level that it knew."""
        self.check_result: CheckResult | None = None
        """The result of the history check, once it was made."""
        self._seen: tuple[View, int] | None = None
        """The newest metadata that any check saw, and when it was last seen."""
        self.digests: dict[int, str] = {}
        """The metadata's digest at each index that a node was seen at."""

    # -- setting up ------------------------------------------------------------------------------

    def populate(self) -> None:
        """Create and start the nodes: managers, which are brokers too, and plain brokers."""
        for number in range(self.knobs.managers + self.knobs.brokers):
            self.add_node(is_manager=number < self.knobs.managers).start()

    def add_node(self, *, is_manager: bool = False) -> SimulatedHost:
        """Create a machine with an empty disk, under an id that was never used."""
        host = SimulatedHost(self, NodeId(len(self.nodes) + 1), is_manager=is_manager)
        self.nodes[host.id] = host
        self.clocks.level(host)
        return host

    @property
    def has_room(self) -> bool:
        """Return whether one more machine may be added."""
        return len(self.nodes) < _HOSTS_MAX

    def settings_of(self, host: SimulatedHost) -> Settings:
        """Return what a node is started with: the first managers know one another, others know who is there today."""
        known = [other for other in self.nodes.values() if other.is_manager]
        if not host.is_manager:
            today = [other for other in self.live_nodes() if other is not host and self.is_seed(other)]
            known = today or known
        join = ",".join(f"{other.id}@{other.address}" for other in known)
        node = NodeSettings(
            id=host.id,
            cluster="simulated",
            roles="manager,broker",
            data=DATA,
            wire=host.address,
            join=join,
        )
        encryption = EncryptionSettings(key_file="simulated" if self.knobs.encrypts else "")
        return msgspec.structs.replace(self.knobs.settings, node=node, encryption=encryption)

    def connect(self, name: str) -> AsyncCluster:
        """Return the SDK for one client, which knows the addresses of managers, old and new."""
        addresses = [f"quiver://{host.address}" for host in self.nodes.values() if self.is_seed(host)]
        return AsyncCluster(
            addresses,
            transport=self.transport.port(name=name),
            clock=SimulatedClock(self.loop),
            rng=self.streams.stream(f"sdk-{name}"),
            options=self.knobs.client,
        )

    # -- targets ---------------------------------------------------------------------------------

    def running(self) -> list[SimulatedHost]:
        """Return the machines whose node runs."""
        return [host for host in self.nodes.values() if host.is_running]

    def pick_node(self, rng: Rng) -> SimulatedHost | None:
        """Return a target for a fault: the primary a third of the time, else any node."""
        primary = self.primary()
        if primary is not None and rng.random() < 0.33:
            return primary
        nodes = self.live_nodes()
        return nodes[rng.randrange(len(nodes))] if nodes else None

    def is_seed(self, host: SimulatedHost) -> bool:
        """Return whether operators tell nodes and clients of this host: it is a manager, or was one of the first."""
        return host.is_manager or host.id in self.managers()

    def managers(self) -> set[NodeId]:
        """Return the managers, as the primary knows them; empty without a primary or while they change."""
        primary = self.primary()
        store = None if primary is None or primary.node is None else primary.node._store
        if store is None or store.members != store.committed_members or store.members.is_joint:
            return set()
        return set(store.members.voters)

    def primary(self) -> SimulatedHost | None:
        """Return the primary's host, if there is a primary."""
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
        """Return the host and replica that lead a partition's group with the newest term, if any."""
        found = [
            (host, replica)
            for host in self.running()
            if (replica := self.replicas(host).get(group)) is not None and replica.member.is_leader
        ]
        return max(found, key=lambda pair: pair[1].member.term, default=None)

    # -- the fault budget ------------------------------------------------------------------------

    def can_damage(self, node: SimulatedMachine) -> bool:
        """Return whether a disk may be lost: a majority of managers and of each partition's voters stays undamaged.

        A voter from which the leader has never heard does not count: the replica of a new partition that is created
        late, after the first leader was reported, neither votes nor has data until a leader reaches it.
        """
        view = self.view()
        gone = self._damaged() | {node.id}
        managers = self.managers()
        if view is None or self.is_over or not self.has_room:
            return False
        if self.is_changing_managers or self.is_adding_partitions:
            return False
        if not managers or _is_majority(gone & managers, managers):
            return False
        for partition in view.partitions.values():
            leader = self.leader(partition.group_id)
            if leader is None:
                return False
            configurations = leader[1].member.raft._state.log.configurations
            if configurations.active.is_joint or configurations.active_index > leader[1].member.commit_index:
                return False
            voters = set(configurations.active.voters)
            unheard = {peer.node for peer in leader[1].member.raft.status().peers if not peer.match_index}
            if _is_majority((gone | unheard) & voters, voters) or set(partition.replicas) != voters:
                return False
        return True

    def are_losses_known(self) -> bool:
        """Return whether the metadata places nothing on a disk that is lost; it notices a loss after a while."""
        view, trusted = self.view(), (BrokerState.ALIVE, BrokerState.SUSPECT)
        if view is None:
            return False
        return not any(node in view.brokers and view.brokers[node].state in trusted for node in self._damaged())

    def _damaged(self) -> set[NodeId]:
        return {node.id for node in self.nodes.values() if node.is_retired or node.is_damaged}

    # -- the network -----------------------------------------------------------------------------

    def set_latency(self, latency: Latency | None) -> None:
        """Set the latency of messages and requests; None: what the knobs say."""
        super().set_latency(latency)
        self.transport.rates.latency = self.network.rates.latency

    def set_breaks(self, share: float | None) -> None:
        """Break such a share of connections with a request, or its answer, on the way; None: what the knobs say."""
        share = self.knobs.p_break if share is None else share
        self.transport.rates.p_break_before = self.transport.rates.p_break_after = share

    def _heal_requests(self) -> None:
        self.transport.rates = TransportFaults(self.knobs.network_latency)

    def _heal_node(self, node: SimulatedHost) -> None:
        if node.is_damaged:
            self.replace(node)
        else:
            node.heal()

    # -- checks and counts -----------------------------------------------------------------------

    def check(self) -> None:
        """Raise the failure of a task, and compare the nodes' metadata."""
        super().check()
        self.clocks.look()
        self.compare_metadata()
        for host in self.running():
            self._check_faults(host)
        self._show_clients()

    def _show_clients(self) -> None:
        """Let clients compare the newest metadata with what they did."""
        view, seen = self.view(), self._seen
        if view is None or (seen is not None and view.index < seen[0].index):
            return  # those who know more are down
        self._seen = (view, self.now_ms)
        if seen is not None and self.now_ms - seen[1] <= _LOOK_MS_MAX:
            for client in self.clients:
                client.watch(view, seen[0])

    def _check_faults(self, host: SimulatedHost) -> None:
        """Demand that only injected errors stop a partition, and that the metadata's code fails on no command."""
        assert host.node is not None
        status = host.node._broker.status()
        problems = [item.problem for item in status.unusable]
        require(status.stops <= host.stops_injected, "F3", f"a partition stopped: {problems}", node=host.id)
        machine = host.node._store.machine
        require(not machine.defects, "F3", "the code of the metadata fails on a command", node=host.id)

    def compare_metadata(self) -> None:
        """Demand that all nodes have the same metadata at the same index, in memory, now and ever."""
        for host in self.running():
            assert host.node is not None
            view = host.node._store.view()
            digest = view.digest()
            known = self.digests.setdefault(view.index, digest)
            require(digest == known, "F2", "two nodes' metadata differ", node=host.id, index=view.index)

    def fault_counts(self) -> Counter[str]:
        """Return how often disks, databases, network and requests failed, by kind, besides the schedule's faults."""
        counts = super().fault_counts()
        for host in self.nodes.values():
            counts.update({f"database_{kind}": count for kind, count in host.database.faults.items()})
        counts.update({f"requests_{kind}": count for kind, count in self.transport.faults.items()})
        return counts

    def close(self) -> None:
        """Free the databases, after the run."""
        for host in self.nodes.values():
            host.database.dispose()


class ClockErrors:
    """By how much the wall clocks of the nodes were wrong so far."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._behind_ms = 0
        self._ahead_ms = 0
        self._lead_ms = 0

    def look(self) -> None:
        """Look at all clocks, which must be done often: they drift."""
        for host in self._world.nodes.values():
            drifted_ms, (behind_ms, ahead_ms) = host.clock.drifted_ms(), host.clock.jumps_ms
            self._behind_ms = min(self._behind_ms, drifted_ms + behind_ms)
            self._ahead_ms = max(self._ahead_ms, drifted_ms + ahead_ms)

    @property
    def error_ms(self) -> int:
        """Return by how much two readings of wall clocks, at any time, differ at most from the time between them."""
        self.look()
        return self._ahead_ms - self._behind_ms + _DRIFT_MS_MAX

    def level_all(self) -> None:
        """Set every clock, now and later, to the furthest that any was: what was promised for then is due soon."""
        self.look()
        self._lead_ms = self._ahead_ms
        for host in self._world.nodes.values():
            self.level(host)

    def level(self, host: SimulatedHost) -> None:
        """Set one clock, once that was decided for all."""
        lead_ms = host.clock.wall_ms() - (DEFAULT_WALL_START_MS + self._world.now_ms)
        if self._lead_ms > lead_ms:
            host.clock.jump_wall(self._lead_ms - lead_ms)


def _is_majority(part: set[NodeId], whole: set[NodeId]) -> bool:
    return len(part) > (len(whole) - 1) // 2

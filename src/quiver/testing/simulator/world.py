"""What a seed sets up: its knobs, the loop, the network, the machines on it, and the supervisor and operator.

`SimulatedWorld` is the part that both models share, and the interface that faults use. The model's own world adds its
kind of machine, its clients and its checks.

Swarm testing: a run with every fault at once explores less than many runs with a few faults each, because faults hide
each other. Each seed therefore picks a size, knobs that make rare things common (tiny segments, tiny caches, short
timeouts) and a mix of fault kinds.
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from quiver.clock import Rng
from quiver.model import NodeId
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import NetworkFaults, SimulatedNetwork
from quiver.testing.randomness import Latency, RandomStreams
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.trace import Trace

T = TypeVar("T")

NEAR: Final = Latency(0.1, 1.0)
FAR: Final = Latency(0.5, 10.0)
JITTERY: Final = Latency(0.1, 2.0, 0.01, 300.0)

QUICK_DISK: Final = Latency(0.05, 1.0)
PLAIN_DISK: Final = Latency(0.2, 5.0)
STALLING_DISK: Final = Latency(0.05, 2.0, 0.002, 1_500.0)

_RESTART_MS = (50, 1_500)
_CHECK_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationKnobs:
    """Knobs of one seed that every model has: its machines, its network and its faults."""

    disk_latency: Latency
    disk_workers: int
    network_latency: Latency
    p_loss: float
    p_double: float
    keep_order: bool
    chaos_ms: int
    """How long new faults are injected."""
    gap_ms: int
    """About how long it is from one fault to the next."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """The fault kinds that are on, with how often each is drawn."""
    drifts_ppm: tuple[int, ...] = ()
    disk_queue_max: int | None = None
    """Bound of each lane of the executor."""

    def drift_ppm(self, node: NodeId) -> int:
        """Return a node's initial clock drift."""
        return self.drifts_ppm[node % len(self.drifts_ppm)]


def pick(rng: Rng, choices: tuple[T, ...]) -> T:
    """Draw one of several choices."""
    return choices[rng.randrange(len(choices))]


def between(rng: Rng, bounds: tuple[int, int]) -> int:
    """Draw a whole number within bounds, both inclusive."""
    return bounds[0] + rng.randrange(bounds[1] - bounds[0] + 1)


K = TypeVar("K", bound=SimulationKnobs)
M = TypeVar("M", bound=SimulatedMachine)


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """What every run has: its loop, its trace and its random streams."""

    loop: SimulatedLoop
    trace: Trace
    streams: RandomStreams


class SimulatedWorld(ABC, Generic[K, M]):
    """The machines of one run, and everything that happens to them."""

    def __init__(self, run: SimulationRun, knobs: K) -> None:
        self.loop = run.loop
        self.trace = run.trace
        self.streams = run.streams
        self.knobs: K = knobs
        self.network = SimulatedNetwork(
            run.loop, run.streams.network, self._usual_faults(), keep_order=knobs.keep_order
        )
        self.nodes: dict[NodeId, M] = {}
        self._incarnation = 0
        self._rng = run.streams.stream("world")
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def now_ms(self) -> int:
        """Return virtual time in milliseconds."""
        return self.loop.now_ns // 1_000_000

    def next_incarnation(self) -> int:
        """Return a number for a node's new process."""
        self._incarnation += 1
        return self._incarnation

    @abstractmethod
    def populate(self) -> None:
        """Create and start the first machines."""

    @abstractmethod
    def add_node(self) -> M:
        """Create a machine with an empty disk, under an id that was never used."""

    # -- tasks -----------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that belongs to no node; its failure ends the run."""
        # An empty context: the caller may run in the scope of a node that is being killed.
        task = self.loop.create_task(work, context=contextvars.Context())
        self._tasks.append(task)
        return task

    def check(self) -> None:
        """Raise the failure of a task of the world; models add the checks that hold at any time."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()

    async def wait_checked(self) -> None:
        """Let one check interval pass, then check."""
        await asyncio.sleep(_CHECK_INTERVAL_S)
        self.check()

    # -- targets of faults -----------------------------------------------------------------------

    def live_nodes(self) -> list[M]:
        """Return the machines that are not retired, running or not."""
        return [node for node in self.nodes.values() if not node.is_retired]

    @abstractmethod
    def pick_node(self, rng: Rng) -> M | None:
        """Return a target for a fault: often a leader, else any machine."""

    @abstractmethod
    def can_damage(self, node: SimulatedMachine) -> bool:
        """Return whether the fault budget allows it: a majority of every electorate keeps undamaged disks."""

    # -- the supervisor and the operator ---------------------------------------------------------

    def restart_later(self, node: SimulatedMachine) -> None:
        """Restart a node that ended by itself, after a delay."""
        delay_ms = node.restart_after_ms or _RESTART_MS[0] + self._rng.randrange(_RESTART_MS[1])
        node.restart_after_ms = 0
        self.spawn(self._start_after(node, delay_ms))

    async def _start_after(self, node: SimulatedMachine, delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        node.start()

    def replace(self, node: SimulatedMachine) -> None:
        """Retire a machine with its disk and bring a new one under a new id (R22)."""
        if node.is_retired:
            return
        node.retire()
        successor = self.add_node()
        self.trace.record("replace", self.now_ms, node.id, successor.id)
        successor.start()
        self._handle_replaced(node, successor)

    def _handle_replaced(self, lost: SimulatedMachine, successor: M) -> None:
        """Do what the operator does once the new machine is up."""

    # -- the network -----------------------------------------------------------------------------

    def _usual_faults(self) -> NetworkFaults:
        return NetworkFaults(self.knobs.network_latency, self.knobs.p_loss, self.knobs.p_double)

    def set_latency(self, latency: Latency | None) -> None:
        """Set the latency of messages and requests; None: what the knobs say."""
        self.network.rates.latency = latency or self.knobs.network_latency

    def set_loss(self, share: float | None) -> None:
        """Lose a share of the messages; None: what the knobs say."""
        self.network.rates.p_loss = self.knobs.p_loss if share is None else share

    def set_doubling(self, share: float | None) -> None:
        """Deliver a share of the messages twice; None: what the knobs say."""
        self.network.rates.p_double = self.knobs.p_double if share is None else share

    # -- the end ---------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults: the network delivers, the disks work, every machine that is not retired runs."""
        self.trace.record("heal", self.now_ms)
        self.network.heal()
        self.network.rates = NetworkFaults(self.knobs.network_latency)
        self._heal_requests()
        for node in self.live_nodes():
            self._heal_node(node)

    @abstractmethod
    def _heal_requests(self) -> None:
        """Let every request of a client arrive."""

    def _heal_node(self, node: M) -> None:
        node.heal()

    def fault_counts(self) -> Counter[str]:
        """Return how often disks and network failed, by kind, besides the schedule's faults."""
        counts: Counter[str] = Counter()
        for node in self.nodes.values():
            counts.update({f"disk_{kind}": count for kind, count in node.disk.faults.items()})
        counts.update({f"network_{kind}": count for kind, count in self.network.faults.items()})
        return counts

    def close(self) -> None:
        """Free what the machines hold, after the run."""

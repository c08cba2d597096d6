"""What a fault has in hand when it strikes: the world, a stream of chance of its own, and how long it lasts.

`Machine` and `Grounds` are what faults need of a node and of a world. Two worlds offer it: `world.World`, whose nodes
are bare Raft members, and `clusters.world.ClusterWorld`, whose nodes are whole ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from quiver.clock import Rng
from quiver.model import NodeId
from quiver.testing.clock import SimulatedClock
from quiver.testing.disk import SimulatedDisk
from quiver.testing.latency import Latency
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import SimulatedNetwork
from quiver.testing.randomness import RandomStreams
from quiver.testing.trace import Trace


class Machine(Protocol):
    """A node as faults see it: a process on a machine with a disk and clocks."""

    is_tainted: bool
    """Whether acknowledged bytes on its disk may be damaged."""
    restart_after_ms: int
    """When to start again after a planned power loss; 0: when the supervisor likes."""

    @property
    def id(self) -> NodeId:
        """Return the node's id."""
        ...

    @property
    def disk(self) -> SimulatedDisk:
        """Return the disk, which outlives processes."""
        ...

    @property
    def clock(self) -> SimulatedClock:
        """Return the clock, which outlives processes."""
        ...

    @property
    def is_up(self) -> bool:
        """Tell whether there is a process, be it paused."""
        ...

    def start(self) -> None:
        """Begin a new life, unless there is one or there must be none."""
        ...

    def kill(self, *, power_loss: bool) -> None:
        """End the life at once: the process alone, or the whole machine."""
        ...

    def pause(self) -> None:
        """Stop the node's code, as SIGSTOP does."""
        ...

    def resume(self) -> None:
        """Let the node's code go on."""
        ...

    def set_disk_latency(self, factor: float) -> None:
        """Slow the disk down by a factor."""
        ...

    def may_be_damaged(self) -> bool:
        """Tell whether losing what is on its disk leaves a majority of every electorate whole."""
        ...

    def wipe(self) -> None:
        """Lose the disk's content, but come back under the same id as if nothing had been (R22 forbids it)."""
        ...

    def replace(self) -> None:
        """Give the node up with its disk, and bring a new one in its place under a new id (R22)."""
        ...


class Grounds(Protocol):
    """A world as faults see it."""

    loop: SimulatedLoop
    trace: Trace
    streams: RandomStreams
    network: SimulatedNetwork

    @property
    def now_ms(self) -> int:
        """Return virtual time in milliseconds."""
        ...

    def live_nodes(self) -> Sequence[Machine]:
        """Return the nodes that are not gone for good, running or not."""
        ...

    def pick_node(self, rng: Rng) -> Machine | None:
        """Return a target for a fault."""
        ...

    def set_latency(self, latency: Latency | None) -> None:
        """Let messages and calls take so long; None: as long as they usually do."""
        ...

    def set_loss(self, share: float | None) -> None:
        """Lose such a share of messages and calls; None: as many as usual."""
        ...

    def set_doubling(self, share: float | None) -> None:
        """Deliver such a share of messages twice; None: as many as usual."""
        ...


W = TypeVar("W", bound=Grounds, covariant=True)


@dataclass(frozen=True, slots=True)
class Strike(Generic[W]):
    """One fault at work."""

    world: W
    rng: Rng
    duration_ms: int

    async def last(self) -> None:
        """Wait until the fault is over."""
        await asyncio.sleep(self.duration_ms / 1000)

    def pick_node(self) -> Machine | None:
        """Return a target: a leader half of the time, else any node."""
        return self.world.pick_node(self.rng)

    def chance(self, probability: float) -> bool:
        """Tell whether something of this probability happens."""
        return self.rng.random() < probability

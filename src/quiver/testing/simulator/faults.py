"""The fault kinds that both models share: of processes and clocks, of the network, and of disks.

A fault gets the world, a random stream of its own and its duration. A disk error is not damage: what was durable stays
durable. Bit flips and lost disks are damage, and the fault budget alone allows them (`SimulatedWorld.can_damage`):
while acknowledged bytes of one machine may be gone, a majority of every electorate keeps all of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from quiver.clock import Rng
from quiver.model import NodeId
from quiver.testing.disk_faults import DiskOperation, Moment
from quiver.testing.randomness import Latency
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.simulator.world import SimulatedWorld

AnyWorld = SimulatedWorld[Any, Any]
W = TypeVar("W", bound=AnyWorld, covariant=True)
Pair = tuple[NodeId, NodeId]

_MOMENTS: Final[tuple[Moment, ...]] = ("before", "during", "after")
_CHANGES: Final[tuple[DiskOperation, ...]] = ("write", "write", "write", "create", "rename", "remove", "truncate")


@dataclass(frozen=True, slots=True)
class FaultInjection(Generic[W]):
    """One fault while it is injected."""

    world: W
    rng: Rng
    duration_ms: int

    async def wait_over(self) -> None:
        """Wait until the fault's duration is over."""
        await asyncio.sleep(self.duration_ms / 1000)

    def pick_node(self) -> SimulatedMachine | None:
        """Return a target: often a leader, else any machine."""
        node: SimulatedMachine | None = self.world.pick_node(self.rng)
        return node

    def chance(self, probability: float) -> bool:
        """Return whether something of this probability happens."""
        return self.rng.random() < probability


# -- processes and clocks ----------------------------------------------------------------------------


async def kill(fault: FaultInjection[AnyWorld]) -> None:
    """Kill a process and start it again."""
    await _down(fault, fault.pick_node(), power_loss=False)


async def power_loss(fault: FaultInjection[AnyWorld]) -> None:
    """Cut a machine's power and restore it."""
    await _down(fault, fault.pick_node(), power_loss=True)


async def power_loss_at_operation(fault: FaultInjection[AnyWorld]) -> None:
    """Cut a machine's power in the middle of one of its next disk operations."""
    node = fault.pick_node()
    if node is not None and node.is_up:
        node.restart_after_ms = fault.duration_ms
        moment = _MOMENTS[fault.rng.randrange(3)]
        node.disk.crash_after(1 + fault.rng.randrange(12), moment=moment, written_share=fault.rng.random())


async def kill_all(fault: FaultInjection[AnyWorld]) -> None:
    """Kill every process at the same moment."""
    await _all_down(fault, power_loss=False)


async def power_loss_all(fault: FaultInjection[AnyWorld]) -> None:
    """Cut the power of every machine at the same moment."""
    await _all_down(fault, power_loss=True)


async def pause(fault: FaultInjection[AnyWorld]) -> None:
    """Pause a process and resume it later."""
    node = fault.pick_node()
    if node is not None:
        node.pause()
        await fault.wait_over()
        node.resume()


async def clock_jump(fault: FaultInjection[AnyWorld]) -> None:
    """Move a node's wall clock by up to ten minutes."""
    node = fault.pick_node()
    if node is not None:
        node.clock.jump_wall(fault.rng.randrange(1_200_000) - 600_000)


async def clock_drift(fault: FaultInjection[AnyWorld]) -> None:
    """Make a node's clocks drift by up to ten percent."""
    node = fault.pick_node()
    if node is not None:
        node.clock.set_drift(fault.rng.randrange(200_000) - 100_000)


async def _down(fault: FaultInjection[AnyWorld], node: SimulatedMachine | None, *, power_loss: bool) -> None:
    if node is not None:
        node.kill(power_loss=power_loss)
        await fault.wait_over()
        node.start()


async def _all_down(fault: FaultInjection[AnyWorld], *, power_loss: bool) -> None:
    nodes = fault.world.live_nodes()
    for node in nodes:
        node.kill(power_loss=power_loss)
    await fault.wait_over()
    for node in nodes:
        node.start()
        await asyncio.sleep(fault.rng.randrange(200) / 1000)


# -- network -----------------------------------------------------------------------------------------


async def isolate(fault: FaultInjection[AnyWorld]) -> None:
    """Isolate a node from all others; its clients still reach it."""
    world = fault.world
    node = fault.pick_node()
    if node is not None:
        world.network.isolate(node.id)
        await fault.wait_over()
        world.network.rejoin(node.id)


async def cut_one_way(fault: FaultInjection[AnyWorld]) -> None:
    """Lose everything in one direction between two nodes."""
    await _cut(fault, _pick_pairs(fault), both=False)


async def cut_both_ways(fault: FaultInjection[AnyWorld]) -> None:
    """Lose everything between two nodes."""
    await _cut(fault, _pick_pairs(fault), both=True)


async def split(fault: FaultInjection[AnyWorld]) -> None:
    """Partition the nodes into two parts without a connection between them."""
    nodes = [node.id for node in fault.world.live_nodes()]
    left = [node for node in nodes if fault.chance(0.5)]
    pairs = [(one, other) for one in left for other in nodes if other not in left]
    await _cut(fault, pairs, both=True)


async def ring(fault: FaultInjection[AnyWorld]) -> None:
    """Connect each node to two neighbours only: every node sees a different majority."""
    nodes = [node.id for node in fault.world.live_nodes()]
    count = len(nodes)
    pairs = [
        (nodes[one], nodes[other])
        for one in range(count)
        for other in range(one + 1, count)
        if (other - one) % count not in (1, count - 1)
    ]
    await _cut(fault, pairs, both=True)


async def clog(fault: FaultInjection[AnyWorld]) -> None:
    """Hold the messages between two nodes, then release them."""
    world = fault.world
    for one, other in _pick_pairs(fault):
        world.network.clog(one, other, both=fault.chance(0.5))
        await fault.wait_over()
        world.network.unclog(one, other)


async def swizzle(fault: FaultInjection[AnyWorld]) -> None:
    """Clog nodes one by one, and unclog them in another order."""
    world = fault.world
    world.network.swizzle([node.id for node in world.live_nodes()], duration_ms=max(fault.duration_ms, 2))
    await fault.wait_over()


async def slow_network(fault: FaultInjection[AnyWorld]) -> None:
    """Make every message slow, and some very slow."""
    world = fault.world
    world.set_latency(Latency(1.0, 60.0, 0.05, 1_000.0))
    await fault.wait_over()
    world.set_latency(None)


async def lossy_network(fault: FaultInjection[AnyWorld]) -> None:
    """Lose a share of all messages and calls."""
    world = fault.world
    world.set_loss(fault.rng.randrange(40) / 100)
    await fault.wait_over()
    world.set_loss(None)


async def doubling_network(fault: FaultInjection[AnyWorld]) -> None:
    """Deliver a share of all messages and calls twice."""
    world = fault.world
    world.set_doubling(fault.rng.randrange(50) / 100)
    await fault.wait_over()
    world.set_doubling(None)


async def _cut(fault: FaultInjection[AnyWorld], pairs: list[Pair], *, both: bool) -> None:
    network = fault.world.network
    for one, other in pairs:
        network.cut(one, other, both=both)
    await fault.wait_over()
    for one, other in pairs:
        network.mend(one, other, both=both)


def _pick_pairs(fault: FaultInjection[AnyWorld]) -> list[Pair]:
    """Return one ordered pair of nodes, if there are two."""
    one = fault.pick_node()
    others = [node.id for node in fault.world.live_nodes() if one is not None and node is not one]
    if one is None or not others:
        return []
    other = others[fault.rng.randrange(len(others))]
    return [(one.id, other) if fault.chance(0.5) else (other, one.id)]


# -- disks -------------------------------------------------------------------------------------------


async def sync_error(fault: FaultInjection[AnyWorld]) -> None:
    """Make one of a node's next syncs fail."""
    node = fault.pick_node()
    if node is not None and node.is_up:
        node.disk.fail("sync" if fault.chance(0.8) else "sync_directory", nth=1 + fault.rng.randrange(5))


async def write_error(fault: FaultInjection[AnyWorld]) -> None:
    """Make one of a node's next writes, or another change of its files, fail."""
    node = fault.pick_node()
    if node is not None and node.is_up:
        node.disk.fail(_CHANGES[fault.rng.randrange(len(_CHANGES))], nth=1 + fault.rng.randrange(5))


async def read_error(fault: FaultInjection[AnyWorld]) -> None:
    """Make one of a node's next reads fail."""
    node = fault.pick_node()
    if node is not None:
        node.disk.fail("read", nth=1 + fault.rng.randrange(3))


async def full_disk(fault: FaultInjection[AnyWorld]) -> None:
    """Fill a disk: it accepts a little more, then nothing until the fault is over."""
    node = fault.pick_node()
    if node is not None:
        node.disk.limit_space(fault.rng.randrange(8_192))
        await fault.wait_over()
        node.disk.limit_space(None)


async def short_writes(fault: FaultInjection[AnyWorld]) -> None:
    """Make a disk write only a part of what it is given, repeatedly."""
    node = fault.pick_node()
    if node is not None:
        node.disk.rates.p_short_write = 0.3
        await fault.wait_over()
        node.disk.rates.p_short_write = 0.0


async def slow_disk(fault: FaultInjection[AnyWorld]) -> None:
    """Slow a disk down many times."""
    node = fault.pick_node()
    if node is not None:
        node.set_disk_latency(10 + fault.rng.randrange(200))
        await fault.wait_over()
        node.set_disk_latency(1)


async def bit_flip(fault: FaultInjection[AnyWorld]) -> None:
    """Kill a node, flip durable bits on its disk, and start it again."""
    world = fault.world
    node = fault.pick_node()
    if node is None or not node.can_be_damaged():
        return
    node.kill(power_loss=fault.chance(0.5))
    paths = [path for path in node.disk.paths() if node.disk.read_durable(path)]
    if paths:
        node.is_damaged = True
        for _ in range(1 + fault.rng.randrange(2)):
            path = paths[fault.rng.randrange(len(paths))]
            size = len(node.disk.read_durable(path))
            node.disk.flip_bit(path, fault.rng.randrange(size), bit=fault.rng.randrange(8))
            world.trace.record("flip", world.now_ms, node.id, path)
    await fault.wait_over()
    node.start()


async def lost_disk(fault: FaultInjection[AnyWorld]) -> None:
    """Lose a node with its disk; the operator replaces it (R22)."""
    node = fault.pick_node()
    if node is not None and node.can_be_damaged():
        node.replace()


async def wiped_disk(fault: FaultInjection[AnyWorld]) -> None:
    """Restart a node under its id with an empty disk, which R22 forbids; replace it properly later."""
    node = fault.pick_node()
    if node is not None and node.can_be_damaged():
        node.wipe()
        node.start()
        await fault.wait_over()
        node.replace()


FaultFunction = Callable[[FaultInjection[AnyWorld]], Awaitable[None]]

SHARED_FAULTS: Final[Mapping[str, FaultFunction]] = {
    function.__name__: function
    for function in (
        kill,
        power_loss,
        power_loss_at_operation,
        kill_all,
        power_loss_all,
        pause,
        clock_jump,
        clock_drift,
        isolate,
        cut_one_way,
        cut_both_ways,
        split,
        ring,
        clog,
        swizzle,
        slow_network,
        lossy_network,
        doubling_network,
        slow_disk,
        sync_error,
        write_error,
        read_error,
        full_disk,
        short_writes,
        bit_flip,
        lost_disk,
        wiped_disk,
    )
}
"""Faults by the kind that schedules name."""

"""Faults of the network: cuts, splits, clogs, loss, doubling and slowness."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.clock import Rng
from quiver.model import NodeId
from quiver.testing.latency import Latency

if TYPE_CHECKING:
    from quiver.testing.world import World

Pair = tuple[NodeId, NodeId]


async def isolate(world: World, rng: Rng, duration_ms: int) -> None:
    """Cut a node off from all others; its clients still reach it."""
    node = world.pick_node(rng)
    if node is not None:
        world.network.isolate(node.id)
        await asyncio.sleep(duration_ms / 1000)
        world.network.rejoin(node.id)


async def cut_one_way(world: World, rng: Rng, duration_ms: int) -> None:
    """Lose everything in one direction between two nodes."""
    await _cut(world, _pick_pairs(world, rng), duration_ms, both=False)


async def cut_both_ways(world: World, rng: Rng, duration_ms: int) -> None:
    """Lose everything between two nodes."""
    await _cut(world, _pick_pairs(world, rng), duration_ms, both=True)


async def split(world: World, rng: Rng, duration_ms: int) -> None:
    """Split the nodes into two parts that do not hear each other."""
    nodes = [node.id for node in world.live_nodes()]
    left = [node for node in nodes if rng.random() < 0.5]
    pairs = [(one, other) for one in left for other in nodes if other not in left]
    await _cut(world, pairs, duration_ms, both=True)


async def ring(world: World, rng: Rng, duration_ms: int) -> None:
    """Let each node hear its two neighbours only: everybody sees another majority."""
    nodes = [node.id for node in world.live_nodes()]
    count = len(nodes)
    pairs = [
        (nodes[one], nodes[other])
        for one in range(count)
        for other in range(one + 1, count)
        if (other - one) % count not in (1, count - 1)
    ]
    await _cut(world, pairs, duration_ms, both=True)


async def clog(world: World, rng: Rng, duration_ms: int) -> None:
    """Hold what travels between two nodes, then let it go."""
    for one, other in _pick_pairs(world, rng):
        world.network.clog(one, other, both=rng.random() < 0.5)
        await asyncio.sleep(duration_ms / 1000)
        world.network.unclog(one, other)


async def swizzle(world: World, rng: Rng, duration_ms: int) -> None:
    """Clog nodes one by one, and unclog them in another order."""
    world.network.swizzle([node.id for node in world.live_nodes()], duration_ms=max(duration_ms, 2))
    await asyncio.sleep(duration_ms / 1000)


async def slow_network(world: World, rng: Rng, duration_ms: int) -> None:
    """Let every message take long, some very long."""
    world.network.rates.latency = Latency(1.0, 60.0, 0.05, 1_000.0)
    await asyncio.sleep(duration_ms / 1000)
    world.network.rates.latency = world.knobs.network_latency


async def lossy_network(world: World, rng: Rng, duration_ms: int) -> None:
    """Lose a part of all messages, and of all calls."""
    world.network.rates.p_loss = world.courier.p_loss = rng.randrange(40) / 100
    await asyncio.sleep(duration_ms / 1000)
    world.network.rates.p_loss, world.courier.p_loss = world.knobs.p_loss, 0.0


async def doubling_network(world: World, rng: Rng, duration_ms: int) -> None:
    """Deliver a part of all messages and calls twice."""
    world.network.rates.p_double = world.courier.p_double = rng.randrange(50) / 100
    await asyncio.sleep(duration_ms / 1000)
    world.network.rates.p_double, world.courier.p_double = world.knobs.p_double, 0.0


async def _cut(world: World, pairs: list[Pair], duration_ms: int, *, both: bool) -> None:
    for one, other in pairs:
        world.network.cut(one, other, both=both)
    await asyncio.sleep(duration_ms / 1000)
    for one, other in pairs:
        world.network.mend(one, other, both=both)


def _pick_pairs(world: World, rng: Rng) -> list[Pair]:
    """Return one ordered pair of nodes, if there are two."""
    one = world.pick_node(rng)
    others = [node.id for node in world.live_nodes() if one is not None and node is not one]
    if one is None or not others:
        return []
    other = others[rng.randrange(len(others))]
    return [(one.id, other) if rng.random() < 0.5 else (other, one.id)]

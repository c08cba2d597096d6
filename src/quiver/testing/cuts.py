"""Faults of the network: cuts, splits, clogs, loss, doubling and slowness."""

from __future__ import annotations

from quiver.model import NodeId
from quiver.testing.latency import Latency
from quiver.testing.strike import Grounds, Strike

Pair = tuple[NodeId, NodeId]


async def isolate(strike: Strike[Grounds]) -> None:
    """Cut a node off from all others; its clients still reach it."""
    world = strike.world
    node = strike.pick_node()
    if node is not None:
        world.network.isolate(node.id)
        await strike.last()
        world.network.rejoin(node.id)


async def cut_one_way(strike: Strike[Grounds]) -> None:
    """Lose everything in one direction between two nodes."""
    await _cut(strike, _pick_pairs(strike), both=False)


async def cut_both_ways(strike: Strike[Grounds]) -> None:
    """Lose everything between two nodes."""
    await _cut(strike, _pick_pairs(strike), both=True)


async def split(strike: Strike[Grounds]) -> None:
    """Split the nodes into two parts that do not hear each other."""
    nodes = [node.id for node in strike.world.live_nodes()]
    left = [node for node in nodes if strike.chance(0.5)]
    pairs = [(one, other) for one in left for other in nodes if other not in left]
    await _cut(strike, pairs, both=True)


async def ring(strike: Strike[Grounds]) -> None:
    """Let each node hear its two neighbours only: everybody sees another majority."""
    nodes = [node.id for node in strike.world.live_nodes()]
    count = len(nodes)
    pairs = [
        (nodes[one], nodes[other])
        for one in range(count)
        for other in range(one + 1, count)
        if (other - one) % count not in (1, count - 1)
    ]
    await _cut(strike, pairs, both=True)


async def clog(strike: Strike[Grounds]) -> None:
    """Hold what travels between two nodes, then let it go."""
    world = strike.world
    for one, other in _pick_pairs(strike):
        world.network.clog(one, other, both=strike.chance(0.5))
        await strike.last()
        world.network.unclog(one, other)


async def swizzle(strike: Strike[Grounds]) -> None:
    """Clog nodes one by one, and unclog them in another order."""
    world = strike.world
    world.network.swizzle([node.id for node in world.live_nodes()], duration_ms=max(strike.duration_ms, 2))
    await strike.last()


async def slow_network(strike: Strike[Grounds]) -> None:
    """Let every message take long, some very long."""
    world = strike.world
    world.set_latency(Latency(1.0, 60.0, 0.05, 1_000.0))
    await strike.last()
    world.set_latency(None)


async def lossy_network(strike: Strike[Grounds]) -> None:
    """Lose a part of all messages, and of all calls."""
    world = strike.world
    world.set_loss(strike.rng.randrange(40) / 100)
    await strike.last()
    world.set_loss(None)


async def doubling_network(strike: Strike[Grounds]) -> None:
    """Deliver a part of all messages and calls twice."""
    world = strike.world
    world.set_doubling(strike.rng.randrange(50) / 100)
    await strike.last()
    world.set_doubling(None)


async def _cut(strike: Strike[Grounds], pairs: list[Pair], *, both: bool) -> None:
    network = strike.world.network
    for one, other in pairs:
        network.cut(one, other, both=both)
    await strike.last()
    for one, other in pairs:
        network.mend(one, other, both=both)


def _pick_pairs(strike: Strike[Grounds]) -> list[Pair]:
    """Return one ordered pair of nodes, if there are two."""
    one = strike.pick_node()
    others = [node.id for node in strike.world.live_nodes() if one is not None and node is not one]
    if one is None or not others:
        return []
    other = others[strike.rng.randrange(len(others))]
    return [(one.id, other) if strike.chance(0.5) else (other, one.id)]

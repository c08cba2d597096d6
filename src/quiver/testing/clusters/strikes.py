"""Faults that only whole nodes suffer, and what operators do to a cluster: the rest is as for bare Raft members.

An operator asks through the SDK as anybody would. Refusals are normal; only the end of the run demands that the cluster
got where it should.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from quiver.client.cluster import AsyncCluster
from quiver.errors import QuiverError
from quiver.metadata import BrokerState
from quiver.model import NodeId
from quiver.testing import cuts, outages, troubles
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.strike import Strike

Strikes = Mapping[str, Callable[[Strike[ClusterWorld]], Awaitable[None]]]
Ask = Callable[[AsyncCluster], Awaitable[None]]

_REMOVE_PATIENCE_S = 6.0
"""How long an operator waits for a drained broker before it thinks better of removing it."""


async def stop(strike: Strike[ClusterWorld]) -> None:
    """Stop a node in good order and start it again, as a rolling restart does."""
    host = strike.world.pick_node(strike.rng)
    if host is not None and host.is_running:
        host.stop()  # its supervisor starts it again


async def broken_requests(strike: Strike[ClusterWorld]) -> None:
    """Break connections with requests or their answers on the way."""
    strike.world.set_breaks((1 + strike.rng.randrange(40)) / 100)
    await strike.last()
    strike.world.set_breaks(None)


async def lost_database(strike: Strike[ClusterWorld]) -> None:
    """Take a node down and lose its metadata's database, not its log; start it again."""
    host = strike.world.pick_node(strike.rng)
    if host is not None:
        host.kill(power_loss=strike.chance(0.5))
        host.database.lose()
        await strike.last()
        host.start()


async def database_error(strike: Strike[ClusterWorld]) -> None:
    """Let a node's next transaction fail, which ends the node."""
    host = strike.world.pick_node(strike.rng)
    if host is not None and host.is_up:
        host.database.fail_next()


# -- operators ---------------------------------------------------------------------------------------


async def drain(strike: Strike[ClusterWorld]) -> None:
    """Have a broker emptied, if the others can hold everything."""
    world = strike.world
    wanted = [host.id for host in world.live_nodes() if not _is_unwanted(world, host.id)]
    if len(wanted) > world.knobs.replicas_max:
        leaver = wanted[strike.rng.randrange(len(wanted))]
        await _operate(strike, "drain", lambda cluster: cluster.drain(leaver))


async def undrain(strike: Strike[ClusterWorld]) -> None:
    """Let a broker that is being emptied hold replicas again."""
    unwanted = [host.id for host in strike.world.live_nodes() if _is_unwanted(strike.world, host.id)]
    if unwanted:
        chosen = unwanted[strike.rng.randrange(len(unwanted))]
        await _operate(strike, "undrain", lambda cluster: cluster.drain(chosen, is_undone=True))


async def add_broker(strike: Strike[ClusterWorld]) -> None:
    """Bring a new machine."""
    world = strike.world
    if world.has_room:
        world.add_host().start()
        await asyncio.sleep(strike.rng.randrange(3_000) / 1000)
        if strike.chance(0.5):
            await _operate(strike, "rebalance", lambda cluster: cluster.rebalance())


async def remove_broker(strike: Strike[ClusterWorld]) -> None:
    """Empty a plain broker, wait until it is drained, take it out of the cluster and turn it off."""
    world = strike.world
    plain = [host for host in world.live_nodes() if not host.is_manager]
    wanted = [host for host in world.live_nodes() if not _is_unwanted(world, host.id)]
    if not plain or len(wanted) <= world.knobs.replicas_max:
        return
    leaver = plain[strike.rng.randrange(len(plain))]
    await _operate(strike, "drain", lambda cluster: cluster.drain(leaver.id))
    end_s = world.loop.time() + _REMOVE_PATIENCE_S
    while world.loop.time() < end_s:
        await asyncio.sleep(0.2)
        view = world.view()
        broker = None if view is None else view.brokers.get(leaver.id)
        if broker is not None and broker.state is BrokerState.DRAINED:
            if await _operate(strike, "remove", lambda cluster: cluster.remove(leaver.id)):
                leaver.retire()
            return


async def rebalance(strike: Strike[ClusterWorld]) -> None:
    """Have replicas spread evenly."""
    await _operate(strike, "rebalance", lambda cluster: cluster.rebalance())


async def add_partitions(strike: Strike[ClusterWorld]) -> None:
    """Give a topic one partition more."""
    world = strike.world
    topic = world.knobs.topics[strike.rng.randrange(len(world.knobs.topics))]
    view = world.view()
    known = None if view is None else view.topic(topic.name)
    if known is not None and known.partitions < topic.partitions + 2:
        count = known.partitions + 1
        await _operate(strike, "add_partitions", lambda cluster: cluster.add_partitions(topic.name, count))


async def _operate(strike: Strike[ClusterWorld], what: str, ask: Ask) -> bool:
    """Ask for something through the SDK; tell whether it was done."""
    world = strike.world
    try:
        async with world.connect(f"operator-{world.now_ms}") as cluster:
            await ask(cluster)
    except QuiverError as error:
        world.counts[f"{what} refused"] += 1
        world.trace.record("refused", world.now_ms, what, error.code)
        return False
    world.counts[f"{what} done"] += 1
    world.trace.record("done", world.now_ms, what)
    return True


def _is_unwanted(world: ClusterWorld, node: NodeId) -> bool:
    view = world.view()
    broker = None if view is None else view.brokers.get(node)
    return broker is None or broker.is_unwanted or broker.state is BrokerState.REMOVED


STRIKES: Final[Strikes] = {
    "kill": outages.kill,
    "power_loss": outages.power_loss,
    "power_loss_at_operation": outages.power_loss_at_operation,
    "kill_all": outages.kill_all,
    "power_loss_all": outages.power_loss_all,
    "stop": stop,
    "pause": outages.pause,
    "isolate": cuts.isolate,
    "cut_one_way": cuts.cut_one_way,
    "cut_both_ways": cuts.cut_both_ways,
    "split": cuts.split,
    "ring": cuts.ring,
    "clog": cuts.clog,
    "swizzle": cuts.swizzle,
    "slow_network": cuts.slow_network,
    "lossy_network": cuts.lossy_network,
    "doubling_network": cuts.doubling_network,
    "broken_requests": broken_requests,
    "slow_disk": troubles.slow_disk,
    "sync_error": troubles.sync_error,
    "write_error": troubles.write_error,
    "read_error": troubles.read_error,
    "full_disk": troubles.full_disk,
    "short_writes": troubles.short_writes,
    "lost_disk": troubles.lost_disk,
    "wiped_disk": troubles.wiped_disk,
    "lost_database": lost_database,
    "database_error": database_error,
    "clock_jump": outages.clock_jump,
    "clock_drift": outages.clock_drift,
    "drain": drain,
    "undrain": undrain,
    "add_broker": add_broker,
    "remove_broker": remove_broker,
    "rebalance": rebalance,
    "add_partitions": add_partitions,
}

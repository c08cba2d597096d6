"""Faults that only whole nodes have, and the operations of a cluster's operator.

An operator sends requests through the SDK. Refusals are normal; only the end of the run requires that the cluster
reaches its goal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from quiver.client.cluster import AsyncCluster
from quiver.errors import QuiverError
from quiver.features import LEVEL_MAX, LEVEL_MIN
from quiver.metadata import BrokerState
from quiver.model import NodeId
from quiver.testing.clusters.defects import bad_command, partition_fault, unknown_entry
from quiver.testing.clusters.full_disks import full_disks
from quiver.testing.clusters.versions import list_old_nodes, require_raised_by_all
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.simulator.faults import SHARED_FAULTS, FaultInjection

Ask = Callable[[AsyncCluster], Awaitable[None]]

_LOOK_S = 1.5
"""How long an operator watches the managers before it changes them: longer than a primary trusts a silent one."""
_ROLL_S = 0.7
"""How long an operator waits between two nodes of a rolling upgrade."""
_REMOVE_PATIENCE_S = 6.0
"""How long an operator waits for a drained broker before it thinks better of removing it."""


async def stop(fault: FaultInjection[ClusterWorld]) -> None:
    """Stop a node in good order and start it again, as a rolling restart does."""
    host = fault.world.pick_node(fault.rng)
    if host is not None and host.is_running:
        host.stop()  # its supervisor starts it again


async def broken_requests(fault: FaultInjection[ClusterWorld]) -> None:
    """Break connections with requests or their answers on the way."""
    fault.world.set_breaks((1 + fault.rng.randrange(40)) / 100)
    await fault.wait_over()
    fault.world.set_breaks(None)


async def lost_database(fault: FaultInjection[ClusterWorld]) -> None:
    """Take a node down and lose its metadata's database, not its log; start it again."""
    host = fault.world.pick_node(fault.rng)
    if host is not None:
        host.kill(power_loss=fault.chance(0.5))
        host.database.lose()
        await fault.wait_over()
        host.start()


async def database_error(fault: FaultInjection[ClusterWorld]) -> None:
    """Let a node's next transaction fail, which ends the node."""
    host = fault.world.pick_node(fault.rng)
    if host is not None and host.is_up:
        host.database.fail_next()


async def database_outage(fault: FaultInjection[ClusterWorld]) -> None:
    """Make a node's database server unreachable for a while; a crash of the server loses its last transactions."""
    host = fault.world.pick_node(fault.rng)
    if host is not None:
        host.database.set_away(is_away=True)
        await fault.wait_over()
        if fault.chance(0.3):
            host.database.crash(fault.rng)
        host.database.set_away(is_away=False)


# -- operators ---------------------------------------------------------------------------------------


async def drain(fault: FaultInjection[ClusterWorld]) -> None:
    """Have a broker emptied, if the others can hold everything."""
    world = fault.world
    wanted = _wanted_nodes(world)
    if len(wanted) > world.knobs.replicas_max:
        await _drain(fault, wanted[fault.rng.randrange(len(wanted))])


async def undrain(fault: FaultInjection[ClusterWorld]) -> None:
    """Let a broker that is being emptied hold replicas again."""
    unwanted = [host.id for host in fault.world.live_nodes() if _is_unwanted(fault.world, host.id)]
    if unwanted:
        chosen = unwanted[fault.rng.randrange(len(unwanted))]
        await _operate(fault, "undrain", lambda cluster: cluster.drain(chosen, is_undone=True))


async def add_broker(fault: FaultInjection[ClusterWorld]) -> None:
    """Bring a new machine."""
    world = fault.world
    if world.has_room:
        world.add_node().start()
        await asyncio.sleep(fault.rng.randrange(3_000) / 1000)
        if fault.chance(0.5):
            await _operate(fault, "rebalance", lambda cluster: cluster.rebalance())


async def remove_broker(fault: FaultInjection[ClusterWorld]) -> None:
    """Empty a plain broker, wait until it is drained, take it out of the cluster and turn it off."""
    world = fault.world
    plain = [host for host in world.live_nodes() if not host.is_manager]
    if not plain or len(_wanted_nodes(world)) <= world.knobs.replicas_max:
        return
    leaver = plain[fault.rng.randrange(len(plain))]
    await _drain(fault, leaver.id)
    end_s = world.loop.time() + _REMOVE_PATIENCE_S
    while world.loop.time() < end_s:
        await asyncio.sleep(0.2)
        view = world.view()
        broker = None if view is None else view.brokers.get(leaver.id)
        if broker is not None and broker.state is BrokerState.DRAINED:
            if await _operate(fault, "remove", lambda cluster: cluster.remove(leaver.id)):
                leaver.retire()
            return


async def change_managers(fault: FaultInjection[ClusterWorld]) -> None:
    """Add a manager, remove one, or replace one, whoever is down; at most five."""
    world, rng = fault.world, fault.rng
    voters, others = world.managers(), [host.id for host in world.live_nodes() if host.id not in world.managers()]
    if not voters or world.is_changing_managers:
        return
    added = others[rng.randrange(len(others))] if others and len(voters) < 5 and fault.chance(0.6) else None
    removed = sorted(voters)[rng.randrange(len(voters))] if added is None or fault.chance(0.5) else None
    world.is_changing_managers = True
    try:
        await asyncio.sleep(_LOOK_S)  # the operator looks who is alive; from now on no disk is lost
        is_added = added is None or await _operate(fault, "add_manager", lambda cluster: cluster.add_manager(added))
        if is_added and removed is not None:
            await _operate(fault, "remove_manager", lambda cluster: cluster.remove_manager(removed))
    finally:
        world.is_changing_managers = False


async def change_program(fault: FaultInjection[ClusterWorld]) -> None:
    """Install another program on a node and restart it: before the level is raised an older or a newer one, later by
    mistake an older one now and then."""
    world = fault.world
    host = world.pick_node(fault.rng)
    view = world.view()
    if host is None or view is None or not world.knobs.mixes_versions:
        return
    p_older = 0.4 if view.feature_level == LEVEL_MIN else 0.1
    host.level_max = LEVEL_MIN if fault.chance(p_older) else LEVEL_MAX
    host.stop()  # its supervisor starts it again


async def upgrade_cluster(fault: FaultInjection[ClusterWorld]) -> None:
    """Raise the feature level, sometimes after all nodes were restarted with the newest program."""
    world = fault.world
    if not world.knobs.mixes_versions:
        return
    if fault.chance(0.5):
        for host in world.live_nodes():
            host.level_max = LEVEL_MAX
            host.stop()
            await asyncio.sleep(_ROLL_S)
    old = list_old_nodes(world, LEVEL_MAX)
    if await _operate(fault, "upgrade", _upgrade):
        require_raised_by_all(world, old, LEVEL_MAX)


async def _upgrade(cluster: AsyncCluster) -> None:
    await cluster.upgrade()


async def rebalance(fault: FaultInjection[ClusterWorld]) -> None:
    """Have replicas spread evenly."""
    await _operate(fault, "rebalance", lambda cluster: cluster.rebalance())


async def add_partitions(fault: FaultInjection[ClusterWorld]) -> None:
    """Give a topic one partition more, not on a disk that was just lost: then it would never have a leader."""
    world = fault.world
    if world.is_adding_partitions or not world.are_losses_known():
        return
    topics = world.knobs.all_topics
    topic = topics[fault.rng.randrange(len(topics))]
    view = world.view()
    known = None if view is None else view.topic(topic.name)
    if known is not None and known.partitions < topic.partitions + 2:
        count = known.partitions + 1
        world.is_adding_partitions = True
        try:
            await _operate(fault, "add_partitions", lambda cluster: cluster.add_partitions(topic.name, count))
        finally:
            world.is_adding_partitions = False


async def _drain(fault: FaultInjection[ClusterWorld], leaver: NodeId) -> None:
    """Have a broker emptied; other operators count it as leaving until the metadata says so."""
    leaving = fault.world.leaving
    leaving.add(leaver)
    if await _operate(fault, "drain", lambda cluster: cluster.drain(leaver)):
        leaving.discard(leaver)  # otherwise it may still be done later


async def _operate(fault: FaultInjection[ClusterWorld], what: str, ask: Ask) -> bool:
    """Ask for something through the SDK; tell whether it was done."""
    world = fault.world
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


def _wanted_nodes(world: ClusterWorld) -> list[NodeId]:
    """Return the brokers that hold replicas and that no operator has asked to leave."""
    nodes = [host.id for host in world.live_nodes() if host.id not in world.leaving]
    return [node for node in nodes if not _is_unwanted(world, node)]


def _is_unwanted(world: ClusterWorld, node: NodeId) -> bool:
    view = world.view()
    broker = None if view is None else view.brokers.get(node)
    return broker is None or broker.is_unwanted or broker.state is BrokerState.REMOVED


FAULTS: Final[Mapping[str, Callable[[FaultInjection[Any]], Awaitable[None]]]] = {
    **SHARED_FAULTS,
    "stop": stop,
    "broken_requests": broken_requests,
    "lost_database": lost_database,
    "database_error": database_error,
    "database_outage": database_outage,
    "drain": drain,
    "undrain": undrain,
    "add_broker": add_broker,
    "remove_broker": remove_broker,
    "rebalance": rebalance,
    "add_partitions": add_partitions,
    "change_managers": change_managers,
    "bad_command": bad_command,
    "unknown_entry": unknown_entry,
    "partition_fault": partition_fault,
    "full_disks": full_disks,
    "change_program": change_program,
    "upgrade_cluster": upgrade_cluster,
}
"""Faults by the kind that schedules name."""

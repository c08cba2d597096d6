"""Full disks of a simulated cluster: the fault that fills several of them, and what must hold meanwhile.

While a majority of every partition's replicas, and of the managers, has room, every partition accepts records within a
bound; no node ends; and once there is room again, `require_settled` demands that every replica catches up. That no
process ends because its disk is full is demanded of every run (`SimulatedHost`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quiver.clock import Rng
from quiver.metadata import TopicState
from quiver.model import NodeId
from quiver.testing.clusters.clients import ProducerWorkload
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.swarm import TopicPlan
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.simulator.faults import FaultInjection
from quiver.testing.simulator.report import require

ACCEPT_WITHIN_MS = 20_000
"""F3: how long a partition with a majority with room may refuse records: stalls, checks, transfers and retries."""
_ROOMS = (0, 0, 300, 2_000)
"""How many bytes still fit on a disk that is filled."""


async def full_disks(fault: FaultInjection[ClusterWorld]) -> None:
    """Fill the disks of several machines: each takes a little more, then nothing until the fault is over."""
    hosts = [host for host in fault.world.live_nodes() if fault.chance(0.5)]
    for host in hosts:
        host.disk.limit_space(fault.rng.randrange(8_192))
    await fault.wait_over()
    for host in hosts:
        host.disk.limit_space(None)


async def require_accepting_while_full(world: ClusterWorld) -> None:
    """F3: fill the disks of a minority of every group; every partition accepts records soon, and no node ends."""
    rng = world.streams.stream("full-disks")
    hosts = _pick_minority(world, rng)
    if not hosts:
        return
    world.trace.record("fill", world.now_ms, *[host.id for host in hosts])
    world.counts["filled"] += len(hosts)
    lives = {host.id: host.lives for host in hosts}
    for host in hosts:
        host.disk.limit_space(_ROOMS[rng.randrange(len(_ROOMS))])
    await asyncio.sleep(rng.randrange(2_000) / 1000)
    for topic in world.knobs.topics:
        await _require_accepted(world, topic)
    for host in hosts:
        ended = host.lives != lives[host.id] and not world.knobs.mixes_versions
        require(not ended, "F3", "a node ended while its disk was full", node=host.id)
        host.disk.limit_space(None)
    world.trace.record("freed", world.now_ms)


async def _require_accepted(world: ClusterWorld, topic: TopicPlan) -> None:
    """F3: each partition of a topic accepts a record in time."""
    prober = ProducerWorkload(world, f"prober-{topic.name}", topic)
    deadline_ms = world.now_ms + ACCEPT_WITHIN_MS
    await _insist(prober, prober.cluster.open, deadline_ms)
    await _insist(prober, prober.begin, deadline_ms)
    for partition in range(topic.partitions):
        before = prober.progress
        while prober.progress == before:
            require(world.now_ms < deadline_ms, "F3", "a partition accepts no records", key=prober.key(partition))
            if not await prober.send_to(partition):
                await _insist(prober, prober.begin, deadline_ms)
            world.check()
    await prober.producer.abort()
    await prober.cluster.close()


async def _insist(prober: ProducerWorkload, work: Callable[[], Awaitable[object]], deadline_ms: int) -> None:
    """F3: the metadata accepts changes in time, too."""
    done = asyncio.ensure_future(prober.insist(work))
    while not done.done():
        require(prober.world.now_ms < deadline_ms, "F3", "no client registers", name=prober.name)
        await prober.world.wait_checked()
    await done


def _pick_minority(world: ClusterWorld, rng: Rng) -> list[SimulatedHost]:
    """Return machines whose disks may all be full: a majority of every group runs and keeps room; often none."""
    groups = _groups(world)
    chosen: list[SimulatedHost] = []
    hosts = [host for host in world.running() if not host.is_retired]
    with_room = {host.id for host in hosts}
    leaders = [host for host in hosts if any(one.member.is_leader for one in world.replicas(host).values())]
    leaders += [host for host in hosts if host is world.primary()]
    while hosts and groups and rng.random() < 0.8:
        among = leaders if leaders and rng.random() < 0.6 else hosts
        host = among[rng.randrange(len(among))]
        hosts, leaders = [one for one in hosts if one is not host], [one for one in leaders if one is not host]
        if all(2 * len((with_room - {host.id}) & voters) > len(voters) for voters in groups):
            chosen.append(host)
            with_room.remove(host.id)
    return chosen


def _groups(world: ClusterWorld) -> list[set[NodeId]]:
    """Return the voters of the metadata and of every partition; empty if they are not known, or change."""
    view, managers = world.view(), world.managers()
    if view is None or not managers or view.moves:
        return []
    partitions = [
        set(row.replicas) for row in view.partitions.values() if view.topics[row.topic_id].state is TopicState.ACTIVE
    ]
    return [managers, *partitions]

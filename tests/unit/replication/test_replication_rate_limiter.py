"""Old entries go to learners at a pace; nobody else waits for it."""

from __future__ import annotations

import asyncio
import random

from replication_cluster import Cluster, run_in

from quiver.config import KIB, ReplicationSettings
from quiver.model import NodeId
from quiver.replication.timers import RateLimiter
from quiver.testing import SimulatedClock, SimulatedLoop

RATE = 16 * KIB


def test_bytes_pass_in_order_at_the_rate_and_idle_time_is_not_saved_up() -> None:
    loop = SimulatedLoop(random.Random(1), policy="fifo")
    passed: list[tuple[str, float]] = []

    async def send(name: str, size_bytes: int, pace: RateLimiter) -> None:
        await pace.wait_turn(size_bytes)
        passed.append((name, round(loop.time(), 3)))

    async def main() -> None:
        pace = RateLimiter(SimulatedClock(loop), bytes_per_second=1000)
        await asyncio.sleep(5)
        sends = [loop.create_task(send(name, size, pace)) for name, size in (("a", 500), ("b", 1000), ("c", 1))]
        await asyncio.wait(sends)
        await send("d", 10, pace)

    loop.run_until_complete(main())
    loop.close()
    assert passed == [("a", 5.0), ("b", 5.5), ("c", 6.5), ("d", 6.501)]


def test_learner_catches_up_at_the_pace_and_writes_do_not_wait_for_it() -> None:
    async def test(cluster: Cluster) -> None:
        values = [b"%04d" % number * 100 for number in range(200)]
        for value in values:
            await cluster.propose(value)
        leader = await cluster.leader()
        added = cluster.add(4)
        begun = cluster.loop.time()
        leader.member.change_membership(voters=tuple(cluster.nodes)[:3], learners=(NodeId(4),))
        writes: list[float] = []
        while len(added.machine.values) < len(values):
            started = cluster.loop.time()
            await cluster.propose(b"new")
            writes.append(cluster.loop.time() - started)
            await asyncio.sleep(0.02)
        least_s = 0.8 * sum(map(len, values)) / RATE  # what is still in memory goes out at once
        assert least_s < cluster.loop.time() - begun < 2 * least_s + 5
        assert max(writes) < 0.1

    settings = ReplicationSettings(hibernation=False, append_bytes_max=KIB, catch_up_bytes_per_second=RATE)
    run_in(Cluster(settings=settings), test)

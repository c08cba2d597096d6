"""Old entries go to learners at a pace; nobody else waits for it."""

from __future__ import annotations

import asyncio
import random

from replication_cluster import Cluster, run_in

from quiver.config import KIB, ReplicationSettings
from quiver.model import Index, NodeId
from quiver.replication.catch_up import ACTIVE_MS, CatchUpLimiter, CommitSampler
from quiver.testing import SimulatedClock, SimulatedLoop

RATE = 16 * KIB


def test_bytes_pass_in_order_at_the_rate_and_idle_time_is_not_saved_up() -> None:
    loop = SimulatedLoop(random.Random(1), policy="fifo")
    passed: list[tuple[str, float]] = []

    async def send(name: str, size_bytes: int, pace: CatchUpLimiter) -> None:
        await pace.wait_turn(size_bytes)
        passed.append((name, round(loop.time(), 3)))

    async def main() -> None:
        pace = CatchUpLimiter(SimulatedClock(loop), bytes_per_second=1000)
        await asyncio.sleep(5)
        sends = [loop.create_task(send(name, size, pace)) for name, size in (("a", 500), ("b", 1000), ("c", 1))]
        await asyncio.wait(sends)
        await send("d", 10, pace)
        assert pace.sent_bytes == 1511

    loop.run_until_complete(main())
    loop.close()
    assert passed == [("a", 5.0), ("b", 5.5), ("c", 6.5), ("d", 6.501)]


class FixedClock:
    """A clock that the test sets."""

    now_ms = 10_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def limiter_in_use(*usual_s: float) -> tuple[CatchUpLimiter, FixedClock]:
    """Return a limiter that knows how long commits usually take, and through which bytes have just passed."""
    clock = FixedClock()
    limiter = CatchUpLimiter(clock, bytes_per_second=1_600_000)
    for latency_s in usual_s:
        limiter.add_commit(latency_s)
    asyncio.run(limiter.wait_turn(1))
    return limiter, clock


def test_rate_falls_while_commits_are_slow_and_never_to_nothing() -> None:
    limiter, _ = limiter_in_use(0.004)
    limiter.add_commit(0.004)
    assert limiter.bytes_per_second == 1_600_000
    limiter.add_commit(0.007)
    assert limiter.bytes_per_second == 1_280_000
    for _ in range(50):
        limiter.add_commit(0.007)
    assert limiter.bytes_per_second == 400_000


def test_rate_rises_again_when_commits_are_as_fast_as_usual() -> None:
    limiter, clock = limiter_in_use(0.004)
    for _ in range(50):
        limiter.add_commit(0.1)
    limiter.add_commit(0.005)
    assert limiter.bytes_per_second == 416_000
    for _ in range(200):
        limiter.add_commit(0.005)
    assert limiter.bytes_per_second == 1_600_000
    limiter.add_commit(0.1)
    clock.now_ms += ACTIVE_MS
    limiter.add_commit(0.1)
    assert limiter.bytes_per_second == 1_600_000, "nothing is copied any more"


def test_usual_time_is_an_average_that_single_stalls_do_not_spoil() -> None:
    limiter, _ = limiter_in_use(0.004, *[0.004] * 50, 9.0)
    limiter.add_commit(0.008)
    assert limiter.bytes_per_second < 1_600_000


def test_commits_that_vary_much_by_themselves_are_not_slow() -> None:
    limiter, _ = limiter_in_use(*[0.004, 0.012] * 50)
    limiter.add_commit(0.020)
    assert limiter.bytes_per_second == 1_600_000
    limiter.add_commit(0.040)
    assert limiter.bytes_per_second == 1_280_000


def test_first_commit_during_a_copy_sets_the_usual_time() -> None:
    limiter, _ = limiter_in_use()
    limiter.add_commit(0.020)
    limiter.add_commit(0.021)
    assert limiter.bytes_per_second == 1_600_000


def test_sampler_measures_one_commit_at_a_time_and_only_as_leader() -> None:
    loop = SimulatedLoop(random.Random(1), policy="fifo")

    async def main() -> list[float]:
        taken: list[float] = []

        class Limiter(CatchUpLimiter):
            def add_commit(self, latency_s: float) -> None:
                taken.append(round(latency_s, 3))

        sampler = CommitSampler(Limiter(FixedClock(), bytes_per_second=1))
        sampler.note_applied(Index(5), is_leader=True)
        sampler.note_appended(Index(11))
        await asyncio.sleep(0.01)
        sampler.note_appended(Index(12))
        sampler.note_applied(Index(9), is_leader=True)
        await asyncio.sleep(0.01)
        sampler.note_applied(Index(10), is_leader=True)
        sampler.note_appended(Index(13))
        sampler.note_applied(Index(20), is_leader=False)
        return taken

    assert loop.run_until_complete(main()) == [0.02]
    loop.close()


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

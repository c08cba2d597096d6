"""What work queues promise, against real nodes and against the cluster in memory: the same scenarios for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

import pytest

import quiver
from quiver.client.cluster import AsyncCluster
from quiver.errors import ConflictError, FencedError
from quiver.record.queue_headers import (
    DEAD_ATTEMPTS_HEADER,
    DEAD_GROUP_HEADER,
    DEAD_OFFSET_HEADER,
    DEAD_PARTITION_HEADER,
    DEAD_REASON_HEADER,
    DEAD_TOPIC_HEADER,
)
from quiver.testing import LocalCluster, RandomStreams, SimulatedClock, SimulatedLoop
from quiver.testing.memory_cluster import MemoryCluster

Scenario = Callable[[AsyncCluster, str], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]
_NUMBERS = count()
LEASE_S = 1.5
"""So long a busy machine may take between two calls."""


def run_in_memory(scenario: Scenario) -> None:
    streams = RandomStreams(1)
    loop = SimulatedLoop(streams.schedule, time_max_s=3600.0)
    clock = SimulatedClock(loop)

    async def main() -> None:
        memory = MemoryCluster(clock=clock, rng=streams.network)
        connecting = AsyncCluster(memory.addresses, transport=memory, clock=clock, rng=streams.workload)
        async with connecting as cluster:
            await scenario(cluster, "jobs")

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


@pytest.fixture(params=["memory", "nodes"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "memory":
        return run_in_memory
    local: LocalCluster = request.getfixturevalue("local")

    def run_against_nodes(scenario: Scenario) -> None:
        async def main() -> None:
            async with quiver.connect_async(*local.addresses) as cluster:
                await scenario(cluster, f"jobs-{next(_NUMBERS)}")

        asyncio.run(main())

    return run_against_nodes


async def fill(cluster: AsyncCluster, topic: str, values: list[str], *, partitions: int = 1, **options: Any) -> None:
    await cluster.create_topic(topic, partitions=partitions, exist_ok=True)
    async with await cluster.producer(topic) as producer:
        for number, value in enumerate(values):
            producer.send(value, partition=number % partitions, **options)


async def receive(queue: quiver.AsyncQueue, number: int) -> list[quiver.AsyncJob]:
    """Receive so many jobs, however many answers they come in."""
    jobs: list[quiver.AsyncJob] = []
    async with asyncio.timeout(60):
        while len(jobs) < number:
            jobs += await queue.receive(number - len(jobs))
    return jobs


def test_every_job_is_done_once_by_many_workers(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, [str(number) for number in range(120)], partitions=3)
        queue = await cluster.queue(topic, group=topic)
        seen: list[str] = []

        async def work() -> None:
            async for job in queue:
                async with job:
                    seen.append(job.text or "")
                    if len(seen) == 120:
                        await queue.stop()

        await asyncio.gather(*(work() for _ in range(16)))
        assert sorted(seen, key=int) == [str(number) for number in range(120)]
        found = await cluster.describe_queue(topic)
        assert [(one.ready, one.leased, one.cursor, one.stall) for one in found.partitions] == [(0, 0, 40, "empty")] * 3

    run(scenario)


def test_order_leases_and_receipts(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, ["a", "b", "c"])
        queue = await cluster.queue(topic, group=topic, lease=LEASE_S)
        (first,) = await receive(queue, 1)
        assert (first.text, first.offset, first.attempt, first.partition, first.topic) == ("a", 0, 1, 0, topic)
        await asyncio.sleep(LEASE_S + 0.1)
        jobs = await receive(queue, 3)
        assert [(job.text, job.attempt) for job in jobs] == [("a", 2), ("b", 1), ("c", 1)]  # what is due again is first
        with pytest.raises(FencedError) as caught:
            await first.ack()
        assert caught.value.code == "stale_receipt"
        await queue.extend(jobs[:2], lease=300)
        await asyncio.sleep(LEASE_S + 0.1)
        (last,) = await receive(queue, 1)
        assert (last.text, last.attempt) == ("c", 2)
        await queue.ack([jobs[0], jobs[1], last])
        await asyncio.sleep(LEASE_S + 0.1)
        assert await queue.receive(timeout=0) == []

    run(scenario)


def test_late_acknowledgement_of_a_settled_job_is_refused(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, ["a", "b"])
        queue = await cluster.queue(topic, group=topic, lease=0.2, max_attempts=2)
        late = await receive(queue, 2)
        await asyncio.sleep(0.3)
        again = await receive(queue, 2)
        await again[0].ack()
        async with asyncio.timeout(60):
            while (await cluster.describe_queue(topic)).partitions[0].cursor < 2:  # the other one is a dead letter
                await queue.receive(timeout=0.1)
        for job in (*late, again[1]):
            with pytest.raises(FencedError) as caught:
                await job.ack()
            assert caught.value.code == "stale_receipt"
            assert job.is_lost
        await again[0].ack()

    run(scenario)


def test_returns_delays_and_backoff(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        clock = cluster.router.clock
        sent_ms = clock.wall_ms()
        await fill(cluster, topic, ["later"], delay=2)
        await fill(cluster, topic, ["now"])
        queue = await cluster.queue(topic, group=topic, backoff=0.2, backoff_multiplier=2)
        (now,) = await receive(queue, 1)
        assert now.text == "now"
        await now.ack()
        (later,) = await receive(queue, 1)
        assert (later.text, later.attempt) == ("later", 1)
        assert clock.wall_ms() - sent_ms >= 2000
        returned_ms = clock.wall_ms()
        await later.nack()
        (again,) = await receive(queue, 1)
        assert (again.attempt, clock.wall_ms() - returned_ms >= 200) == (2, True)
        await again.release()
        (again,) = await receive(queue, 1)
        assert again.attempt == 2
        returned_ms = clock.wall_ms()
        await again.nack(delay=0.3)
        (again,) = await receive(queue, 1)
        assert (again.attempt, clock.wall_ms() - returned_ms >= 300) == (3, True)
        await again.ack()

    run(scenario)


def test_dead_letters(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, ["rejected", "failing", "good"], headers={"trace": "7"}, key="k")
        queue = await cluster.queue(topic, group=topic, max_attempts=2, backoff=0)
        jobs = await receive(queue, 3)
        await jobs[0].reject("no such user")
        await jobs[1].nack()
        await jobs[2].ack()
        (again,) = await receive(queue, 1)
        assert (again.text, again.attempt) == ("failing", 2)
        await again.nack()
        async with asyncio.timeout(60):
            while f"{topic}.{topic}.dead" not in await cluster.list_topics():  # noqa: ASYNC110 - made by a broker
                await asyncio.sleep(0.05)
        letters = await cluster.consumer(f"{topic}.{topic}.dead")
        found = []
        async for record in letters:
            found.append((record.text, record.key, {name: (value or b"").decode() for name, value in record.headers}))
            if len(found) == 2:
                break
        assert [(text, key) for text, key, _ in found] == [("rejected", b"k"), ("failing", b"k")]
        headers = found[0][2]
        assert headers.pop("quiver-dead-time").isdigit()
        assert headers == {
            "trace": "7",
            DEAD_TOPIC_HEADER: topic,
            DEAD_PARTITION_HEADER: "0",
            DEAD_OFFSET_HEADER: "0",
            DEAD_GROUP_HEADER: topic,
            DEAD_ATTEMPTS_HEADER: "1",
            DEAD_REASON_HEADER: "no such user",
        }
        assert (found[1][2][DEAD_ATTEMPTS_HEADER], found[1][2][DEAD_OFFSET_HEADER]) == ("2", "1")
        assert await queue.receive(timeout=0) == []

    run(scenario)


def test_order_by_key(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        for key, values in (("x", ["x1", "x2"]), ("y", ["y1"])):
            await fill(cluster, topic, values, key=key)
        queue = await cluster.queue(topic, group=topic, order="key", backoff=0)
        jobs = await receive(queue, 2)
        assert sorted(job.text or "" for job in jobs) == ["x1", "y1"]
        assert await queue.receive(timeout=0.1) == []
        by_text = {job.text: job for job in jobs}
        await by_text["x1"].nack()
        (again,) = await receive(queue, 1)
        assert again.text == "x1"
        await again.ack()
        (following,) = await receive(queue, 1)
        assert following.text == "x2"
        await queue.ack([following, by_text["y1"]])

    run(scenario)


def test_bound_of_records_under_way_and_settings(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, [str(number) for number in range(10)])
        queue = await cluster.queue(topic, group=topic, in_flight_max=4)
        jobs = await receive(queue, 4)
        assert await queue.receive(10, timeout=0.1) == []
        (found,) = (await cluster.describe_queue(topic)).partitions
        assert (found.leased, found.stall, found.in_flight_max) == (4, "in_flight_max", 4)
        with pytest.raises(ConflictError) as caught:
            await cluster.queue(topic, group=topic, in_flight_max=5)
        assert caught.value.code == "queue_settings"
        await cluster.configure_queue(topic, in_flight_max=6)
        assert len(await receive(queue, 2)) == 2
        await queue.ack(jobs)
        assert len(await receive(queue, 4)) == 4

    run(scenario)


def test_new_group_may_start_at_the_end(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, ["old"])
        queue = await cluster.queue(topic, group=topic, start="latest")
        await fill(cluster, topic, ["new"])
        (job,) = await receive(queue, 1)
        assert job.text == "new"
        await job.ack()

    run(scenario)


def test_prefetched_jobs_are_released_at_the_end(run: Run) -> None:
    async def scenario(cluster: AsyncCluster, topic: str) -> None:
        await fill(cluster, topic, [str(number) for number in range(6)])
        async with await cluster.queue(topic, group=topic, prefetch=10) as queue:
            (job,) = await receive(queue, 1)
            await job.ack()
            async with asyncio.timeout(60):
                while queue.core.buffered_count < 5:  # noqa: ASYNC110 - for a test only
                    await asyncio.sleep(0.01)
        jobs = await receive(await cluster.queue(topic, group=topic), 5)
        assert [(job.text, job.attempt) for job in jobs] == [(str(number), 1) for number in range(1, 6)]

    run(scenario)

"""Work queues: every record is done by one worker, or comes back until it is; requests are few."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from client_world import World

from quiver.client.cluster import AsyncCluster
from quiver.client.queue import AsyncJob, AsyncQueue
from quiver.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    RequestError,
    UnavailableError,
)
from quiver.model import Buffer
from quiver.record.queue_headers import DEAD_ATTEMPTS_HEADER, DEAD_OFFSET_HEADER, DEAD_REASON_HEADER
from quiver.testing.memory_cluster import CallFaults
from quiver.wire.group_messages import DescribeGroups, JoinGroup
from quiver.wire.queue_messages import QueueReceive
from quiver.wire.requests import R, Request


async def fill(cluster: AsyncCluster, count: int, *, partitions: int = 1) -> None:
    """Create the topic `jobs` with records 0, 1, 2 …"""
    await cluster.create_topic("jobs", partitions=partitions, exist_ok=True)
    async with await cluster.producer("jobs") as producer:
        for number in range(count):
            producer.send(str(number), partition=number % partitions)


async def drain(queue: AsyncQueue) -> list[int]:
    """Acknowledge jobs until there are none."""
    found: list[int] = []
    while jobs := await queue.receive(100, timeout=0):
        found += [int(job.text or "") for job in jobs]
        await jobs.ack()
    return found


def count_calls(world: World, name: str) -> int:
    return sum(asked == name for _, asked in world.cluster.calls)


def test_jobs_are_delivered_in_order_and_not_again_once_acknowledged() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 5)
            queue = await cluster.queue("jobs", group="workers", idle_timeout=1)
            seen = []
            async for job in queue:
                assert (job.attempt, job.topic, job.partition) == (1, "jobs", 0)
                seen.append((job.offset, job.text, job.json()))
                await job.ack()
            assert seen == [(number, str(number), number) for number in range(5)]
            await queue.close()
            assert await drain(await cluster.queue("jobs", group="workers")) == []
            assert await drain(await cluster.queue("jobs", group="others")) == [0, 1, 2, 3, 4]

    world.run(scenario())


def test_job_that_is_not_acknowledged_comes_back_when_its_lease_ends() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers", lease=10)
            (first,) = await queue.receive()
            assert len(await queue.receive(10)) == 1
            assert await queue.receive(timeout=5) == []
            await asyncio.sleep(10)
            again = await queue.receive(10)
            assert [(job.offset, job.attempt) for job in again] == [(0, 2), (1, 2)]
            with pytest.raises(FencedError, match="another worker") as caught:
                await first.ack()
            assert caught.value.code == "stale_receipt"
            assert first.is_lost
            with pytest.raises(FencedError, match="not done for jobs/0:0"):
                await first.ack()
            with pytest.raises(FencedError, match="not done for jobs/0:0"):
                await first.nack()
            with pytest.raises(FencedError, match="not done for jobs/0:0"):
                await first.extend(5)
            with pytest.raises(FencedError, match=r"jobs/0:0: .*; the other 1 are done"):
                await queue.ack([first, *again])
            assert [job.is_settled for job in again] == [True, True]
            await asyncio.sleep(30)
            assert await queue.receive(timeout=0) == []

    world.run(scenario())


def test_jobs_are_settled_only_by_a_queue_of_their_own_group_and_topic() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            await cluster.create_topic("other")
            ours = await cluster.queue("jobs", group="ours")
            theirs = await cluster.queue("jobs", group="theirs")
            elsewhere = await cluster.queue("other", group="ours")
            (mine, later), (foreign, _) = await ours.receive(2), await theirs.receive(2)
            for queue, jobs in ((ours, [mine, foreign]), (elsewhere, [mine])):
                for settle in (queue.ack, queue.nack, queue.extend):
                    with pytest.raises(RequestError, match=r"not done: .*use the queue that they came from") as caught:
                        await settle(jobs)
                    assert caught.value.code == "foreign_job"
            assert [mine.is_settled, foreign.is_settled] == [False, False]
            same_group = await cluster.queue("jobs", group="ours")
            await same_group.ack([mine])
            await ours.ack([later])
            await foreign.ack()
            assert await drain(ours) == []

    world.run(scenario())


def test_worker_of_a_deleted_group_is_told_so() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers")
            (job,) = await queue.receive()
            await cluster.delete_group("workers")
            with pytest.raises(NotFoundError, match="not done: group 'workers' was deleted") as caught:
                await queue.receive(5)
            assert caught.value.code == "unknown_group"
            with pytest.raises(NotFoundError, match="not done: group 'workers' was deleted"):
                await job.ack()

    world.run(scenario())


def test_acknowledgement_after_the_lease_is_good_unless_another_worker_has_the_job() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=1)
            (job,) = await queue.receive()
            await asyncio.sleep(5)
            await job.ack()
            await job.ack()
            with pytest.raises(ConflictError, match="acknowledged before"):
                await job.nack()
            assert await queue.receive(timeout=0) == []

    world.run(scenario())


@pytest.mark.parametrize("kind", ["ack", "reject"])
def test_settlement_of_a_job_that_another_worker_has_settled_is_refused(kind: str) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers", lease=1)
            late = await queue.receive(2)
            await asyncio.sleep(5)
            again = await queue.receive(2)
            await again[0].ack()
            await again[1].reject("broken")
            for job in late:
                for _ in range(2):
                    with pytest.raises(FencedError, match="settled") as refused:
                        await getattr(job, kind)()
                    assert refused.value.code == "stale_receipt"
                assert job.is_lost
            with pytest.raises(FencedError):
                await late.ack()

    world.run(scenario())


def test_acknowledgement_of_a_dead_letter_is_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=1, max_attempts=1)
            (job,) = await queue.receive()
            await asyncio.sleep(5)
            assert await queue.receive(timeout=1) == []
            with pytest.raises(FencedError):
                await job.ack()

    world.run(scenario())


def test_acknowledgement_is_repeated_after_an_answer_that_was_lost() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 6)
            queue = await cluster.queue("jobs", group="workers")
            one, *others = await queue.receive(6)
            world.cluster.faults = CallFaults(lost_answer=1.0)
            acknowledging = asyncio.ensure_future(one.ack())
            await asyncio.sleep(0.1)
            world.cluster.faults = CallFaults()
            await acknowledging  # by an attempt of the SDK
            world.cluster.faults = CallFaults(lost_answer=1.0)
            with pytest.raises(OutcomeUnknownError):
                await queue.ack(others)
            world.cluster.faults = CallFaults()
            await queue.ack(others)  # by the caller
            assert (await cluster.describe_queue("workers")).partitions[0].cursor == 6

    world.run(scenario())


def test_refused_extension_loses_the_job() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=1)
            (late,) = await queue.receive()
            await asyncio.sleep(5)
            (again,) = await queue.receive()
            with pytest.raises(FencedError):
                await late.extend()
            assert late.is_lost
            await again.ack()
            for call in (late.ack(), late.nack(), late.extend()):
                with pytest.raises(FencedError):
                    await call

    world.run(scenario())


def test_with_raises_if_an_extension_was_refused_meanwhile() -> None:
    world = World()

    async def extend_in_block(job: AsyncJob) -> None:
        async with job:
            with suppress(FencedError):
                await job.extend()

    async def scenario() -> None:
        async with world.connect() as cluster, world.connect() as elsewhere:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=1)
            other = await elsewhere.queue("jobs", group="workers")
            (late,) = await queue.receive()
            await asyncio.sleep(5)
            (again,) = await other.receive()
            await again.ack()
            with pytest.raises(FencedError):
                await extend_in_block(late)

    world.run(scenario())


def test_with_acknowledges_on_success_and_returns_on_an_exception() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers", backoff=2)
            async with (await queue.receive())[0] as job:
                assert job.text == "0"
            with pytest.raises(ValueError, match="broken"):
                async with (await queue.receive())[0]:
                    raise ValueError("broken")
            assert await queue.receive(timeout=1) == []
            (again,) = await queue.receive(timeout=2)
            assert (again.offset, again.attempt) == (1, 2)
            async with again:
                await again.reject("it is done in another way")  # no second settlement at the end
            assert await drain(queue) == []

    world.run(scenario())


def test_with_keeps_the_lease_while_the_worker_runs() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=2)
            other = await cluster.queue("jobs", group="workers")
            (job,) = await queue.receive()
            async with job:
                assert await other.receive(timeout=20) == []
            assert await other.receive(timeout=5) == []

    world.run(scenario())


def test_lease_is_kept_no_longer_than_the_longest_processing_time() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=2, max_processing_time=6)
            other = await cluster.queue("jobs", group="workers")
            (job,) = await queue.receive()
            await job.__aenter__()
            assert await other.receive(timeout=5) == []
            assert len(await other.receive(timeout=10)) == 1
            with pytest.raises(FencedError):
                await job.__aexit__(None, None, None)

    world.run(scenario())


def test_cancelled_worker_releases_its_job_without_counting_the_attempt() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers")

            async def work() -> None:
                async with (await queue.receive())[0]:
                    await asyncio.sleep(1000)

            worker = asyncio.create_task(work())
            await asyncio.sleep(5)
            worker.cancel()
            await asyncio.wait([worker])
            (job,) = await queue.receive(timeout=1)
            assert job.attempt == 1

    world.run(scenario())


def test_returned_job_waits_for_its_delay_or_for_the_growing_backoff() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", backoff=1, backoff_multiplier=3, max_attempts=0)
            waits = []
            (job,) = await queue.receive()
            for delay in (None, None, 30, None):
                returned_ms = world.clock.monotonic_ms()
                await job.nack(delay)
                (job,) = await queue.receive(timeout=60)
                waits.append((world.clock.monotonic_ms() - returned_ms) / 1000)
            assert waits == pytest.approx([1, 3, 30, 27], abs=0.1)
            assert job.attempt == 5

    world.run(scenario())


def test_delayed_record_is_delivered_at_its_time() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("jobs", partitions=1)
            producer = await cluster.producer("jobs")
            sent_ms = world.clock.monotonic_ms()
            await producer.send("later", delay=10)
            await producer.send("now")
            queue = await cluster.queue("jobs", group="workers")
            assert [job.text for job in await queue.receive(10, timeout=5)] == ["now"]
            (job,) = await queue.receive(timeout=60)
            assert job.text == "later"
            assert 10_000 <= world.clock.monotonic_ms() - sent_ms < 10_500

    world.run(scenario())


def test_dead_letters_say_where_from_how_often_and_why() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers", max_attempts=2, backoff=0)
            (job,) = await queue.receive()
            await job.reject("cannot be parsed")
            for _ in range(2):
                (job,) = await queue.receive()
                await job.nack()
            assert await queue.receive(timeout=0) == []
            dead = [
                {name: (value or b"").decode() for name, value in record.headers}
                for batch in world.cluster.partition("jobs.workers.dead", 0).batches
                for record in batch.records()
            ]
            assert [one[DEAD_REASON_HEADER] for one in dead] == ["cannot be parsed", "max attempts"]
            assert [one[DEAD_ATTEMPTS_HEADER] for one in dead] == ["1", "2"]
            assert [one[DEAD_OFFSET_HEADER] for one in dead] == ["0", "1"]

    world.run(scenario())


def test_order_by_key_delivers_one_record_of_a_key_at_a_time() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("jobs", partitions=1)
            producer = await cluster.producer("jobs")
            for key, value in (("a", "a1"), ("a", "a2"), ("b", "b1")):
                await producer.send(value, key=key, partition=0)
            queue = await cluster.queue("jobs", group="workers", order="key", backoff=0)
            jobs = await queue.receive(10)
            assert [job.text for job in jobs] == ["a1", "b1"]
            await jobs[0].nack()
            (job,) = await queue.receive(10)
            assert job.text == "a1"
            await job.ack()
            assert [one.text for one in await queue.receive(10)] == ["a2"]

    world.run(scenario())


def test_more_workers_than_partitions_are_all_busy() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 64, partitions=2)
            queue = await cluster.queue("jobs", group="workers")
            busy: set[int] = set()
            everybody = asyncio.Event()

            async def work(worker: int) -> None:
                async for job in queue:
                    async with job:
                        busy.add(worker)
                        if len(busy) == 16:
                            everybody.set()
                        await everybody.wait()

            workers = [asyncio.create_task(work(number)) for number in range(16)]
            await asyncio.wait_for(everybody.wait(), 10)
            await asyncio.sleep(5)
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            assert await drain(queue) == []

    world.run(scenario())


def test_single_receives_and_acknowledgements_of_many_workers_share_requests() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 640)
            queue = await cluster.queue("jobs", group="workers", idle_timeout=1)
            done: Counter[int] = Counter()

            async def work() -> None:
                async for job in queue:
                    done[job.offset] += 1
                    await job.ack()

            await asyncio.gather(*(work() for _ in range(64)))
            assert done == Counter(range(640))
            assert count_calls(world, "queue_settle") < 640 / 10
            assert count_calls(world, "queue_receive") < 640 / 10

    world.run(scenario())


@pytest.mark.parametrize("seed", range(10))
def test_every_job_is_done_once_while_nodes_fail(seed: int) -> None:
    world = World(seed)

    async def scenario() -> None:
        async with world.connect(timeout_ms=20_000) as cluster:
            await fill(cluster, 200, partitions=3)
            queue = await cluster.queue("jobs", group="workers", lease=5, max_attempts=0, idle_timeout=20, backoff=0)
            world.cluster.faults = CallFaults(lost_request=0.05, dropped_request=0.05, lost_answer=0.05)
            done: Counter[str] = Counter()

            async def work() -> None:
                async for job in queue:
                    try:
                        async with job:
                            await asyncio.sleep(world.rng.random() / 20)
                            if world.rng.random() < 0.1:
                                raise ValueError("a bug")
                    except ValueError:
                        continue
                    except FencedError:
                        continue
                    done[job.text or ""] += 1

            workers = asyncio.gather(*(work() for _ in range(8)))
            for node in (1, 2, 3):
                await asyncio.sleep(0.5)
                world.cluster.stop(node)
                await asyncio.sleep(0.5)
                world.cluster.start(node)
            world.cluster.faults = CallFaults()
            await workers
            # An acknowledgement that was carried out is reported once; it may also have been reported as unknown.
            assert max(done.values()) == 1
            assert len(done) >= 195
            found = await cluster.describe_queue("workers")
            assert [(one.ready, one.leased, one.waiting) for one in found.partitions] == [(0, 0, 0)] * 3

    world.run(scenario())


def test_cancelled_receive_loses_no_job() -> None:
    world = World(3)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 30)
            queue = await cluster.queue("jobs", group="workers")
            seen: list[int] = []

            async def work() -> None:
                jobs = await queue.receive(timeout=5)
                seen.extend(int(job.text or "") for job in jobs)

            for _ in range(60):
                worker = asyncio.create_task(work())
                await asyncio.sleep(world.rng.random() / 200)
                worker.cancel()
                await asyncio.wait([worker])
            for _ in range(30 - len(seen)):
                await work()
            assert sorted(seen) == list(range(30))

    world.run(scenario())


def test_jobs_that_no_worker_takes_are_released_to_other_processes() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster, world.connect() as another:
            await cluster.create_topic("jobs", partitions=3)
            queue = await cluster.queue("jobs", group="workers")
            waiting = asyncio.create_task(queue.receive(timeout=5))
            await asyncio.sleep(1)
            await fill(cluster, 3, partitions=3)  # one for each poll that waits
            assert len(await waiting) == 1
            other = await another.queue("jobs", group="workers")
            await asyncio.sleep(1)
            jobs = await other.receive(10, timeout=1) + await other.receive(10, timeout=1)
            assert [job.attempt for job in jobs] == [1, 1]

    world.run(scenario())


def test_closing_releases_prefetched_jobs() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 10)
            queue = await cluster.queue("jobs", group="workers", prefetch=5)
            await (await queue.receive()).ack()
            await asyncio.sleep(20)
            assert queue.core.buffered_count == 5
            await queue.close()
            with pytest.raises(RequestError, match="is closed"):
                await queue.receive()
            await queue.close()
            again = await cluster.queue("jobs", group="workers")
            assert [job.attempt for job in await again.receive(20, timeout=0)] == [1] * 9

    world.run(scenario())


def test_closing_ends_a_waiting_worker() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 0)
            queue = await cluster.queue("jobs", group="workers")
            waiting = asyncio.create_task(queue.receive(timeout=60))
            await asyncio.sleep(1)
            await cluster.close()
            with pytest.raises(RequestError, match="closed"):
                await waiting

    world.run(scenario())


def test_settings_are_those_of_the_first_and_others_are_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            await cluster.queue("jobs", group="workers", lease=7, order="key")
            same = await cluster.queue("jobs", group="workers", lease=7)
            assert (same.settings.lease_ms, same.settings.order) == (7000, "key")
            with pytest.raises(ConflictError, match=r"lease_ms is 7000, not 8000.*configure_queue") as caught:
                await cluster.queue("jobs", group="workers", lease=8)
            assert caught.value.code == "queue_settings"
            await cluster.configure_queue("workers", lease=8)
            await cluster.queue("jobs", group="workers", lease=8)
            assert [(one.group, one.topics, one.settings.lease_ms) for one in await cluster.queues()] == [
                ("workers", ("jobs",), 8000)
            ]

    world.run(scenario())


def test_receive_names_the_index_of_a_group_that_another_worker_creates_meanwhile() -> None:
    world = World()
    received: list[int] = []
    created: list[int] = []

    class Racing:
        """Lets another worker create the group just before this one looks for it."""

        async def call(
            self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
        ) -> tuple[R, memoryview]:
            if isinstance(request, DescribeGroups) and not created:
                joining = JoinGroup(group="workers", topics=("jobs",), kind="queue")
                created.append((await world.cluster.call(address, joining, timeout_ms=timeout_ms))[0].index)
            if isinstance(request, QueueReceive):
                received.append(request.known_index)
            return await world.cluster.call(address, request, payload, timeout_ms=timeout_ms)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
        async with AsyncCluster(("node-1:9002",), transport=Racing(), clock=world.clock, rng=world.rng) as cluster:
            queue = await cluster.queue("jobs", group="workers")
            assert await drain(queue) == [0]
            assert created
            assert min(received) >= created[0]  # a leader that lags behind catches up before it judges the group

    world.run(scenario())


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"lease": 0}, OutOfRangeError),
        ({"backoff_multiplier": 0.5}, OutOfRangeError),
        ({"in_flight_max": 0}, OutOfRangeError),
        ({"order": "alphabet"}, OutOfRangeError),
        ({"prefetch": -1}, OutOfRangeError),
        ({"lease": "long"}, RequestError),
        ({"group": ""}, RequestError),
        ({"topic": "missing"}, NotFoundError),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], kind: type[Exception]) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            with pytest.raises(kind):
                await cluster.queue(**{"topic": "jobs", "group": "workers", **given})
            assert await cluster.queues() == []
            queue = await cluster.queue("jobs", group="workers")
            for wrong in (0, 1_000_000):
                with pytest.raises(OutOfRangeError):
                    await queue.receive(wrong)
            (job,) = await queue.receive()
            for wrong_time in (-1, 1e12):
                with pytest.raises(OutOfRangeError):
                    await job.nack(wrong_time)
                with pytest.raises(OutOfRangeError):
                    await job.extend(wrong_time)
            await job.ack()

    world.run(scenario())


def test_unreachable_cluster_is_an_error_and_an_empty_queue_is_not() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(attempt_timeout_ms=500, timeout_ms=2000) as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers")
            await drain(queue)
            assert await queue.receive(timeout=1) == []
            for node in (1, 2, 3):
                world.cluster.stop(node)
            with pytest.raises(UnavailableError):
                await queue.receive(timeout=3)
            for node in (1, 2, 3):
                world.cluster.start(node)
            assert await queue.receive(timeout=3) == []

    world.run(scenario())


def test_partition_that_is_down_does_not_keep_others_from_workers() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 30, partitions=3)
            queue = await cluster.queue("jobs", group="workers", idle_timeout=3)
            world.cluster.partition("jobs", 1).leader = 99  # type: ignore[assignment] # nobody
            seen = []
            async for job in queue:
                seen.append(job.partition)
                await job.ack()
            assert Counter(seen) == {0: 10, 2: 10}

    world.run(scenario())


def test_added_partitions_are_received_from() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers")
            await drain(queue)
            await cluster.add_partitions("jobs", 2)
            async with await cluster.producer("jobs") as producer:
                await producer.send("new", partition=1)
            jobs = await queue.receive(timeout=30)
            assert [job.text for job in jobs] == ["new"]

    world.run(scenario())


def test_topic_that_was_created_again_has_other_jobs() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(metadata_age_ms_max=1000) as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers")
            (job,) = await queue.receive()
            await cluster.delete_topic("jobs")
            await fill(cluster, 1)
            with pytest.raises(ConflictError, match="created again"):
                await job.ack()
            with pytest.raises(ConflictError, match="created again"):
                await queue.receive()

    world.run(scenario())


def test_settled_job_is_not_extended_and_the_error_says_so() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers", lease=10)
            jobs = await queue.receive(2)
            await jobs[0].ack()
            for extending in (jobs[0].extend(), queue.extend(jobs)):
                with pytest.raises(ConflictError, match="jobs/0:0 was acknowledged before"):
                    await extending
            await jobs[1].extend()

    world.run(scenario())


def test_batch_is_acknowledged_in_one_call_and_says_which_jobs_were_lost() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 200)
            queue = await cluster.queue("jobs", group="workers", lease=5)
            jobs = await queue.receive(200)
            assert len(jobs) == 200
            before = count_calls(world, "queue_settle")
            await queue.ack(job for job in jobs if job.offset % 2)
            assert count_calls(world, "queue_settle") == before + 1
            await queue.extend(jobs[0:1], lease=60)
            await asyncio.sleep(10)
            again = await queue.receive(200)
            assert len(again) == 99
            with pytest.raises(FencedError, match=r"jobs/0:2, jobs/0:4, jobs/0:6 …: .* the other 1 are done"):
                await jobs.ack()
            await again.ack()
            assert (await cluster.describe_queue("workers")).partitions[0].cursor == 200

    world.run(scenario())


def test_process_that_got_a_job_again_settles_both_receipts() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 2)
            queue = await cluster.queue("jobs", group="workers", lease=1)
            jobs = await queue.receive(2)
            await asyncio.sleep(5)
            again = await queue.receive(2)
            assert [job.attempt for job in (*jobs, *again)] == [1, 1, 2, 2]
            results = await asyncio.gather(jobs[0].ack(), again[0].ack(), return_exceptions=True)
            assert results[0] is None or isinstance(results[0], FencedError)  # whichever was first
            assert results[1] is None
            with pytest.raises(FencedError, match=r"jobs/0:1: .* the other 1 are done"):
                await queue.ack((jobs[1], again[1]))
            assert (await cluster.describe_queue("workers")).partitions[0].cursor == 2

    world.run(scenario())


def test_group_that_starts_at_the_end_skips_what_is_there() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 5)
            queue = await cluster.queue("jobs", group="workers", start="latest")
            assert await queue.receive(timeout=1) == []
            await fill(cluster, 1)
            assert [job.offset for job in await queue.receive(10)] == [5]

    world.run(scenario())


def test_stopped_queue_ends_iterations_and_lets_workers_finish() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers", lease=2)
            working, may_end = asyncio.Event(), asyncio.Event()
            seen = []

            async def work() -> None:
                async for job in queue:
                    async with job:
                        working.set()
                        await may_end.wait()
                        seen.append(job.text)

            workers = [asyncio.create_task(work()) for _ in range(3)]
            await working.wait()
            await queue.stop()
            await fill(cluster, 1)
            await asyncio.sleep(10)  # longer than the lease
            assert sum(worker.done() for worker in workers) == 2
            may_end.set()
            await asyncio.gather(*workers)
            assert seen == ["0"]
            assert await queue.receive() == []
            other = await cluster.queue("jobs", group="workers")
            assert [job.offset for job in await other.receive(10, timeout=5)] == [1]

    world.run(scenario())


def test_acknowledgement_whose_answer_was_lost_is_unknown_also_if_the_topic_cannot_be_looked_up_again() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, 1)
            queue = await cluster.queue("jobs", group="workers")
            (job,) = await queue.receive()
            world.cluster.faults = CallFaults(lost_answer=1.0)
            acknowledging = asyncio.ensure_future(job.ack())
            await asyncio.sleep(0.1)
            cluster._cache.forget_topic("jobs")
            with pytest.raises(OutcomeUnknownError, match="may have been done"):
                await acknowledging

    world.run(scenario())

"""Digests of sent and received records: complete, once, at the right offsets."""

from __future__ import annotations

from typing import Any

import pytest
from client_world import World

from quiver.client.cluster import AsyncCluster
from quiver.client.digest_reporter import RUN_RECORDS, TOPIC, Run, Statement, decode_statement
from quiver.errors import DecodeError, QuiverError, RequestError
from quiver.record import Batch
from quiver.record.arrow import to_arrow
from quiver.record.digest import Digest, digest_ranges
from quiver.testing.memory_cluster import CallFaults


def statements(world: World) -> list[Statement]:
    return [decode_statement(value) for value in world.values(TOPIC)]


def runs(world: World, role: str = "consumer", partition: int = 0) -> list[Run]:
    found = [one for one in statements(world) if (one.role, one.partition) == (role, partition)]
    return [run for statement in found for run in statement.runs]


def stored(world: World, first: int, end: int, partition: int = 0) -> Digest:
    """Return the digest of the stored records."""
    total = Digest()
    for batch in world.cluster.partition("logs", partition).batches:
        total += digest_ranges(to_arrow(Batch.decode(batch.data)), [first, end]).get(first, Digest())
    return total


def check(world: World, found: list[Run], partition: int = 0) -> None:
    for run in found:
        assert run.digest == stored(world, run.first_offset, run.end_offset, partition)
        assert run.first_offset // RUN_RECORDS == (run.end_offset - 1) // RUN_RECORDS


def places(found: list[Run]) -> list[tuple[int, int]]:
    return [(run.first_offset, run.end_offset) for run in found]


async def send(cluster: AsyncCluster, count: int, **options: Any) -> None:
    await cluster.create_topic("logs", partitions=1, exist_ok=True)
    async with await cluster.producer("logs", batch_bytes=5_000, **options) as producer:
        for number in range(count):
            await producer.wait_room()
            producer.send(f"{number}", key=f"k{number % 7}", headers=[("h", None)] if number % 3 else None)


def test_producer_publishes_digests_of_acknowledged_records() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 2_500, digests=True, name="web-1")

    world.run(scenario())
    found = runs(world, "producer")
    assert [at for first, end in sorted(places(found)) for at in range(first, end)] == list(range(2_500))
    check(world, found)
    assert {(one.name, one.topic, one.topic_id) for one in statements(world)} == {("web-1", "logs", 1)}


def test_producer_digests_have_the_committed_offsets_despite_lost_answers() -> None:
    world = World(seed=3)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 1_000)
            world.cluster.faults = CallFaults(lost_answer=0.2, lost_request=0.1)
            await send(cluster, 2_000, digests=True)
            world.cluster.faults = CallFaults()

    world.run(scenario())
    found = runs(world, "producer")
    assert sum(end - first for first, end in places(found)) == 2_000
    assert min(places(found))[0] == 1_000
    check(world, found)


def test_consumer_publishes_digests_for_every_way_of_reading() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 3_000)
            consumer = await cluster.consumer("logs", name="report", digests=True, idle_timeout=5)
            assert len(await consumer.poll(10)) == 10
            assert len(await consumer.poll(7)) == 7
            await consumer.commit()
            assert (await consumer.fetch_arrow(max_records=1_500)).num_rows == 1_500
            assert len([record async for record in consumer]) == 1_483
            await consumer.close()

    world.run(scenario())
    found = runs(world)
    assert places(found) == [(0, 17), (17, 1024), (1024, 2048), (2048, 3000)]
    check(world, found)


def test_prefetched_records_are_not_in_the_digests() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 2_000)
            consumer = await cluster.consumer("logs", name="report", digests=True)
            await consumer.poll(300)
            await consumer.close()

    world.run(scenario())
    assert places(runs(world)) == [(0, 300)]


def test_digests_are_published_before_a_commit() -> None:
    """A consumer that crashes after a commit has published digests up to its cursor."""
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 2_000)
            consumer = await cluster.consumer("logs", name="report", digests=True)
            for _ in range(5):
                await consumer.poll(100)
                await consumer.commit()
            assert places(runs(world)) == [(first, first + 100) for first in range(0, 500, 100)]
            world.cluster.stopped = set(world.cluster.nodes)
            await consumer.poll(100)
            with pytest.raises(QuiverError):
                await consumer.commit()
            assert world.cluster.partition("logs", 0).cursors[consumer.consumer_id] == 500  # type: ignore[index] # it has an id
            world.cluster.stopped = set()

    world.run(scenario())
    check(world, runs(world))


def test_redelivered_records_are_digested_again() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 2_000)
            consumer = await cluster.consumer("logs", name="report", digests=True)
            await consumer.poll(50)
            await consumer.seek(0, 20)
            await consumer.poll(40)
            await consumer.seek(0, 1_500)
            await consumer.poll(10)
            await consumer.close()

    world.run(scenario())
    assert places(runs(world)) == [(0, 50), (20, 60), (1500, 1510)]
    check(world, runs(world))


def test_many_runs_are_published_before_a_commit() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send_many([b"%d" % number for number in range(300 * RUN_RECORDS)])
            await producer.flush()
            consumer = await cluster.consumer("logs", name="report", digests=True)
            seen = 0
            while seen < 300 * RUN_RECORDS:
                seen += len(await consumer.poll(100_000))
            await consumer.poll(1, timeout=0.5)
            assert len(runs(world)) >= 256

    world.run(scenario())
    assert [first for first, _ in places(runs(world)) if not first % RUN_RECORDS] == list(range(0, 307_200, 1024))


def test_digests_need_a_consumer_name() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await send(cluster, 1)
            with pytest.raises(RequestError, match="need a consumer with a name"):
                await cluster.consumer("logs", digests=True)

    world.run(scenario())


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"{}",
        b'{"v":2,"role":"consumer","name":"a","topic":"t","topic_id":1,"partition":0,"runs":[]}',
        b'{"role":"consumer","name":"a","topic":"t","topic_id":1,"partition":0,"runs":[[5,5,"%s"]]}' % (b"0" * 32),
        b'{"role":"consumer","name":"a","topic":"t","topic_id":1,"partition":0,"runs":[[5,6,"12"]]}',
        b'{"role":"consumer","name":"a","topic":"t","topic_id":1,"partition":0,"runs":[[5,6,"%s"]]}' % (b"x" * 32),
    ],
)
def test_malformed_statement_is_refused(value: bytes | None) -> None:
    with pytest.raises(DecodeError):
        decode_statement(value)

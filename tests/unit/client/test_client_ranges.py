"""Ranges: exactly the records between two offsets of one incarnation of a topic."""

from __future__ import annotations

import pytest
from client_world import World

from quiver.client.cluster import AsyncCluster
from quiver.errors import (
    ConflictError,
    DecodeError,
    NotFoundError,
    OutOfRangeError,
    QuiverError,
    RequestError,
    TrimmedError,
)
from quiver.record import Batch
from quiver.testing.memory_cluster import CallFaults


async def fill(cluster: AsyncCluster, *, partitions: int = 1, count: int = 10) -> None:
    await cluster.create_topic("logs", partitions=partitions)
    async with await cluster.producer("logs", batch_bytes=100) as producer:
        for number in range(count):
            producer.send(f"{number}", partition=number % partitions, timestamp=1000 + number)


async def read(cluster: AsyncCluster, first: int, end: int, *, topic_id: int | None = None) -> list[int]:
    found: list[int] = []
    async for batch in cluster.read_range("logs", 0, first, end, topic_id=topic_id):
        found += [int(record.text or "") for record in batch.records(first, end)]  # type: ignore[arg-type] # offsets
    return found


def test_offsets_are_returned_for_all_or_the_named_partitions() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, partitions=2, count=9)
            latest = await cluster.offsets("logs")
            assert latest.offsets == {0: 5, 1: 4}
            assert (await cluster.offsets("logs", "earliest")).offsets == {0: 0, 1: 0}
            assert (await cluster.offsets("logs", 1004)).offsets == {0: 2, 1: 2}
            some = await cluster.offsets("logs", {1: "latest"}, topic_id=latest.topic_id)
            assert some.offsets == {1: 4}
            with pytest.raises(NotFoundError, match="no partition 2"):
                await cluster.offsets("logs", {2: "latest"})

    world.run(scenario())


@pytest.mark.parametrize(("first", "end"), [(0, 10), (3, 7), (4, 5), (0, 0), (10, 10)])
def test_range_yields_exactly_its_records(first: int, end: int) -> None:
    world = World()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster)
            return await read(cluster, first, end)

    assert world.run(scenario()) == list(range(first, end))


def test_range_is_read_despite_faults() -> None:
    world = World(seed=7)
    world.cluster.faults = CallFaults(lost_request=0.2, lost_answer=0.2)

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster, count=50)
            return await read(cluster, 0, 50)

    assert world.run(scenario()) == list(range(50))


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_consumed_batches_are_forwarded_unchanged(lost: float) -> None:
    world = World(seed=3)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=30)
            await cluster.create_topic("copy", partitions=1)
            world.cluster.faults = CallFaults(lost_request=lost, lost_answer=lost)
            read = [batch async for batch in cluster.read_range("logs", 0, 0, 30)]
            async with await cluster.producer("copy", name="copier", compression="lz4") as producer:
                for batch in read:
                    await producer.send_many(batch, partition=0)
            copied = [batch async for batch in cluster.read_range("copy", 0, 0, 30)]
            assert [one.payload() for one in copied] == [one.payload() for one in read]
            assert [list(one.records()) for one in copied] == [list(one.records()) for one in read]
            assert [one.header.base_sequence for one in copied] == [one.header.base_offset for one in read]

    world.run(scenario())


def test_batch_that_cannot_be_forwarded_is_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            (batch,) = [batch async for batch in cluster.read_range("logs", 0, 0, 1)]
            damaged = bytearray(batch.data)
            damaged[-1] ^= 1
            async with await cluster.producer("logs") as producer:
                with pytest.raises(RequestError, match="pass no key, and no control batch"):
                    await producer.send_many(batch, key="k")
                with pytest.raises(DecodeError):
                    await producer.send_many(Batch.decode(damaged, verify=False))
            assert (await cluster.offsets("logs")).offsets == {0: 10}

    world.run(scenario())


@pytest.mark.parametrize(
    ("first", "end", "kind", "code"),
    [(2, 9, TrimmedError, "trimmed"), (5, 11, OutOfRangeError, "past_end"), (7, 6, OutOfRangeError, "out_of_range")],
)
def test_missing_offsets_are_an_error(first: int, end: int, kind: type[QuiverError], code: str) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            world.cluster.partition("logs", 0).trim(4)
            with pytest.raises(kind) as caught:
                await read(cluster, first, end)
            assert caught.value.code == code

    world.run(scenario())


def test_recreated_topic_is_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            topic_id = (await cluster.offsets("logs")).topic_id
            await cluster.delete_topic("logs")
            await fill(cluster)
            with pytest.raises(ConflictError) as caught:
                await read(cluster, 0, 10, topic_id=topic_id)
            assert caught.value.code == "topic_recreated"
            with pytest.raises(ConflictError):
                await cluster.offsets("logs", topic_id=topic_id)

    world.run(scenario())


def test_cursors_of_a_named_consumer_are_moved_without_reading() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            await cluster.move_cursors("logs", "report", {0: 6})
            consumer = await cluster.consumer("logs", name="report")
            assert [record.text for record in await consumer.poll(2, timeout=5)] == ["6", "7"]

    world.run(scenario())

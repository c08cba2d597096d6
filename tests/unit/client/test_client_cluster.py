"""Cluster objects: administration with true outcomes, and a metadata cache that recovers from stale entries."""

from __future__ import annotations

import asyncio

import pytest
from client_world import World

from quiver.errors import ConflictError, NotFoundError, OutcomeUnknownError, OutOfRangeError, UnavailableError
from quiver.testing import Latency
from quiver.testing.memory_cluster import CallFaults
from quiver.wire.messages import RetentionInfo


def test_topics_are_created_changed_listed_deleted_and_restored() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("b", partitions=2)
            await cluster.create_topic("a")
            assert await cluster.list_topics() == ["a", "b"]
            with pytest.raises(ConflictError) as refused:
                await cluster.create_topic("a")
            assert refused.value.code == "topic_exists"
            await cluster.create_topic("a", exist_ok=True)
            await cluster.add_partitions("b", 4)
            await cluster.configure_topic("b", retention=RetentionInfo(ms=1000))
            described = await cluster.describe_topic("b")
            assert [partition.partition for partition in described.partitions] == [0, 1, 2, 3]
            assert described.retention.ms == 1000
            await cluster.delete_topic("b")
            assert await cluster.list_topics() == ["a"]
            with pytest.raises(NotFoundError):
                await cluster.describe_topic("b")
            await cluster.restore_topic("b")
            assert await cluster.list_topics() == ["a", "b"]

    world.run(scenario())


def test_description_shows_what_leaders_report() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            producer = await cluster.producer("logs")
            await producer.send("x", partition=1)
            world.cluster.move_leader("logs", 1, 3)
            first, second = (await cluster.describe_topic("logs")).partitions
            assert (first.leader, first.end_offset) == (1, 0)
            assert (second.leader, second.end_offset, second.in_sync) == (3, 1, (1, 2, 3))
            world.cluster.stopped.add(3)  # type: ignore[arg-type]
            assert (await cluster.describe_topic("logs")).partitions[1].end_offset is None

    world.run(scenario())


def test_brokers_and_clients_are_listed() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            assert [node.node for node in await cluster.brokers()] == [1, 2, 3]
            assert cluster.cluster_id == "memory"
            await cluster.drain(2)
            await cluster.remove(2)
            with pytest.raises(NotFoundError):
                await cluster.drain(9)
            await cluster.create_topic("logs", partitions=1)
            await cluster.producer("logs", name="web-1")
            consumer = await cluster.consumer("logs", name="report")
            assert [(info.kind, info.name) for info in await cluster.clients()] == [
                ("producer", "web-1"),
                ("consumer", "report"),
            ]
            assert [info.name for info in await cluster.clients("producer", "logs")] == ["web-1"]
            assert consumer.consumer_id is not None
            await cluster.forget("consumer", consumer.consumer_id)
            assert await cluster.clients("consumer") == []

    world.run(scenario())


@pytest.mark.parametrize("seed", range(10))
def test_topic_is_created_once_despite_lost_answers(seed: int) -> None:
    world = World(seed)

    async def scenario() -> None:
        async with world.connect() as cluster:
            world.cluster.faults = CallFaults(lost_answer=0.7)
            await cluster.create_topic("logs")
            world.cluster.faults = CallFaults()
            assert await cluster.list_topics() == ["logs"]

    world.run(scenario())


def test_deletion_is_not_repeated_after_an_unknown_outcome() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs")
            world.cluster.faults = CallFaults(lost_answer=1.0)
            with pytest.raises(OutcomeUnknownError):
                await cluster.delete_topic("logs")
            world.cluster.faults = CallFaults()

    world.run(scenario())
    assert [name for _, name in world.cluster.calls].count("delete_topic") == 1


def test_call_ends_at_its_deadline_and_reports_not_done() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(timeout_ms=3000) as cluster:
            for node in (1, 2, 3):
                world.cluster.stop(node)
            begun_ms = world.clock.monotonic_ms()
            with pytest.raises(UnavailableError):
                await cluster.create_topic("logs")
            assert world.clock.monotonic_ms() - begun_ms <= 3000

    world.run(scenario())


def test_request_moves_from_a_silent_node_to_another() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(attempt_timeout_ms=500) as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send("x")
            world.cluster.stop(1)
            begun_ms = world.clock.monotonic_ms()
            assert (await producer.send("y")).offset == 1
            assert world.clock.monotonic_ms() - begun_ms < 1000

    world.run(scenario())


def test_connect_tries_the_next_address_if_one_is_silent() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(addresses=["nowhere:1,node-2:9002", "nowhere:2"]) as cluster:
            assert cluster.cluster_id == "memory"

    world.run(scenario())


def test_refusal_refreshes_stale_metadata() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            world.cluster.metadata_lag = {"logs": 3}  # type: ignore[dict-item]
            producer = await cluster.producer("logs")
            for number in range(3):
                assert (await producer.send("x")).offset == number
        produced = [address for address, name in world.cluster.calls if name == "produce"]
        assert produced == ["node-3:9002", "node-1:9002", "node-1:9002", "node-1:9002"]

    world.run(scenario())


def test_concurrent_lookups_of_a_topic_share_one_request() -> None:
    world = World(latency=Latency(minimum_ms=10))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            world.cluster.calls.clear()
            deadline = cluster.router.deadline()
            await asyncio.gather(*(cluster.router.find_topic("logs", deadline=deadline) for _ in range(20)))
        assert [name for _, name in world.cluster.calls].count("get_metadata") == 1

    world.run(scenario())


def test_options_out_of_bounds_are_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            with pytest.raises(OutOfRangeError):
                await cluster.producer("logs", batch_bytes=0)
            with pytest.raises(OutOfRangeError):
                await cluster.producer("logs", compression="gzip")  # type: ignore[arg-type]
            with pytest.raises(OutOfRangeError):
                await cluster.producer("logs", delivery_timeout=-1)
            with pytest.raises(OutOfRangeError):
                await cluster.consumer("logs", start="middle")  # type: ignore[arg-type]

    world.run(scenario())
    with pytest.raises(OutOfRangeError):
        World().connect(timeout_ms=0)


def test_closing_a_cluster_closes_its_producers_and_consumers() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", linger_ms=10_000)
            delivery = producer.send("flushed at the end")
            consumer = await cluster.consumer("logs")
        assert delivery.offset == 0
        with pytest.raises(UnavailableError):
            producer.send("late")
        with pytest.raises(Exception, match="closed"):
            await consumer.poll()

    world.run(scenario())


def test_operator_reads_lag_and_resets_a_consumer() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            producer = await cluster.producer("logs")
            await producer.send_many([b"x"] * 10, partition=0)
            await producer.send_many([b"y"] * 5, partition=1)
            await producer.flush()
            consumer = await cluster.consumer("logs", name="report")
            assert consumer.consumer_id is not None
            await consumer.seek(0, 4)
            await consumer.commit()
            assert await consumer.end_offsets() == {0: 10, 1: 5}
            id_ = consumer.consumer_id
            assert [(lag.partition, lag.cursor, lag.lag) for lag in await cluster.lag(id_)] == [(0, 4, 6), (1, 0, 5)]
            await cluster.reset(id_, "logs", "latest", partitions=[1])
            assert [lag.lag for lag in await cluster.lag(id_, "logs")] == [6, 0]
            with pytest.raises(OutOfRangeError):
                await cluster.reset(id_, "logs", 6)
            with pytest.raises(NotFoundError):
                await cluster.reset(id_, "logs", 0, partitions=[2])
            assert [lag.lag for lag in await cluster.lag(id_)] == [6, 0]
            await cluster.reset(id_, "logs", "earliest")
            assert [lag.cursor for lag in await cluster.lag(id_)] == [0, 0]
            with pytest.raises(NotFoundError) as unknown:
                await cluster.lag(id_ + 1)
            assert unknown.value.code == "unknown_consumer"

    world.run(scenario())


def test_consumer_of_an_unknown_partition_is_refused_immediately() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            begun_ms = world.clock.monotonic_ms()
            with pytest.raises(NotFoundError) as refused:
                await cluster.consumer("logs", partitions=[0, 2])
            assert refused.value.code == "unknown_partition"
            assert world.clock.monotonic_ms() - begun_ms < 1000

    world.run(scenario())


def test_cluster_forgets_producers_and_consumers_that_are_closed() -> None:
    world = World()

    async def scenario() -> tuple[int, int]:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            short = cluster.with_timeout(5)
            for _ in range(3):
                async with await cluster.producer("logs") as producer, await short.consumer("logs"):
                    await producer.send("x")
            left_open = await cluster.producer("logs")
            delivery = left_open.send("y")
            kept = len(cluster._clients)
        assert delivery.is_done
        return kept, len(cluster._clients)

    assert world.run(scenario()) == (1, 0)
    assert len(world.values("logs")) == 4


def test_status_of_a_silent_cluster_fails_within_the_timeout() -> None:
    world = World()

    async def scenario() -> int:
        async with world.connect() as cluster:
            world.cluster.faults = CallFaults(lost_request=1.0)
            begun_ms = world.clock.monotonic_ms()
            with pytest.raises(UnavailableError):
                await cluster.with_timeout(2).status()
            return world.clock.monotonic_ms() - begun_ms

    assert world.run(scenario()) <= 2_100

"""Consumers: they return every record in order per partition, and resume at their last commit."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from client_world import World

from quiver.client.cluster import AsyncCluster
from quiver.client.consumer import AsyncConsumer
from quiver.errors import (
    DamageError,
    NotFoundError,
    OutOfRangeError,
    RequestError,
    TrimmedError,
    UnavailableError,
)
from quiver.record import Record
from quiver.testing.memory_cluster import CallFaults


async def fill(cluster: AsyncCluster, *, partitions: int = 1, count: int = 10, batch_bytes: int = 100) -> None:
    await cluster.create_topic("logs", partitions=partitions)
    async with await cluster.producer("logs", batch_bytes=batch_bytes) as producer:
        for number in range(count):
            producer.send(f"{number}", partition=number % partitions, timestamp=1000 + number)


def numbers(records: list[Record]) -> list[int]:
    return [int(record.text or "") for record in records]


async def read_forever(consumer: AsyncConsumer, records: list[Record]) -> None:
    while True:
        records += await consumer.poll(timeout=10)


def test_iteration_yields_every_record_of_every_partition_in_order() -> None:
    world = World()

    async def scenario() -> list[Record]:
        async with world.connect() as cluster:
            await fill(cluster, partitions=3, count=99)
            consumer = await cluster.consumer("logs", idle_timeout=2)
            return [record async for record in consumer]

    records = world.run(scenario())
    for partition in range(3):
        own = [record for record in records if record.partition == partition]
        assert numbers(own) == list(range(partition, 99, 3))
        assert [record.offset for record in own] == list(range(33))


def test_iteration_waits_for_later_records() -> None:
    world = World()

    async def scenario() -> list[str | None]:
        async with world.connect() as cluster:
            await fill(cluster, count=0)
            consumer = await cluster.consumer("logs", idle_timeout=30)
            producer = await cluster.producer("logs")

            async def send_later() -> None:
                for number in range(3):
                    await asyncio.sleep(5)
                    await producer.send(f"late {number}")

            async with asyncio.TaskGroup() as group:
                group.create_task(send_later())
                return [record.text async for record in consumer]

    assert world.run(scenario()) == ["late 0", "late 1", "late 2"]


def test_poll_returns_available_records_and_waits_only_for_the_first() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10)
            consumer = await cluster.consumer("logs")
            assert numbers(await consumer.poll(4, timeout=5)) == [0, 1, 2, 3]
            assert consumer.position(0) == 4
            rest = await consumer.poll(100, timeout=5)
            while len(rest) < 6:
                rest += await consumer.poll(100, timeout=5)
            assert numbers(rest) == [4, 5, 6, 7, 8, 9]
            begun_ms = world.clock.monotonic_ms()
            assert await consumer.poll(timeout=0.5) == []
            assert world.clock.monotonic_ms() - begun_ms == 500

    world.run(scenario())


@pytest.mark.parametrize("seed", range(15))
def test_no_record_is_skipped_or_duplicated_despite_lost_messages(seed: int) -> None:
    world = World(seed)

    async def scenario() -> list[Record]:
        async with world.connect(attempt_timeout_ms=500) as cluster:
            await fill(cluster, partitions=2, count=120)
            world.cluster.faults = CallFaults(lost_request=0.2, dropped_request=0.1, lost_answer=0.2)
            consumer = await cluster.consumer("logs", name="report", prefetch_bytes=300, fetch_bytes=150)
            records: list[Record] = []
            while len(records) < 120:
                records += await consumer.poll(7, timeout=5)
                if world.rng.random() < 0.1:
                    world.cluster.move_leader("logs", world.rng.randrange(2), 1 + world.rng.randrange(3))
            assert await consumer.size() == 0
            world.cluster.faults = CallFaults()
            return records

    records = world.run(scenario())
    for partition in range(2):
        own = [record for record in records if record.partition == partition]
        assert numbers(own) == list(range(partition, 120, 2))


def test_named_consumer_resumes_at_its_last_commit() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10, batch_bytes=10_000)
        for first in (0, 3, 6):
            async with world.connect() as cluster:
                consumer = await cluster.consumer("logs", name="report")
                assert numbers(await consumer.poll(3, timeout=5)) == [first, first + 1, first + 2]
                await consumer.commit()
                assert numbers(await consumer.poll(1, timeout=5)) == [first + 3]  # read, but not committed
        async with world.connect() as cluster:
            other = await cluster.consumer("logs", name="other")
            assert numbers(await other.poll(1, timeout=5)) == [0]

    world.run(scenario())
    assert [name for name, _ in world.cluster.consumers.values()] == ["report", "other"]


def test_consumer_resumes_by_its_id() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=4)
            first = await cluster.consumer("logs", name="report")
            await first.poll(2, timeout=5)
            await first.commit()
            again = await cluster.consumer("logs", consumer_id=first.consumer_id)
            assert again.consumer_id == first.consumer_id
            assert numbers(await again.poll(1, timeout=5)) == [2]
            with pytest.raises(NotFoundError):
                await cluster.consumer("logs", consumer_id=99)

    world.run(scenario())


def test_commit_inside_an_iteration_covers_only_yielded_records() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10, batch_bytes=10_000)
            consumer = await cluster.consumer("logs", name="report")
            async for record in consumer:
                if record.offset == 4:
                    await consumer.commit()
                    break
            assert consumer.position(0) == 5
            # Records that were not yielded are returned by the next call of any kind.
            assert numbers(await consumer.poll(2, timeout=5)) == [5, 6]
            async for record in consumer:
                assert record.offset == 7
                break

    world.run(scenario())
    assert list(world.cluster.partition("logs", 0).cursors.values()) == [5]


def test_auto_commit_stores_positions_that_the_application_has_passed() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=6, batch_bytes=10_000)
            consumer = await cluster.consumer("logs", name="report", auto_commit=1)
            cursors = world.cluster.partition("logs", 0).cursors
            await consumer.poll(2, timeout=5)
            await asyncio.sleep(2)
            assert list(cursors.values()) == [0]
            await consumer.poll(2, timeout=5)
            assert list(cursors.values()) == [2]
            assert len(await consumer.poll(2, timeout=5)) == 2
            await consumer.poll(1, timeout=3)  # nothing comes, and meanwhile the commit falls due
            assert list(cursors.values()) == [6]

    world.run(scenario())


def test_auto_commit_on_close_but_not_after_an_error_of_the_application() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=6, batch_bytes=10_000)
            cursors = world.cluster.partition("logs", 0).cursors

            async def fail_after_reading() -> None:
                async with await cluster.consumer("logs", name="report", auto_commit=60) as consumer:
                    await consumer.poll(2, timeout=5)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail_after_reading()
            assert list(cursors.values()) == [0]
            async with await cluster.consumer("logs", name="report", auto_commit=60) as consumer:
                await consumer.poll(2, timeout=5)
            assert list(cursors.values()) == [2]

    world.run(scenario())


def test_consumer_without_a_name_leaves_no_state() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=3)
            consumer = await cluster.consumer("logs")
            assert consumer.consumer_id is None
            await consumer.poll(timeout=5)
            with pytest.raises(RequestError) as refused:
                await consumer.commit()
            assert refused.value.code == "no_consumer_name"
            with pytest.raises(RequestError):
                await cluster.consumer("logs", auto_commit=1)

    world.run(scenario())
    assert world.cluster.consumers == {}
    assert world.cluster.partition("logs", 0).cursors == {}


def test_consumer_without_a_name_reads_on_when_every_registration_has_expired() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=3)
            unnamed, named = await cluster.consumer("logs"), await cluster.consumer("logs", name="report")
            assert len(await unnamed.poll(timeout=5)) == len(await named.poll(timeout=5)) == 3
            for consumer_id in list(world.cluster.consumers):
                await cluster.forget("consumer", consumer_id)
            async with await cluster.producer("logs") as producer:
                await producer.send("after", partition=0)
            assert await unnamed.size() == 1
            assert [record.text for record in await unnamed.poll(timeout=5)] == ["after"]
            with pytest.raises(NotFoundError) as failed:
                await named.commit()
            assert (failed.value.code, failed.value.outcome) == ("unknown_consumer", "not_done")

    world.run(scenario())


@pytest.mark.parametrize("name", [None, "report"])
def test_latest_starts_after_existing_records(name: str | None) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=5)
            consumer = await cluster.consumer("logs", name, start="latest")
            assert consumer.position(0) == 5
            assert await consumer.size() == 0
            producer = await cluster.producer("logs")
            await producer.send("5")
            assert await consumer.size() == 1
            assert numbers(await consumer.poll(timeout=5)) == [5]

    world.run(scenario())


def test_seek_accepts_offsets_names_and_timestamps() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10)
            consumer = await cluster.consumer("logs")
            await consumer.poll(3, timeout=5)
            await consumer.seek(0, 7)
            assert numbers(await consumer.poll(1, timeout=5)) == [7]
            await consumer.seek(0, "earliest")
            assert numbers(await consumer.poll(1, timeout=5)) == [0]
            await consumer.seek(0, timestamp=1004)
            assert numbers(await consumer.poll(1, timeout=5)) == [4]
            await consumer.seek(0, timestamp=datetime.fromtimestamp(1.006, UTC))
            assert numbers(await consumer.poll(1, timeout=5)) == [6]
            await consumer.seek(partition=0, offset="latest")
            assert await consumer.poll(timeout=0.1) == []
            for arguments in ({"offset": -1}, {"offset": "nowhere"}, {}, {"offset": 1, "timestamp": 1}):
                with pytest.raises(OutOfRangeError):
                    await consumer.seek(0, **arguments)
            with pytest.raises(NotFoundError):
                await consumer.seek(1, 0)

    world.run(scenario())


def test_seek_inside_an_iteration_takes_effect_with_the_next_record() -> None:
    world = World()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster, count=10, batch_bytes=10_000)
            consumer = await cluster.consumer("logs", idle_timeout=2)
            seen: list[int] = []
            async for record in consumer:
                seen.append(record.offset)
                if record.offset == 2 and seen.count(2) == 1:
                    await consumer.seek(0, 1)
            return seen

    assert world.run(scenario()) == [0, 1, 2, *range(1, 10)]


def test_trimmed_records_are_an_error_unless_on_trimmed_skips_them() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10)
            strict = await cluster.consumer("logs", name="strict")
            lenient = await cluster.consumer("logs", name="lenient", on_trimmed="earliest")
            world.cluster.partition("logs", 0).trim(6)
            for consumer in (strict, lenient):
                await consumer.seek(0, 2)
            with pytest.raises(TrimmedError):
                await strict.poll(timeout=5)
            records: list[Record] = []
            while len(records) < 4:
                records += await lenient.poll(timeout=5)
            assert numbers(records) == [6, 7, 8, 9]
            assert lenient.skipped_count == 4
            await strict.seek(0, "earliest")
            assert numbers(await strict.poll(1, timeout=5)) == [6]

    world.run(scenario())


def test_unreachable_cluster_is_reported_and_reading_resumes() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(timeout_ms=2000) as cluster:
            await fill(cluster, count=4)
            consumer = await cluster.consumer("logs", fetch_bytes=1, prefetch_bytes=0)
            assert numbers(await consumer.poll(1, timeout=5)) == [0]
            for node in (1, 2, 3):
                world.cluster.stop(node)
            records: list[Record] = []
            with pytest.raises(UnavailableError):
                await read_forever(consumer, records)
            for node in (1, 2, 3):
                world.cluster.start(node)
            while len(records) < 3:
                records += await consumer.poll(timeout=10)
            assert numbers(records) == [1, 2, 3]

    world.run(scenario())


def test_added_partitions_are_read_from_their_first_record() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=2)
            consumer = await cluster.consumer("logs", name="report", start="latest")
            await cluster.add_partitions("logs", 2)
            producer = await cluster.producer("logs")
            await producer.send("early", partition=1)
            records = await consumer.poll(timeout=60)
            assert [(record.partition, record.text) for record in records] == [(1, "early")]
            assert consumer.partitions == (0, 1)

    world.run(scenario())


def test_chosen_partitions_are_the_only_ones_read() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, partitions=3, count=9)
            consumer = await cluster.consumer("logs", partitions=[1], idle_timeout=1)
            assert numbers([record async for record in consumer]) == [1, 4, 7]

    world.run(scenario())


def test_prefetch_stays_within_its_bound() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=100, batch_bytes=100)
            consumer = await cluster.consumer("logs", fetch_bytes=1, prefetch_bytes=1000)
            await asyncio.sleep(10)
            fetches = [name for _, name in world.cluster.calls if name == "fetch"]
            assert len(fetches) < 10
            assert numbers(await consumer.poll(3, timeout=5)) == [0, 1, 2]

    world.run(scenario())


def test_fetch_arrow_returns_all_available_records() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, partitions=2, count=50)
            consumer = await cluster.consumer("logs", fetch_bytes=300)
            table = await consumer.fetch_arrow()
            assert table.schema.names == ["topic", "partition", "offset", "timestamp", "key", "value"]
            rows = sorted(table.to_pylist(), key=lambda row: int(row["value"]))
            assert [int(row["value"]) for row in rows] == list(range(50))
            assert {row["topic"] for row in rows} == {"logs"}
            assert [row["partition"] for row in rows] == [number % 2 for number in range(50)]
            assert [row["offset"] for row in rows] == [number // 2 for number in range(50)]
            assert (await consumer.fetch_arrow(timeout=0.1)).num_rows == 0

    world.run(scenario())


def test_fetch_arrow_respects_max_records_and_returns_headers() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10, batch_bytes=10_000)
            producer = await cluster.producer("logs")
            await producer.send("10", headers=[("a", b"1")])
            consumer = await cluster.consumer("logs")
            assert (await consumer.fetch_arrow(4)).column("offset").to_pylist() == [0, 1, 2, 3]
            assert numbers(await consumer.poll(1, timeout=5)) == [4]
            table = await consumer.fetch_arrow(with_headers=True)
            assert table.column("offset").to_pylist() == [5, 6, 7, 8, 9, 10]
            assert table.column("headers").to_pylist()[-1] == [{"key": "a", "value": b"1"}]

    world.run(scenario())


def test_closed_consumer_raises_closed() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=1)
            consumer = await cluster.consumer("logs")
            await consumer.close()
            await consumer.close()
            with pytest.raises(RequestError) as refused:
                await consumer.poll()
            assert refused.value.code == "closed"

    world.run(scenario())


def test_gap_in_a_leaders_answer_is_detected() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=10, batch_bytes=1)
            del world.cluster.partition("logs", 0).batches[3]
            consumer = await cluster.consumer("logs")
            records: list[Record] = []
            with pytest.raises(DamageError):
                await read_forever(consumer, records)
            assert numbers(records) == [0, 1, 2]

    world.run(scenario())


def test_failed_auto_commit_is_retried_without_blocking_reads() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(timeout_ms=500) as cluster:
            await fill(cluster, count=6, batch_bytes=10_000)
            consumer = await cluster.consumer("logs", name="report", auto_commit=0.1)
            assert len(await consumer.poll(2, timeout=5)) == 2
            await asyncio.sleep(1)
            world.cluster.faults = CallFaults(lost_request=1.0)
            assert len(await consumer.poll(2, timeout=5)) == 2
            world.cluster.faults = CallFaults()
            await asyncio.sleep(1)
            await consumer.poll(1, timeout=5)
            assert list(world.cluster.partition("logs", 0).cursors.values()) == [4]

    world.run(scenario())


def test_failed_open_of_a_consumer_leaves_no_task() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(timeout_ms=500) as cluster:
            await fill(cluster, count=1)
            before = len(asyncio.all_tasks())
            with pytest.raises(NotFoundError):
                await cluster.consumer("logs", partitions=[0, 5])
            assert len(asyncio.all_tasks()) == before

    world.run(scenario())


def test_crash_of_a_reading_task_is_raised_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=1)
            monkeypatch.setattr("quiver.client.prefetch.decode_batches", None)
            consumer = await cluster.consumer("logs")
            with pytest.raises(UnavailableError) as failed:
                await consumer.poll(timeout=5)
            assert failed.value.code == "consumer_failed"

    world.run(scenario())


def test_fetch_that_is_cancelled_consumes_nothing() -> None:
    world = World()

    async def scenario() -> tuple[int, int, list[int]]:
        async with world.connect() as cluster:
            await fill(cluster, partitions=2, count=10)
            consumer = await cluster.consumer("logs", name="report")
            consumer.core.reader(1).stop()  # so that the fetch waits for it
            fetching = asyncio.create_task(consumer.fetch_arrow(timeout=60))
            await asyncio.sleep(5)
            received = consumer.position(0)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            return received, consumer.position(0), numbers(await consumer.poll())

    assert world.run(scenario()) == (5, 0, [0, 2, 4, 6, 8])


def test_fetch_whose_progress_fails_consumes_nothing() -> None:
    world = World()

    def fail(_: object) -> None:
        raise ValueError("no more")

    async def scenario() -> tuple[int, int]:
        async with world.connect() as cluster:
            await fill(cluster, count=10)
            consumer = await cluster.consumer("logs", name="report")
            with pytest.raises(ValueError, match="no more"):
                await consumer.fetch_arrow(progress=fail)
            return consumer.position(0), (await consumer.fetch_arrow()).num_rows

    assert world.run(scenario()) == (0, 10)

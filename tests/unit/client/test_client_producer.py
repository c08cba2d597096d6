"""Producers: records are stored once and in order, and every outcome is reported truthfully."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pandas
import polars
import pyarrow as pa
import pytest
from client_world import World

from quiver.client.batching import StoredBatch, partition_of
from quiver.client.delivery import Delivery
from quiver.client.inflight import InflightBatch, InflightWindow
from quiver.client.producer import encode_json
from quiver.client.sender import SPARSE_BYTES, SPARSE_RECORDS
from quiver.clock import SystemClock
from quiver.errors import (
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    OverloadedError,
    QuiverError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from quiver.model import PartitionId, ProducerId
from quiver.record import Batch, Compression, build_batch, decode_header
from quiver.record.delay import find_deliver_at
from quiver.routing.retry import Deadline
from quiver.testing import Latency
from quiver.testing.memory_cluster import CallFaults


def test_awaited_send_returns_partition_and_offset() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            for number in range(3):
                position = await producer.send(f"line {number}")
                assert (position.partition, position.offset) == (0, number)

    world.run(scenario())
    assert world.values("logs") == [b"line 0", b"line 1", b"line 2"]


def test_request_leaves_in_the_turn_in_which_the_loop_learns_of_the_record() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", linger_ms=0)
            await producer.send("the partition's sender waits after this")
            await asyncio.sleep(0.01)
            delivery = producer.send("next")
            producer.core._wake_senders()
            assert producer.core._senders[PartitionId(0)]._in_flight_count == 1, "no further turn of the loop"
            assert (await delivery).offset == 1

    world.run(scenario())


def test_record_keeps_key_timestamp_and_headers() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", compression="zstd")
            first = producer.send("plain")
            await producer.send(b"full", key="k", timestamp=12, headers=[("trace", b"1")])
            assert first.offset == 0
            consumer = await cluster.consumer("logs")
            records = await consumer.poll(timeout=5)
            assert [record.value for record in records] == [b"plain", b"full"]
            assert records[0].headers == ()
            assert (records[1].key, records[1].timestamp) == (b"k", 12)
            assert records[1].headers == (("trace", b"1"),)

    world.run(scenario())


def test_same_key_goes_to_the_same_partition() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=4)
            producer = await cluster.producer("logs")
            deliveries = [producer.send("v", key=f"user-{number % 5}") for number in range(50)]
            for number, delivery in enumerate(deliveries):
                assert (await delivery).partition == partition_of(f"user-{number % 5}".encode(), 4)

    world.run(scenario())


def test_records_without_key_spread_over_all_partitions() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=3)
            producer = await cluster.producer("logs", batch_bytes=200)
            for number in range(60):
                producer.send(f"line {number}")
            await producer.flush()

    world.run(scenario())
    counts = [len(world.values("logs", partition)) for partition in range(3)]
    assert sum(counts) == 60
    assert min(counts) > 0


def test_a_record_does_not_wait_for_few_records_in_flight_but_for_many() -> None:
    world = World(latency=Latency(minimum_ms=5))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send("begun")
            few = []
            for number in range(SPARSE_RECORDS):
                few.append(producer.send(f"{number}"))
                await asyncio.sleep(0.001)
            assert not few[0].is_done, "all are in flight"
            rest = []
            for number in range(3):
                rest.append(producer.send(f"later {number}"))
                await asyncio.sleep(0.001)
            assert not few[0].is_done
            await rest[-1]

    world.run(scenario())
    assert [len(batch) for batch in world.cluster.partition("logs", 0).batches] == [1, *[1] * SPARSE_RECORDS, 3]


def test_few_records_of_a_partition_wait_while_much_is_pending_elsewhere() -> None:
    world = World(latency=Latency(minimum_ms=5))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            producer = await cluster.producer("logs")
            producer.send("begun", partition=0)
            await producer.send("begun", partition=1)
            producer.send(b"x" * SPARSE_BYTES, partition=1)
            few = []
            for number in range(3):
                few.append(producer.send(f"{number}", partition=0))
                await asyncio.sleep(0.001)
            assert not few[0].is_done
            await few[-1]

    world.run(scenario())
    assert [len(batch) for batch in world.cluster.partition("logs", 0).batches] == [1, 1, 2]


def test_linger_also_passes_while_few_records_are_in_flight() -> None:
    world = World(latency=Latency(minimum_ms=40))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", linger_ms=5)
            await producer.send("begun")
            first = producer.send("first")
            await asyncio.sleep(0.010)
            rest = [producer.send("second"), producer.send("third")]
            await asyncio.sleep(0.010)
            assert not first.is_done
            assert producer.core._senders[PartitionId(0)]._in_flight_count == 2
            await rest[-1]

    world.run(scenario())
    assert [len(batch) for batch in world.cluster.partition("logs", 0).batches] == [1, 1, 2]


def test_linger_collects_before_the_first_batch() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", linger_ms=50)
            for number in range(5):
                producer.send(f"{number}")
                await asyncio.sleep(0.005)
            assert world.values("logs") == []
            await asyncio.sleep(0.1)

    world.run(scenario())
    assert [len(batch) for batch in world.cluster.partition("logs", 0).batches] == [5]


@pytest.mark.parametrize("seed", range(25))
def test_records_are_stored_once_and_in_order_despite_lost_messages(seed: int) -> None:
    world = World(seed)

    async def scenario() -> list[Delivery]:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            producer = await cluster.producer("logs", batch_bytes=120)
            world.cluster.faults = CallFaults(lost_request=0.1, dropped_request=0.1, lost_answer=0.2)
            deliveries = []
            for number in range(200):
                deliveries.append(producer.send(f"{number}", partition=number % 2))
                if number % 10 == 0:
                    await asyncio.sleep(0.005)
                if number % 40 == 20:
                    world.cluster.move_leader("logs", number % 2, 1 + world.rng.randrange(3))
            await producer.flush()
            world.cluster.faults = CallFaults()
            return deliveries

    deliveries = world.run(scenario())
    for partition in range(2):
        sent = [f"{number}".encode() for number in range(partition, 200, 2)]
        assert world.values("logs", partition) == sent
    for number, delivery in enumerate(deliveries):
        assert world.values("logs", number % 2)[delivery.offset or 0] == f"{number}".encode()


def test_failover_only_delays_deliveries() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=3)
            producer = await cluster.producer("logs", name="web-1", batch_bytes=100)
            for number in range(90):
                producer.send(f"{number}", partition=number % 3)
                if number == 30:
                    await asyncio.sleep(0.001)
                    world.cluster.stop(1)
            await producer.flush()

    world.run(scenario())
    for partition in range(3):
        assert world.values("logs", partition) == [f"{number}".encode() for number in range(partition, 90, 3)]


def test_restarted_producer_of_the_same_name_resumes_exactly() -> None:
    world = World()
    lines = [f"line {number}" for number in range(20)]

    async def life(cut: int) -> None:
        async with world.connect() as cluster:
            producer = await cluster.producer("logs", name="web-1")
            done = await producer.next_sequence(0)
            for line in lines[done:cut]:
                producer.send(line, partition=0)
            await producer.flush()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
        for cut in (0, 7, 7, 13, 20):
            await life(cut)

    world.run(scenario())
    assert world.values("logs") == [line.encode() for line in lines]


def test_next_sequence_counts_accepted_records() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            assert await producer.next_sequence(0) == 0
            producer.send("one")
            assert await producer.next_sequence(0) == 1
            await producer.flush()
            producer.send("two")
            assert await producer.next_sequence(0) == 2

    world.run(scenario())


def test_second_producer_of_a_name_fences_the_first() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            old = await cluster.producer("logs", name="web-1")
            await old.send("old")
            new = await cluster.producer("logs", name="web-1")
            await new.send("new")
            with pytest.raises(FencedError):
                await old.send("too late")
            with pytest.raises(FencedError):
                old.send("refused at once")
            await new.send("newer")
            with pytest.raises(FencedError):
                await old.flush()

    world.run(scenario())
    assert world.values("logs") == [b"old", b"new", b"newer"]


def test_refused_batch_fails_alone_and_later_ones_are_renumbered() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", batch_bytes=1)
            world.cluster.refusals = {b"0": TooLargeError("too large")}
            deliveries = [producer.send(f"{number}") for number in range(10)]
            with pytest.raises(TooLargeError):
                await deliveries[0]
            assert [(await delivery).offset for delivery in deliveries[1:]] == list(range(9))
            with pytest.raises(TooLargeError):
                await producer.flush()
            await producer.flush()

    world.run(scenario())
    assert world.values("logs") == [f"{number}".encode() for number in range(1, 10)]


def test_delivery_that_was_never_sent_fails_as_not_done() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", delivery_timeout=2)
            for node in (1, 2, 3):
                world.cluster.stop(node)
            with pytest.raises(UnavailableError):
                await producer.send("lost")
            for node in (1, 2, 3):
                world.cluster.start(node)
            await producer.send("found")

    world.run(scenario())
    assert world.values("logs") == [b"found"]


@pytest.mark.parametrize("is_done", [True, False])
def test_unknown_outcome_is_reported_and_its_sequence_is_repaired(is_done: bool) -> None:
    world = World()
    lost = CallFaults(lost_answer=1.0) if is_done else CallFaults(dropped_request=1.0)

    async def scenario() -> None:
        async with world.connect(attempt_timeout_ms=500) as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", delivery_timeout=2)
            await producer.send("before")
            world.cluster.faults = lost
            with pytest.raises(OutcomeUnknownError):
                await producer.send("perhaps")
            world.cluster.faults = CallFaults()
            for number in range(3):
                await producer.send(f"after {number}")

    world.run(scenario())
    perhaps = [b"perhaps"] if is_done else []
    assert world.values("logs") == [b"before", *perhaps, b"after 0", b"after 1", b"after 2"]


@pytest.mark.parametrize("seed", range(20))
def test_no_record_is_duplicated_although_deliveries_expire(seed: int) -> None:
    world = World(seed)

    async def scenario() -> list[Delivery]:
        async with world.connect(attempt_timeout_ms=300) as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", batch_bytes=60, delivery_timeout=0.5)
            deliveries = []
            for number in range(60):
                if number % 20 == 10:
                    world.cluster.faults = CallFaults(dropped_request=0.4, lost_answer=0.4, lost_request=0.1)
                if number % 20 == 0:
                    world.cluster.faults = CallFaults()
                deliveries.append(producer.send(f"{number}"))
                await asyncio.sleep(0.05)
            world.cluster.faults = CallFaults()
            await producer.abort() if seed % 5 == 0 else await _settle(deliveries)
            return deliveries

    deliveries = world.run(scenario())
    values = world.values("logs")
    assert len(values) == len(set(values))
    assert values == sorted(values, key=lambda value: int(value or b""))
    for number, delivery in enumerate(deliveries):
        value = f"{number}".encode()
        if delivery.error is None:
            assert values[delivery.offset or 0] == value
        elif not isinstance(delivery.error, OutcomeUnknownError):
            assert value not in values, f"{value!r} is there although it failed with {delivery.error!r}"


async def _settle(deliveries: list[Delivery]) -> None:
    for delivery in deliveries:
        try:
            await delivery
        except QuiverError:
            continue


def test_partition_that_expired_the_producer_restarts_its_sequence() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send("before")
            world.cluster.partition("logs", 0).producers.clear()
            await producer.send("after")

    world.run(scenario())
    assert world.values("logs") == [b"before", b"after"]


def test_producer_without_a_name_that_expired_registers_again_and_loses_nothing() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            producer = await cluster.producer("logs")
            for number in range(6):
                await producer.send(f"before {number}", partition=number % 2)
            expired = producer.producer_id
            await cluster.forget("producer", expired)
            sent = [producer.send(f"after {number}", partition=number % 2) for number in range(6)]
            for delivery in sent:
                await delivery
            assert producer.producer_id != expired
            assert await producer.next_sequence(0) == 3

    world.run(scenario())
    for partition in (0, 1):
        expected = [f"{when} {number}".encode() for when in ("before", "after") for number in range(partition, 6, 2)]
        assert world.values("logs", partition) == expected


def test_producer_with_a_name_that_was_forgotten_fails_with_a_clear_error() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", "web-1")
            await producer.send("before")
            await cluster.forget("producer", producer.producer_id)
            with pytest.raises(QuiverError) as failed:
                await producer.send("after")
            assert (failed.value.code, failed.value.outcome) == ("unknown_producer", "not_done")

    world.run(scenario())
    assert world.values("logs") == [b"before"]


def test_restart_as_another_producer_fails_what_may_be_done_and_renumbers_the_rest() -> None:
    window = InflightWindow(Compression.NONE)
    batches: list[InflightBatch] = []
    for number in range(4):
        stored = Batch.decode(build_batch([b"%d" % number], timestamp=1))
        source = StoredBatch(PartitionId(0), stored, opened_ms=0)
        batches.append(InflightBatch(source, Deadline(SystemClock(), 1_000)))
        window.waiting.append(batches[-1])
        window.seal(batches[-1], ProducerId(7), 3)
    window.acknowledge(batches[0])
    batches[1].is_perhaps_done = True
    assert window.restart(ProducerId(9), 0) == [batches[1]]
    headers = [decode_header(batch.data) for batch in window.waiting]
    assert [(header.producer_id, header.producer_epoch, header.base_sequence) for header in headers] == [
        (9, 0, 0),
        (9, 0, 1),
    ]
    assert window.next_sequence == 2


def test_full_buffer_refuses_immediately_and_wait_room_waits() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", buffer_bytes=1024)
            for _ in range(8):
                producer.send(b"x" * 100)
            with pytest.raises(OverloadedError) as refused:
                producer.send(b"x" * 100)
            assert refused.value.code == "buffer_full"
            await producer.wait_room(124)
            await producer.send(b"y")
            await producer.flush()
            assert producer.pending_bytes == 0

    world.run(scenario())
    assert len(world.values("logs")) == 9


def test_send_many_waits_for_room_and_returns_every_offset() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", buffer_bytes=40_000, batch_bytes=10_000)
            sent = await producer.send_many((f"{number}" for number in range(5000)), partition=0)
            spans = await sent
            assert sum(span.count for span in spans) == len(sent) == 5000
            assert [span.first_offset for span in spans] == sorted(span.first_offset for span in spans)

    world.run(scenario())
    assert world.values("logs") == [f"{number}".encode() for number in range(5000)]


def test_send_many_accepts_arrow_arrays_and_tables() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=3)
            producer = await cluster.producer("logs", batch_bytes=2000)
            await (await producer.send_many(pa.array([f"a{number}" for number in range(100)]), partition=1))
            keys = [None if number % 3 == 0 else f"k{number % 7}" for number in range(100)]
            table = pa.table({"value": [f"t{number}" for number in range(100)], "key": keys})
            await (await producer.send_many(table))
            await (await producer.send_many(pa.array(["one"]), key="k1"))

    world.run(scenario())
    assert world.values("logs", 1)[:100] == [f"a{number}".encode() for number in range(100)]
    found = {}
    for partition in range(3):
        for batch in world.cluster.partition("logs", partition).batches:
            found.update({record.value: (partition, record.key) for record in batch.records()})
    for number in range(100):
        partition, key = found[f"t{number}".encode()]
        assert key == (None if number % 3 == 0 else f"k{number % 7}".encode())
        assert key is None or partition == partition_of(key, 3)
    assert found[b"one"] == (partition_of(b"k1", 3), b"k1")


@pytest.mark.parametrize("values", ["text", b"bytes", 7, [1]])
def test_send_many_refuses_a_single_value(values: object) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            with pytest.raises(RequestError, match=r"not sent: .*(many values|a record is)"):
                await producer.send_many(values)
            assert await producer.send("alone") is not None, "the producer is as good as before"

    world.run(scenario())


def test_table_with_unknown_columns_is_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            with pytest.raises(RequestError):
                await producer.send_many(pa.table({"value": ["x"], "level": ["info"]}))

    world.run(scenario())


def test_unknown_partition_and_unstorable_values_are_refused_immediately() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            with pytest.raises(OutOfRangeError):
                producer.send("x", partition=1)
            with pytest.raises(RequestError, match="not sent: a record is bytes, text or None, not int"):
                producer.send(3)  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                producer.send("\ud800")

    world.run(scenario())


@pytest.mark.parametrize(
    "headers",
    [{"ab": b"1", "c": "2"}, [("ab", b"1"), ("c", "2")], (["ab", b"1"], ("c", b"2")), {"ab": b"1", "c": b"2"}.items()],
)
def test_headers_are_a_mapping_or_pairs(headers: Any) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send("x", headers=headers)
            consumer = await cluster.consumer("logs")
            (record,) = await consumer.poll()
            assert record.headers == (("ab", b"1"), ("c", b"2"))

    world.run(scenario())


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "text as headers": ({"headers": "ab"}, "bad_headers"),
    "a word as a pair": ({"headers": ["ab"]}, "bad_headers"),
    "three in a pair": ({"headers": [("a", b"1", b"2")]}, "bad_headers"),
    "a number as a header's name": ({"headers": {1: b"1"}}, "bad_headers"),
    "a number as a header": ({"headers": {"a": 1}}, "bad_record"),
    "a number as headers": ({"headers": 7}, "bad_headers"),
    "text as a timestamp": ({"timestamp": "now"}, "bad_timestamp"),
    "a truth as a timestamp": ({"timestamp": True}, "bad_timestamp"),
    "a timestamp too far": ({"timestamp": 1 << 63}, "bad_timestamp"),
    "a number as a key": ({"key": 7}, "bad_record"),
    "text as a partition": ({"partition": "0"}, "unknown_partition"),
}


@pytest.mark.parametrize(("given", "code"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_record_with_a_bad_argument_is_refused_alone(given: dict[str, Any], code: str) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            before = producer.send("before")
            with pytest.raises(RequestError) as caught:
                producer.send("bad", **given)
            assert caught.value.code == code
            after = producer.send("after", headers={"a": b"1"}, timestamp=5)
            assert [(await delivery).offset for delivery in (before, after)] == [0, 1]
            await producer.flush()

    world.run(scenario())
    assert world.values("logs") == [b"before", b"after"]


COLUMNS = {"key": [b"k", None], "value": ["a", "b"]}


@pytest.mark.parametrize(
    "values",
    [COLUMNS, pa.table(COLUMNS), pandas.DataFrame(COLUMNS), polars.DataFrame(COLUMNS)],
    ids=["mapping", "arrow", "pandas", "polars"],
)
def test_send_many_accepts_columns_of_any_library(values: Any) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send_many(values)
            await producer.send_many(values["value"])
            await producer.flush()

    world.run(scenario())
    assert sorted(value for value in world.values("logs") if value) == [b"a", b"a", b"b", b"b"]


@pytest.mark.parametrize("values", [{"text": ["a"]}, {"value": ["a"], "key": ["k", "l"]}, {"value": 7}])
def test_invalid_columns_are_refused(values: Any) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            with pytest.raises(RequestError):
                await producer.send_many(values)

    world.run(scenario())


def test_unknown_topic_is_raised_by_the_call() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            with pytest.raises(NotFoundError) as refused:
                await cluster.producer("nowhere")
            assert refused.value.code == "unknown_topic"

    world.run(scenario())


def test_topic_deleted_under_a_producer_fails_its_records() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            await producer.send("there")
            await cluster.delete_topic("logs")
            with pytest.raises(NotFoundError):
                await producer.send("gone")

    world.run(scenario())


def test_closed_producer_refuses_records() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            async with await cluster.producer("logs") as producer:
                delivery = producer.send("last")
            assert delivery.offset == 0
            with pytest.raises(UnavailableError):
                producer.send("too late")
            await producer.close()

    world.run(scenario())


def test_aborted_producer_distinguishes_sent_from_unsent() -> None:
    world = World(latency=Latency(minimum_ms=100))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            flying = producer.send("flying")
            await asyncio.sleep(0.05)
            waiting = producer.send("waiting")
            await producer.abort()
            assert isinstance(flying.error, OutcomeUnknownError)
            assert isinstance(waiting.error, UnavailableError)

    world.run(scenario())


def test_cancelled_wait_for_a_delivery_does_not_cancel_the_send() -> None:
    world = World(latency=Latency(minimum_ms=100))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            delivery = producer.send("on its way")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await delivery
            assert (await delivery).offset == 0

    world.run(scenario())


def test_callbacks_run_when_the_outcome_is_known_and_may_fail() -> None:
    world = World()
    called: list[int | None] = []

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            delivery = producer.send("x")
            delivery.add_done_callback(lambda _: 1 / 0)
            delivery.add_done_callback(lambda done: called.append(done.offset))
            assert called == []
            await delivery
            delivery.add_done_callback(lambda done: called.append(done.partition))

    world.run(scenario())
    assert called == [0, 0]


@pytest.mark.parametrize("partitions", [(), (0,)])
def test_added_partitions_are_used_after_a_refresh(partitions: tuple[int, ...]) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(metadata_age_ms_max=1000) as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", partitions=partitions, batch_bytes=1)
            await cluster.add_partitions("logs", 3)
            await asyncio.sleep(3)
            for _ in range(9):
                producer.send("x")
            await producer.flush()
            assert (await producer.send("y", partition=2)).partition == 2

    world.run(scenario())
    counts = [len(world.values("logs", partition)) for partition in range(3)]
    assert counts == ([3, 3, 4] if not partitions else [9, 0, 1])


def test_new_epoch_of_one_partition_is_begun_in_the_others() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect(attempt_timeout_ms=300) as cluster:
            await cluster.create_topic("logs", partitions=2)
            producer = await cluster.producer("logs", delivery_timeout=1)
            for partition in (0, 1):
                await producer.send("before", partition=partition)
            world.cluster.faults = CallFaults(dropped_request=1.0)
            with pytest.raises(OutcomeUnknownError):
                await producer.send("perhaps", partition=0)
            world.cluster.faults = CallFaults()
            await producer.send("after", partition=0)
            await asyncio.gather(*(producer.send(f"after {number}", partition=1) for number in range(3)))
            epochs = [batch.header.producer_epoch for batch in world.cluster.partition("logs", 1).batches]
            assert (epochs[0], epochs[-1]) == (0, 1)

    world.run(scenario())
    assert world.values("logs", 0) == [b"before", b"after"]
    assert sorted(world.values("logs", 1), key=str) == [b"after 0", b"after 1", b"after 2", b"before"]


def test_large_and_null_values_get_their_own_batches() -> None:
    world = World()
    values = [b"x" * 9000, None, "text", bytearray(b"array"), *[b"y" * 3000] * 20, memoryview(b"view")]

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs", batch_bytes=4000)
            producer.send("open", partition=0)
            await (await producer.send_many(values, partition=0))
            await (await producer.send_many(pa.array(["a" * 9000, "b", *["c" * 3000] * 20]), partition=0))
            with pytest.raises(RequestError):
                await producer.send_many(["fine", "\ud800"])

    world.run(scenario())
    stored = [None if value is None else value.encode() if isinstance(value, str) else bytes(value) for value in values]
    arrow = [b"a" * 9000, b"b", *[b"c" * 3000] * 20]
    assert world.values("logs") == [b"open", *stored, *arrow]
    assert max(len(batch.data) for batch in world.cluster.partition("logs", 0).batches) < 13_000


def test_values_that_arrow_cannot_store_fail_alone() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            bad = await producer.send_many(pa.array([[1], [2]]), partition=0)
            good = producer.send("good", partition=0)
            with pytest.raises(RequestError):
                await bad
            assert (await good).offset == 0

    world.run(scenario())


def test_crash_of_the_sending_task_fails_batches_in_flight_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            monkeypatch.setattr("quiver.client.sender.Produce", None)
            with pytest.raises(OutcomeUnknownError) as failed:
                await producer.send("x")
            assert failed.value.code == "producer_failed"
            with pytest.raises(OutcomeUnknownError):
                producer.send("y")

    world.run(scenario())


def test_producer_of_a_recreated_topic_sends_to_the_new_one() -> None:
    world = World()

    async def scenario() -> list[bytes | None]:
        async with world.connect() as cluster, world.connect() as other:
            await cluster.create_topic("logs", partitions=1)
            async with await cluster.producer("logs") as producer:
                await producer.send("old")
            await other.delete_topic("logs")
            await other.create_topic("logs", partitions=1)
            async with await cluster.producer("logs") as producer:
                assert await producer.next_sequence(0) == 0
                await producer.send("new")
            return world.values("logs")

    assert world.run(scenario()) == [b"new"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_number_that_json_cannot_hold_is_refused_and_not_stored_as_null(number: float) -> None:
    assert encode_json({"a": [None, 1.5]}) == b'{"a":[null,1.5]}'
    for value in (number, {"a": [1, (number,)]}):
        with pytest.raises(RequestError, match="JSON has no number") as refused:
            encode_json(value)
        assert refused.value.code == "bad_json"


def test_delayed_record_has_its_time_in_a_header() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("jobs", partitions=1)
            producer = await cluster.producer("jobs")
            now_ms = world.clock.wall_ms()
            await producer.send("soon", headers={"trace": "1"}, delay=1.5)
            await producer.send_json({"at": "noon"}, deliver_at=datetime(2030, 1, 1, tzinfo=UTC))
            await producer.send("at", deliver_at=12)
            await (await producer.send_many(["many", "more"], delay=60))
            await producer.send("now")
            found = [record for batch in world.cluster.partition("jobs", 0).batches for record in batch.records()]
            due = [find_deliver_at(record.headers) for record in found]
            assert due[0] is not None
            assert now_ms + 1500 <= due[0] <= world.clock.wall_ms() + 1500
            assert found[0].headers[0] == ("trace", b"1")
            assert due[1:3] == [1_893_456_000_000, 12]
            assert due[3] == due[4]
            assert due[5] is None

    world.run(scenario())


@pytest.mark.parametrize(
    "given",
    [
        {"delay": -1},
        {"delay": "1"},
        {"delay": True},
        {"delay": float("nan")},
        {"delay": 1e12},
        {"delay": 1, "deliver_at": 1},
        {"deliver_at": "tomorrow"},
        {"deliver_at": -1},
    ],
)
def test_delay_that_is_no_time_is_refused_before_anything_is_sent(given: dict[str, Any]) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("jobs", partitions=1)
            producer = await cluster.producer("jobs")
            with pytest.raises(RequestError, match="not sent") as caught:
                producer.send("job", **given)
            assert caught.value.code == "bad_delay"
            with pytest.raises(RequestError, match="not sent"):
                producer.send_json(1, **given)
            with pytest.raises(RequestError, match="not sent"):
                await producer.send_many(["job"], **given)
            with pytest.raises(RequestError, match="headers of their own"):
                await producer.send_many(pa.array(["job"]), delay=1)

    world.run(scenario())
    assert world.values("jobs") == []

"""Batches of a few kB with a large payload: what one call decodes is bounded, and what it leaves out comes next."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from partition_harness import LARGE, PartitionHarness, run_harness

from quiver.config import LogSettings
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, Offset, PartitionId, TopicId
from quiver.partition import ConsumerStart, Replica
from quiver.partition.queue_handler import ReceiveRequest, ReceiveResult
from quiver.partition.reads import Admit, LargeRecords, admit_all, admit_up_to
from quiver.partition.record_batches import READ_BYTES_MAX
from quiver.record import Compression, Record, build_batch
from quiver.record.decoded import DecodedBatchBudget
from quiver.record.delay import DELIVER_AT_HEADER, encode_deliver_at
from quiver.wire.queue_messages import QueueReturn, QueueSettle, ReceiptRange

WORKERS = ConsumerId(5)
BOMB_BYTES = READ_BYTES_MAX // 2 + 1
"""Two of these are more than a call decodes."""
PEAK_BYTES_MAX = 40 * 1024 * 1024
"""The cache, what one call decodes, and the copies made on the way."""
BOMBS = 40
LATE = ((DELIVER_AT_HEADER, encode_deliver_at(10**14)),)


def bomb(first: bytes = b"x", *, headers: tuple[tuple[str, bytes], ...] = (), timestamp: int = 1) -> bytearray:
    """Return a batch of two records, the first one small, that is stored in a few hundred bytes."""
    columns = [headers, headers] if headers else None
    built = build_batch([first, bytes(BOMB_BYTES)], timestamp=timestamp, headers=columns, compression=Compression.ZSTD)
    assert len(built) < 2_000
    return bytearray(built)


@contextmanager
def bounded_memory(bytes_max: int = PEAK_BYTES_MAX) -> Iterator[None]:
    """Fail if more memory is allocated inside at any time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < bytes_max, f"{peak - before} bytes"


def settings_of(where: str) -> LogSettings:
    return LogSettings(tail_cache_bytes_max=0) if where == "disk" else LogSettings()


async def receive(
    replica: Replica, records_max: int = 1_000, *, order: str = "offset", wait_ms: int = 0, admit: Admit = admit_all
) -> ReceiveResult:
    settings = QueueSettings(order="key" if order == "key" else "offset")
    return await replica.queues.receive(
        ReceiveRequest(
            group_id=WORKERS,
            settings=settings,
            records_max=records_max,
            bytes_max=LARGE,
            wait_ms=wait_ms,
            admit=admit,
        )
    )


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_receive_of_delayed_records_decodes_a_few_batches_at_a_time(where: str) -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = settings_of(where)
        partition.decoded = budget = DecodedBatchBudget(2 * READ_BYTES_MAX)
        async with partition.open_replica() as replica:
            for _ in range(BOMBS):
                await replica.append(bomb(headers=LATE))
            await replica.append(bytearray(build_batch([b"now"], timestamp=1)))
            with bounded_memory():
                received = await receive(replica)
            assert [row[1] for row in received.rows] == [b"now"], "all others are parked"
            assert budget.reserved_bytes == 0
            assert budget.cached_bytes <= budget.bytes_max
            window = replica.state.queues[WORKERS]
            assert (window.next_offset, window.outstanding) == (2 * BOMBS + 1, 2 * BOMBS + 1)

    run_harness(test)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_receive_keeps_no_batch_of_which_it_needs_one_small_record(where: str) -> None:
    """Returned records, each in a large batch of its own: what has no room comes with the next receive."""

    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = settings_of(where)
        async with partition.open_replica() as replica:
            for number in range(BOMBS):
                await replica.append(bomb(b"%d" % number))
            for _ in range(2 * BOMBS):
                received = await receive(replica, 1)
                first = received.leases[0].first
                done = settle_one(first, received.grant, is_done=first % 2 == 1)
                await replica.queues.settle(done, QueueSettings())
            await asyncio.sleep(60)
            leased: list[int] = []
            with bounded_memory():
                while (received := await receive(replica)).leases:
                    firsts = [lease.first for lease in received.leases]
                    assert [row[1] for row in received.rows] == [b"%d" % (first // 2) for first in firsts]
                    leased += firsts
            assert leased == list(range(0, 2 * BOMBS, 2))

    run_harness(test)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_records_of_one_key_are_parked_a_few_batches_at_a_time(where: str) -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = settings_of(where)
        async with partition.open_replica() as replica:
            for _ in range(BOMBS):
                values, keys = [b"x", bytes(BOMB_BYTES)], [b"k", b"k"]
                built = build_batch(values, keys=keys, timestamp=1, compression=Compression.ZSTD)
                await replica.append(bytearray(built))
            with bounded_memory():
                received = await receive(replica, order="key")
                assert [row[1] for row in received.rows] == [b"x"]
                assert (await receive(replica, order="key")).stall == "key_order"
            assert replica.state.queues[WORKERS].next_offset == 2 * BOMBS

    run_harness(test)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_consume_many_decodes_a_few_batches_at_a_time(where: str) -> None:
    """Each consumer is at the first, small record of its own batch."""

    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = settings_of(where)
        partition.decoded = budget = DecodedBatchBudget(2 * READ_BYTES_MAX)
        async with partition.open_replica() as replica:
            consumers = [ConsumerId(number) for number in range(1, BOMBS + 1)]
            for number, consumer in enumerate(consumers):
                await replica.append(bomb(b"%d" % number))
                await replica.move_cursors([(consumer, Offset(2 * number))])
            served: list[bytes | None] = []
            with bounded_memory():
                while len(served) < BOMBS:
                    pending = [(consumer, "earliest") for consumer in consumers[len(served) :]]
                    found = await replica.consume_many(pending)  # type: ignore[arg-type]
                    assert 1 <= len(found) <= 2
                    served += [one.value for one in found if one is not None]
            assert served == [b"%d" % number for number in range(BOMBS)]
            assert budget.reserved_bytes == 0

    run_harness(test)


def test_consume_returns_no_more_than_its_bytes_once_decoded() -> None:
    async def test(partition: PartitionHarness) -> None:
        async with partition.open_replica() as replica:
            for _ in range(3):
                await replica.append(bomb())
            for expected in (2, 4, 6):
                consumed = await replica.consume(WORKERS, records_max=100, bytes_max=LARGE)
                assert (len(consumed.batches), consumed.cursor) == (1, expected)
            whole = await replica.consume(WORKERS, offset=Offset(0), records_max=5, bytes_max=4 * BOMB_BYTES)
            assert (len(whole.batches), whole.cursor) == (3, 5)

    run_harness(test)


def test_time_is_found_without_keeping_what_was_decoded() -> None:
    async def test(partition: PartitionHarness) -> None:
        async with partition.open_replica() as replica:
            for number in range(BOMBS):
                await replica.append(bomb(timestamp=1 + number))
            with bounded_memory():
                found = [await replica.find_offset(1 + number) for number in range(BOMBS)]
            assert found == [2 * number for number in range(BOMBS)]

    run_harness(test)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_answer_from_a_large_batch_is_admitted_before_it_is_decoded(where: str) -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = settings_of(where)
        admitted: list[int] = []

        async def admit(size_bytes: int) -> int:
            admitted.append(size_bytes)
            return size_bytes

        async with partition.open_replica() as replica:
            await replica.append(
                bytearray(build_batch([bytes(2 * READ_BYTES_MAX)], timestamp=1, compression=Compression.ZSTD))
            )
            (found,) = await replica.consume_many([(ConsumerId(1), "earliest")], admit=admit)
            assert found is not None
            received = await receive(replica, admit=admit)
            assert (len(received.rows), received.stall) == (1, "")
            assert len(admitted) == 3
            assert admitted[0] == admitted[2] > 2 * READ_BYTES_MAX
            assert admitted[1] == LARGE

    run_harness(test)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_nothing_is_done_for_a_caller_without_room_for_a_large_record(where: str) -> None:
    """Neither a cursor moves nor is a record leased, and the caller learns how much it needs."""

    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = settings_of(where)
        large = bytearray(build_batch([bytes(2 * READ_BYTES_MAX)], timestamp=1, compression=Compression.ZSTD))
        consumer = ConsumerId(1)
        async with partition.open_replica() as replica:
            await replica.append(large)
            with pytest.raises(LargeRecords) as first:
                await consume_one(replica, [consumer], READ_BYTES_MAX)
            with pytest.raises(LargeRecords) as second:
                await replica.consume(consumer, bytes_max=1, decoded_bytes_max=READ_BYTES_MAX)
            with pytest.raises(LargeRecords) as third:
                await receive(replica, admit=admit_up_to(admit_all, LARGE))
            needed = first.value.size_bytes
            assert needed == second.value.size_bytes == third.value.size_bytes > 2 * READ_BYTES_MAX
            assert (await replica.get_cursors([consumer, WORKERS])).cursors == (None, None)
            received = await receive(replica, admit=admit_up_to(admit_all, needed))
            assert len(received.rows) == 1
            consumed = await replica.consume(consumer, offset=Offset(0), bytes_max=1, decoded_bytes_max=needed)
            assert consumed.cursor == 1
            (found,) = await consume_one(replica, [ConsumerId(2)], needed)
            assert found is not None

    run_harness(test)


def test_record_that_has_no_room_is_left_to_the_next_call() -> None:
    """Only the first consumer's record is large for its caller; those before it and keys count as well."""

    async def test(partition: PartitionHarness) -> None:
        async with partition.open_replica() as replica:
            await replica.append(bytearray(build_batch([b"x", b"y"], keys=[None, bytes(2_000)], timestamp=1)))
            first, second = ConsumerId(1), ConsumerId(2)
            await replica.move_cursors([(second, Offset(1))])
            (found,) = await consume_one(replica, [first, second], 1_000)
            assert found is not None
            assert found.value == b"x"
            with pytest.raises(LargeRecords) as refused:
                await consume_one(replica, [second, first], 1_000)
            assert refused.value.size_bytes == 2_001
            assert len(await consume_one(replica, [second, first], 2_001)) == 1

    run_harness(test)


async def consume_one(replica: Replica, consumers: list[ConsumerId], bytes_max: int) -> list[Record | None]:
    """Consume a record for each consumer, as a caller with room for so many bytes does."""
    starts: list[ConsumerStart] = [(consumer, "earliest") for consumer in consumers]
    return await replica.consume_many(starts, admit=admit_up_to(admit_all, bytes_max), bytes_max=bytes_max)


def settle_one(first: int, grant: int, *, is_done: bool) -> QueueSettle:
    """Return the acknowledgement of a record, or its return for another attempt at once."""
    return QueueSettle(
        topic_id=TopicId(1),
        partition_id=PartitionId(0),
        group_id=WORKERS,
        acks=(ReceiptRange(first, 1, grant),) if is_done else (),
        returns=() if is_done else (QueueReturn(first, 1, grant, 10_000),),
    )

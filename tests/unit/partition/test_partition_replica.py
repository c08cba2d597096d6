"""One real replica on a simulated loop: appends land once and in order, reads wait for the term, damage is repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from partition_harness import DIRECTORY, LARGE, PartitionHarness, batch, record, run, run_harness

from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import (
    DecodeError,
    FencedError,
    NotLeaderError,
    OutOfSequenceError,
    OverloadedError,
    UnavailableError,
)
from quiver.model import ConsumerId, Offset, ProducerId
from quiver.partition import AppendResult, PartitionState, Replica
from quiver.record import build_control_batch

ALICE = ConsumerId(1)
READS: dict[str, Callable[[Replica], Awaitable[object]]] = {
    "fetch": lambda replica: replica.fetch(Offset(0), bytes_max=LARGE),
    "consume": lambda replica: replica.consume(ALICE, bytes_max=LARGE),
    "consume_many": lambda replica: replica.consume_many([(ALICE, "earliest")]),
    "find_offset": lambda replica: replica.find_offset(2),
}


def test_memory_is_asked_for_as_the_batch_needs_it_not_as_the_request_says() -> None:
    async def test(replica: Replica) -> None:
        data = record(b"v" * 1_000)
        await replica.append(data)
        asked: list[int] = []

        async def admit(size_bytes: int) -> int:
            asked.append(size_bytes)
            return size_bytes

        assert (await replica.fetch(Offset(0), bytes_max=1, admit=admit)).batches
        assert (await replica.consume(ALICE, bytes_max=1, admit=admit)).batches
        assert await replica.read(Offset(0), bytes_max=1, admit=admit)
        assert asked == [1, len(data)] * 3
        assert not (await replica.fetch(Offset(1), bytes_max=1, admit=admit)).batches
        assert len(asked) == 6, "nothing for nothing"

    run(test)


def test_append_returns_where_the_batch_is() -> None:
    async def test(replica: Replica) -> None:
        assert await replica.append(batch(0)) == AppendResult(Offset(0))
        assert await replica.append(batch(1)) == AppendResult(Offset(1))
        assert replica.high_watermark == 2

    run(test)


def test_retry_is_answered_with_the_first_offset() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        await replica.append(batch(1))
        assert await replica.append(batch(0)) == AppendResult(Offset(0), is_duplicate=True)
        assert replica.high_watermark == 2

    run(test)


def test_retry_of_a_batch_on_its_way_waits_for_it() -> None:
    async def test(replica: Replica) -> None:
        first, second = await asyncio.gather(replica.append(batch(0)), replica.append(batch(0)))
        assert sorted([first.is_duplicate, second.is_duplicate]) == [False, True]
        assert first.base_offset == second.base_offset == 0
        assert replica.high_watermark == 1

    run(test)


def test_batches_may_follow_each_other_without_waiting() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        appended = await asyncio.gather(*(replica.append(batch(number)) for number in range(1, 6)))
        assert [item.base_offset for item in appended] == [1, 2, 3, 4, 5]

    run(test)


def test_gap_is_refused() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        with pytest.raises(OutOfSequenceError, match="expected 1"):
            await replica.append(batch(2))

    run(test)


def test_earlier_epoch_is_fenced_by_a_committed_one() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        await replica.append(batch(1, epoch=1))
        with pytest.raises(FencedError):
            await replica.append(batch(2))

    run(test)


def test_earlier_epoch_is_fenced_by_one_on_its_way() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        later = asyncio.ensure_future(replica.append(batch(1, epoch=1)))
        await asyncio.sleep(0)
        with pytest.raises(FencedError):
            await replica.append(batch(2))
        assert (await later).base_offset == 1

    run(test)


def test_batches_without_a_producer_are_all_appended() -> None:
    async def test(replica: Replica) -> None:
        for number in range(3):
            assert await replica.append(record(b"v")) == AppendResult(Offset(number))

    run(test)


def test_bytes_that_are_not_one_batch_of_records_are_refused() -> None:
    async def test(replica: Replica) -> None:
        damaged = batch(0)
        damaged[-1] ^= 1
        for data in (b"", bytes(batch(0)) + b"x", bytes(damaged), build_control_batch(b"\x03", timestamp=1)):
            with pytest.raises(DecodeError):
                await replica.append(data)

    run(test)


def test_refused_proposals_leave_no_gap() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        large = asyncio.ensure_future(replica.append(batch(1, value=b"x" * 900)))
        await asyncio.sleep(0.000001)  # it is proposed, and not yet durable
        with pytest.raises(OverloadedError):
            await replica.append(batch(2, value=b"y" * 900))
        with pytest.raises(OutOfSequenceError):
            await replica.append(batch(3))
        assert (await large).base_offset == 1
        assert (await replica.append(batch(2))).base_offset == 2

    run(test, settings=ReplicationSettings(hibernation=False, uncommitted_bytes_max=1024))


def test_member_that_does_not_lead_refuses_appends_and_reads() -> None:
    async def test(replica: Replica) -> None:
        with pytest.raises(NotLeaderError):
            await replica.append(batch(0))
        with pytest.raises(NotLeaderError):
            await replica.find_offset("latest")

    run(test, voters=(1, 2, 3))


def test_end_and_records_are_read() -> None:
    async def test(replica: Replica) -> None:
        for number in range(3):
            await replica.append(batch(number, value=b"%d" % number))
        assert await replica.find_offset("latest") == 3
        batches = await replica.read(Offset(1), bytes_max=1 << 16)
        assert [found.values() for found in batches] == [[b"1"], [b"2"]]
        assert replica.state.applied_index == replica.member.applied_index

    run(test)


def test_restored_state_is_the_saved_one() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0))
        copy = PartitionState()
        copy.restore(replica.state.snapshot())
        assert copy.snapshot() == replica.state.snapshot()
        assert (copy.applied_index, copy.end_offset) == (replica.state.applied_index, Offset(1))
        copy.restore(b"")
        assert (copy.applied_index, copy.end_offset, len(copy.producers)) == (0, 0, 0)

    run(test)


def test_epoch_begins_where_the_last_one_ended() -> None:
    async def test(replica: Replica) -> None:
        assert await replica.begin_epoch(ProducerId(3), 1) == 0
        await replica.append(batch(0, epoch=1, count=4))
        assert await replica.begin_epoch(ProducerId(3), 2) == 4
        assert await replica.begin_epoch(ProducerId(3), 2) == 4, "asking again is fine"
        with pytest.raises(FencedError):
            await replica.append(batch(4, epoch=1))
        with pytest.raises(FencedError):
            await replica.begin_epoch(ProducerId(3), 1)
        assert (await replica.append(batch(4, epoch=2))).base_offset == 4

    run(test)


def test_retry_in_a_new_epoch_finds_what_was_sent_in_the_old_one() -> None:
    async def test(replica: Replica) -> None:
        first = asyncio.ensure_future(replica.append(batch(0, epoch=1, count=2)))
        await asyncio.sleep(0)
        fenced = asyncio.ensure_future(replica.begin_epoch(ProducerId(3), 2))
        await asyncio.sleep(0)
        on_its_way = await replica.append(batch(0, epoch=2, count=2))
        assert on_its_way == AppendResult(Offset(0), is_duplicate=True)
        assert (await first, await fenced) == (AppendResult(Offset(0)), 2)
        assert await replica.append(batch(0, epoch=2, count=2)) == AppendResult(Offset(0), is_duplicate=True)
        assert replica.high_watermark == 2

    run(test)


def test_batch_of_an_epoch_that_is_being_left_is_refused() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0, epoch=1))
        fence = asyncio.ensure_future(replica.begin_epoch(ProducerId(3), 2))
        await asyncio.sleep(0)
        with pytest.raises(FencedError):
            await replica.append(batch(1, epoch=1))
        assert await fence == 1
        assert replica.high_watermark == 1

    run(test)


def test_later_of_two_epochs_on_their_way_wins() -> None:
    async def test(replica: Replica) -> None:
        later, earlier = await asyncio.gather(
            replica.begin_epoch(ProducerId(3), 5), replica.begin_epoch(ProducerId(3), 4), return_exceptions=True
        )
        assert later == 0
        assert isinstance(earlier, FencedError)

    run(test)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_damage_that_a_reader_meets_stops_the_node_so_that_it_is_repaired(
    read: Callable[[Replica], Awaitable[object]],
) -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = LogSettings(tail_cache_bytes_max=512, segment_bytes_max=4096, index_interval_bytes=64)
        async with partition.open_replica() as replica:
            for number in range(60):
                await replica.append(record(b"%03d" % number * 20, timestamp=number))
            first = min(name for name in partition.disk.names(DIRECTORY) if name.endswith(".log"))
            for position in range(200, 3000, 7):
                partition.disk.flip_bit(f"{DIRECTORY}/{first}", position)
            partition.disk.drop_caches()
            with pytest.raises(UnavailableError) as refused:
                await read(replica)
            assert (refused.value.code, refused.value.outcome) == ("damaged", "not_done")
            await asyncio.sleep(1)
            with pytest.raises(UnavailableError):
                await replica.append(record(b"more"))

    run_harness(test)

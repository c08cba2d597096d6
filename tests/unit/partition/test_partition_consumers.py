"""Consumers: records and cursor move in one replicated step, no record is repeated or skipped, long polls wake."""

from __future__ import annotations

import asyncio

import pytest
from partition_harness import LARGE, PartitionHarness, record, run, run_harness

from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import (
    NotLeaderError,
    OutcomeUnknownError,
    OutOfRangeError,
    OverloadedError,
    UnavailableError,
)
from quiver.model import ConsumerId, NodeId, Offset
from quiver.partition import ConsumeResult, ConsumerStart, PartitionState, Replica
from quiver.partition.consume_handler import CONSUMED_BYTES_MAX
from quiver.partition.cursors import CursorMoves
from quiver.partition.reads import FetchWaiters
from quiver.partition.record_batches import READ_BYTES_MAX
from quiver.raft import Role
from quiver.record.decoded import DecodedBatchBudget

ALICE, BOB = ConsumerId(1), ConsumerId(2)


def values_of(consumed: ConsumeResult) -> list[bytes | None]:
    """Return the values that are meant."""
    return [
        found.value
        for batch in consumed.batches
        for found in batch.records()
        if consumed.first_offset <= found.offset < consumed.cursor
    ]


async def fill(replica: Replica, count: int, *, start: int = 0) -> list[bytes]:
    values = [b"%d" % number for number in range(start, start + count)]
    for value in values:
        await replica.append(record(value))
    return values


def test_consumer_gets_every_record_once_in_order() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 5)
        seen = [values_of(await replica.consume(ALICE, bytes_max=LARGE)) for _ in range(6)]
        assert seen == [[b"0"], [b"1"], [b"2"], [b"3"], [b"4"], []]
        assert values_of(await replica.consume(BOB, records_max=10, bytes_max=LARGE)) == [b"0", b"1", b"2", b"3", b"4"]
        assert replica.state.cursors == {ALICE: 5, BOB: 5}

    run(test)


def test_part_of_a_batch_may_be_meant() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b", b"c"))
        first = await replica.consume(ALICE, records_max=2, bytes_max=LARGE)
        assert (first.first_offset, first.cursor, values_of(first)) == (0, 2, [b"a", b"b"])
        second = await replica.consume(ALICE, records_max=2, bytes_max=LARGE)
        assert (second.first_offset, second.cursor, values_of(second)) == (2, 3, [b"c"])

    run(test)


def test_concurrent_calls_of_one_consumer_never_share_a_record() -> None:
    async def test(replica: Replica) -> None:
        values = await fill(replica, 40)
        calls = [replica.consume(ALICE, records_max=3, bytes_max=LARGE) for _ in range(16)]
        seen = [value for consumed in await asyncio.gather(*calls) for value in values_of(consumed)]
        assert sorted(value or b"" for value in seen) == sorted(values)

    run(test)


def test_moves_that_arrive_while_one_is_in_flight_share_the_next_entry() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 3)
        await replica.consume(ALICE, bytes_max=LARGE)
        before = replica.member.applied_index
        calls = [replica.consume(ConsumerId(number), bytes_max=LARGE) for number in range(100, 200)]
        await asyncio.gather(*calls)
        assert replica.member.applied_index - before <= 3
        assert len(replica.state.cursors) == 101

    run(test)


def test_consume_many_returns_the_record_at_each_cursor_in_one_step() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"0", b"1", b"2"))
        await fill(replica, 2, start=3)
        await replica.move_cursors([(BOB, Offset(2))])
        before = replica.member.applied_index
        carol, dave = ConsumerId(3), ConsumerId(4)
        consumers: list[ConsumerStart] = [
            (ALICE, "earliest"),
            (BOB, "earliest"),
            (carol, "latest"),
            (ALICE, "earliest"),
        ]
        consumed = await replica.consume_many([*consumers, (dave, "earliest")])
        assert [found and (found.offset, found.value) for found in consumed] == [
            (0, b"0"),
            (2, b"2"),
            None,
            (1, b"1"),
            (0, b"0"),
        ]
        assert replica.member.applied_index == before + 1
        assert replica.state.cursors == {ALICE: 2, BOB: 3, carol: 5, dave: 1}

    run(test)


def test_consume_and_consume_many_of_one_consumer_never_share_a_record() -> None:
    async def test(replica: Replica) -> None:
        values = await fill(replica, 60)

        async def take() -> list[bytes | None]:
            return [found.value for found in await replica.consume_many([(ALICE, "earliest")] * 2) if found]

        async def read() -> list[bytes | None]:
            return values_of(await replica.consume(ALICE, records_max=3, bytes_max=LARGE))

        seen = await asyncio.gather(*(call() for _ in range(12) for call in (take, read)))
        assert sorted(value or b"" for some in seen for value in some) == sorted(values)

    run(test)


def test_consume_many_serves_lagging_consumers_from_disk() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = LogSettings(tail_cache_bytes_max=512, segment_bytes_max=4096)
        async with partition.open_replica() as replica:
            for number in range(40):
                await replica.append(record(*(b"%d/%d" % (number, place) for place in range(10))))
            consumers = [ConsumerId(number) for number in range(1, 41)]
            for number, consumer in enumerate(consumers):
                await replica.move_cursors([(consumer, Offset(number * 10 + number % 10))])
            for step in range(3):
                consumed = await replica.consume_many([(consumer, "earliest") for consumer in consumers])
                wanted = [number * 10 + number % 10 + step for number in range(40)]
                assert [found and found.offset for found in consumed] == [at if at < 400 else None for at in wanted]

    run_harness(test)


def test_consume_many_reads_within_its_bound_and_serves_everyone_in_turn() -> None:
    """Consumers at many cold positions of large batches: no call holds them all, and none starves."""

    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = LogSettings(tail_cache_bytes_max=0)
        partition.decoded = budget = DecodedBatchBudget(2 * READ_BYTES_MAX)
        async with partition.open_replica() as replica:
            for number in range(9):
                await replica.append(record(b"%d" % number, bytes(READ_BYTES_MAX // 2)))
            pending = [ConsumerId(number) for number in range(1, 10)]
            for number, consumer in enumerate(pending):
                await replica.move_cursors([(consumer, Offset(number * 2))])
            served: list[int] = []
            while pending:
                found = await replica.consume_many([(consumer, "earliest") for consumer in pending])
                assert 1 <= len(found) <= 6, "those in the cache, and those that it may read"
                assert budget.reserved_bytes == 0
                assert budget.cached_bytes <= budget.bytes_max
                served += [one.offset for one in found if one is not None]
                pending = pending[len(found) :]
            assert served == [number * 2 for number in range(9)]
            await replica.close()
            assert budget.cached_bytes == 0

    run_harness(test)


def test_consume_many_is_refused_while_decoded_batches_are_in_use() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.log_settings = LogSettings(tail_cache_bytes_max=0)
        partition.decoded = budget = DecodedBatchBudget(2 * READ_BYTES_MAX)
        async with partition.open_replica() as replica:
            await replica.append(record(b"cold"))
            with (
                budget.reserve(2 * READ_BYTES_MAX),
                pytest.raises(OverloadedError, match=r"not done: .*gateway\.decoded_bytes_max"),
            ):
                await replica.consume_many([(ALICE, "earliest")])
            assert replica.state.cursors == {}
            assert [found and found.value for found in await replica.consume_many([(ALICE, "earliest")])] == [b"cold"]

    run_harness(test)


def test_consume_many_result_is_cut_when_records_are_large() -> None:
    async def test(replica: Replica) -> None:
        large = bytes(CONSUMED_BYTES_MAX // 2 + 1)
        for _ in range(3):
            await replica.append(record(large))
        assert [found and found.offset for found in await replica.consume_many([(ALICE, "earliest")] * 3)] == [0]
        assert replica.state.cursors == {ALICE: 1}
        assert [found and found.offset for found in await replica.consume_many([(ALICE, "earliest")] * 3)] == [1]

    run(test)


def test_consume_many_without_records_writes_nothing_once_cursors_exist() -> None:
    async def test(replica: Replica) -> None:
        await replica.consume_many([(ALICE, "earliest"), (BOB, "earliest")])
        before = replica.member.log.end_index
        assert await replica.consume_many([(ALICE, "earliest"), (BOB, "earliest")]) == [None, None]
        assert replica.member.log.end_index == before

    run(test)


def test_consume_at_an_offset_repeats_records_and_sets_the_cursor_after_them() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 5)
        for _ in range(3):
            consumed = await replica.consume(ALICE, offset=Offset(2), records_max=2, bytes_max=LARGE)
            assert values_of(consumed) == [b"2", b"3"]
            assert replica.state.cursors == {ALICE: 4}
        assert values_of(await replica.consume(ALICE, bytes_max=LARGE)) == [b"4"]
        empty = await replica.consume(ALICE, offset=Offset(5), bytes_max=LARGE)
        assert (empty.batches, empty.cursor) == ([], 5)
        with pytest.raises(OutOfRangeError) as refused:
            await replica.consume(ALICE, offset=Offset(6), bytes_max=LARGE)
        assert refused.value.code == "offset_out_of_range"

    run(test)


def test_repeated_call_that_moves_nothing_writes_nothing() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 2)
        await replica.consume(ALICE, offset=Offset(0), bytes_max=LARGE)
        before = replica.member.log.end_index
        await replica.consume(ALICE, offset=Offset(0), bytes_max=LARGE)
        assert replica.member.log.end_index == before

    run(test)


def test_new_consumer_starts_at_its_default_start_and_stays_there() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 3)
        nothing = await replica.consume(ALICE, default_start="latest", bytes_max=LARGE)
        assert (nothing.batches, nothing.cursor) == ([], 3)
        await fill(replica, 2, start=3)
        assert values_of(await replica.consume(ALICE, default_start="latest", bytes_max=LARGE)) == [b"3"]

    run(test)


def test_cursors_are_set_and_read() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 4)
        await replica.move_cursors([(ALICE, Offset(2)), (BOB, "latest")])
        await replica.move_cursors([(ALICE, Offset(0)), (ConsumerId(3), Offset(1))], only_new=True)
        read = await replica.get_cursors([BOB, ALICE, ConsumerId(3), ConsumerId(4)])
        assert read.cursors == (4, 2, 1, None)
        assert (read.first_offset, read.end_offset) == (0, 4)
        await replica.move_cursors([(ALICE, Offset(1))], only_new=True)
        with pytest.raises(OutOfRangeError):
            await replica.move_cursors([(ALICE, Offset(5))])
        assert values_of(await replica.consume(ALICE, bytes_max=LARGE)) == [b"2"]

    run(test)


def test_only_new_waits_for_a_cursor_on_its_way() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 2)
        first = asyncio.ensure_future(replica.move_cursors([(ALICE, Offset(1))]))
        await asyncio.sleep(0)
        await replica.move_cursors([(ALICE, Offset(2))], only_new=True)
        assert replica.state.cursors == {ALICE: 1}
        await first

    run(test)


def test_refused_move_refuses_moves_planned_after_it() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 6)
        await replica.consume(ALICE, bytes_max=LARGE)
        blocking = asyncio.ensure_future(replica.append(record(b"x" * 900)))
        await asyncio.sleep(0)
        calls = [asyncio.ensure_future(replica.consume(ALICE, bytes_max=LARGE)) for _ in range(3)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
        await blocking
        assert replica.state.cursors == {ALICE: 1}
        assert values_of(await replica.consume(ALICE, bytes_max=LARGE)) == [b"1"], "nothing was skipped"

    run(test, settings=ReplicationSettings(hibernation=False, uncommitted_bytes_max=1024))


def test_unknown_outcome_returns_nothing_and_plans_start_over() -> None:
    async def test(replica: Replica) -> None:
        await fill(replica, 3)
        await replica.consume(ALICE, bytes_max=LARGE)
        flying = asyncio.ensure_future(replica.consume(ALICE, bytes_max=LARGE))
        queued = asyncio.ensure_future(replica.consume(ALICE, bytes_max=LARGE))
        await asyncio.sleep(0.000001)
        replica.member.abandon()
        outcomes = await asyncio.gather(flying, queued, return_exceptions=True)
        assert isinstance(outcomes[0], OutcomeUnknownError)
        assert isinstance(outcomes[1], UnavailableError)

    run(test)


def test_replica_that_does_not_lead_refuses_everything() -> None:
    async def test(replica: Replica) -> None:
        calls = [
            replica.consume(ALICE, bytes_max=LARGE),
            replica.fetch(Offset(0), bytes_max=LARGE),
            replica.move_cursors([(ALICE, Offset(0))]),
            replica.get_cursors([ALICE]),
            replica.find_offset("earliest"),
            replica.wait_past(Offset(0)),
        ]
        for call in calls:
            with pytest.raises(NotLeaderError):
                await call

    run(test, voters=(1, 2, 3))


def test_too_many_cursors_are_refused() -> None:
    async def test(replica: Replica) -> None:
        moves = CursorMoves(replica._gate, replica.state, cursors_max=2)
        await replica._gate.wait_ready()
        await moves.move({ALICE: Offset(0), BOB: Offset(0)})
        with pytest.raises(OverloadedError):
            moves.move({ConsumerId(3): Offset(0)})
        await moves.move({ALICE: Offset(0)})

    run(test)


def test_fetch_waits_for_a_record_up_to_its_wait_time() -> None:
    async def test(replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        nothing = await replica.fetch(Offset(0), bytes_max=LARGE, wait_ms=500)
        assert nothing.batches == []
        assert loop.time() - begun == pytest.approx(0.5, abs=0.05)
        waiting = asyncio.ensure_future(replica.fetch(Offset(0), bytes_max=LARGE, wait_ms=60_000))
        await asyncio.sleep(1)
        await fill(replica, 1)
        fetched = await waiting
        assert [batch.values() for batch in fetched.batches] == [[b"0"]]
        assert (fetched.first_offset, fetched.end_offset) == (0, 1)
        assert loop.time() - begun < 10

    run(test)


def test_consume_waits_for_a_record() -> None:
    async def test(replica: Replica) -> None:
        waiting = [
            asyncio.ensure_future(replica.consume(consumer, bytes_max=LARGE, wait_ms=60_000))
            for consumer in (ALICE, ALICE, BOB)
        ]
        await asyncio.sleep(1)
        await fill(replica, 1)
        seen = [values_of(consumed) for consumed in await asyncio.gather(*waiting)]
        assert sorted(seen) == [[], [b"0"], [b"0"]]

    run(test)


def test_waiting_reader_fails_when_leadership_is_lost() -> None:
    async def test(replica: Replica) -> None:
        told: list[Role] = []
        replica.on_role = lambda role, term, leader: told.append(role)
        waiting = asyncio.ensure_future(replica.wait_past(Offset(0)))
        await asyncio.sleep(0.1)
        assert replica.member.on_role is not None
        replica.member.on_role(Role.FOLLOWER, replica.member.term, NodeId(2))
        with pytest.raises(NotLeaderError) as refused:
            await waiting
        assert refused.value.leader == 2
        assert told == [Role.FOLLOWER]

    run(test)


def test_cancelled_waiters_are_dropped() -> None:
    async def test(replica: Replica) -> None:
        del replica
        waiters = FetchWaiters(waiters_max=100)
        for _ in range(5):
            waiting = [asyncio.ensure_future(waiters.wait_past(Offset(7))) for _ in range(100)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await waiters.wait_past(Offset(7))
            for reader in waiting:
                reader.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert len(waiters) == 0
        assert len(waiters._waiting) <= 100

    run(test)


def test_offsets_are_found_by_time() -> None:
    async def test(replica: Replica) -> None:
        for number in range(5):
            await replica.append(record(b"x", timestamp=1000 * number))
        assert await replica.find_offset("earliest") == 0
        assert await replica.find_offset("latest") == 5
        assert await replica.find_offset(2500) == 3
        assert await replica.find_offset(9000) == 5

    run(test)


def test_states_of_equal_cursors_have_equal_bytes() -> None:
    first, second = PartitionState(), PartitionState()
    first.cursors = {ALICE: Offset(1), BOB: Offset(2)}
    second.cursors = {BOB: Offset(2), ALICE: Offset(1)}
    assert first.snapshot() == second.snapshot()
    copy = PartitionState()
    copy.restore(first.snapshot())
    assert copy.cursors == first.cursors

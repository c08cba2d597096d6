"""Work queues on one replica: leases, redelivery, receipts, delays, orders of keys, limits, restarts and failovers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from partition_harness import LARGE, PartitionHarness, record, run, run_harness

from quiver.errors import ConflictError, OutcomeUnknownError, OverloadedError, QuiverError, RequestError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, Index, Offset, PartitionId, TopicId
from quiver.partition import Replica
from quiver.partition.entries import CursorsEntry, ForgetEntry, PartitionEntry
from quiver.partition.proposal_gate import ProposalOutcome
from quiver.partition.queue_handler import ReceiveRequest, ReceiveResult, SettleResult
from quiver.record import HEADER_BYTES, build_batch, decode_header
from quiver.record.delay import DELIVER_AT_HEADER, encode_deliver_at
from quiver.record.header import PREAMBLE_BYTES, encode_header
from quiver.testing.queue_ablations import QueueSafeguard, disabled
from quiver.wire.queue_messages import QueueExtension, QueueReject, QueueReturn, QueueSettle, ReceiptRange

WORKERS = ConsumerId(5)
DEFAULTS = QueueSettings()
LEASE_S = 30


async def receive(
    replica: Replica,
    records_max: int = 100,
    *,
    wait_s: float = 0,
    settings: QueueSettings = DEFAULTS,
    lease_ms: int | None = None,
    bytes_max: int = LARGE,
) -> ReceiveResult:
    return await replica.queues.receive(
        ReceiveRequest(
            group_id=WORKERS,
            settings=settings,
            records_max=records_max,
            bytes_max=bytes_max,
            lease_ms=lease_ms,
            wait_ms=int(wait_s * 1000),
        )
    )


def spans(received: ReceiveResult) -> list[tuple[int, int, int]]:
    return [(one.first, one.count, one.attempt) for one in received.leases]


def values(received: ReceiveResult) -> list[object]:
    return [row[1] for row in received.rows]


def settle(**fields: Sequence[object]) -> QueueSettle:
    made = {name: tuple(items) for name, items in fields.items()}
    return QueueSettle(topic_id=TopicId(1), partition_id=PartitionId(0), group_id=WORKERS, **made)  # type: ignore[arg-type]


async def ack(replica: Replica, first: int, count: int, grant: int) -> SettleResult:
    return await replica.queues.settle(settle(acks=[ReceiptRange(first, count, grant)]), DEFAULTS)


async def give_back(
    replica: Replica,
    first: int,
    count: int,
    grant: int,
    *,
    delay_ms: int | None = None,
    settings: QueueSettings = DEFAULTS,
) -> SettleResult:
    return await replica.queues.settle(settle(returns=[QueueReturn(first, count, grant, delay_ms)]), settings)


async def fill(replica: Replica, count: int, *, batch_size: int = 10) -> None:
    for first in range(0, count, batch_size):
        await replica.append(record(*(b"%d" % at for at in range(first, min(first + batch_size, count)))))


def with_records(test: Callable[[Replica], Awaitable[None]], count: int = 30) -> None:
    async def filled(replica: Replica) -> None:
        await fill(replica, count)
        await test(replica)

    run(filled)


# -- leases and acknowledgements -----------------------------------------------------------------------


def test_records_are_leased_once_and_acknowledged() -> None:
    async def test(replica: Replica) -> None:
        first, second = await asyncio.gather(receive(replica, 12), receive(replica, 100))
        assert sorted(spans(first) + spans(second)) == [(0, 12, 1), (12, 18, 1)]
        assert values(first) == [b"%d" % at for at in range(12)]
        assert first.grant != second.grant
        assert 29_000 < first.deadline_ms - replica_now(replica) <= first.lease_ms == 30_000
        assert await ack(replica, 0, 12, first.grant) == SettleResult()
        assert replica.state.cursors == {WORKERS: 12}
        repeated = await ack(replica, 0, 12, first.grant)
        assert (repeated.stale, repeated.settled_before) == ((), ((0, 12),))
        nothing = await receive(replica)
        assert (nothing.leases, nothing.stall) == ((), "empty")

    with_records(test)


def replica_now(replica: Replica) -> int:
    return replica.queues._clock.wall_ms()


def test_record_that_is_not_acknowledged_in_time_is_delivered_again_first() -> None:
    async def test(replica: Replica) -> None:
        lost = await receive(replica, 5)
        await asyncio.sleep(LEASE_S - 1)
        assert spans(await receive(replica, 1)) == [(5, 1, 1)]
        await asyncio.sleep(2)
        again = await receive(replica, 8)
        assert spans(again) == [(0, 5, 2), (6, 3, 1)]
        assert (await ack(replica, 0, 5, lost.grant)).stale == ((0, 5),)
        assert (await ack(replica, 0, 5, again.grant)).stale == ()
        meter = replica.queues._meter
        assert (meter.leased, meter.redelivered, meter.acknowledged, meter.stale) == (14, 5, 5, 5)

    with_records(test)


def test_receipt_of_an_ended_lease_is_good_until_the_record_is_leased_again() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 5)
        await asyncio.sleep(10 * LEASE_S)
        assert (await ack(replica, 0, 5, received.grant)).stale == ()
        assert spans(await receive(replica, 2)) == [(5, 2, 1)]

    with_records(test)


def test_extended_lease_ends_later() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 5)
        extend = settle(extends=[QueueExtension(0, 2, received.grant, 90_000)])
        extended = await replica.queues.settle(extend, DEFAULTS)
        assert extended.stale == ()
        assert 89_000 < extended.deadline_ms - replica_now(replica) <= 90_000
        await asyncio.sleep(LEASE_S + 1)
        assert spans(await receive(replica, 4)) == [(2, 3, 2), (5, 1, 1)]
        await asyncio.sleep(60)
        assert spans(await receive(replica, 2)) == [(0, 2, 2)]
        assert (await replica.queues.settle(extend, DEFAULTS)).stale == ((0, 2),)

    with_records(test)


def test_released_record_is_ready_at_once_and_the_attempt_does_not_count() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 5)
        await replica.queues.settle(settle(releases=[ReceiptRange(1, 2, received.grant)]), DEFAULTS)
        assert spans(await receive(replica, 3)) == [(1, 2, 1), (5, 1, 1)]

    with_records(test)


def test_returned_record_waits_with_growing_delays() -> None:
    settings = QueueSettings(backoff_ms=1_000, backoff_multiplier=3.0, backoff_max_ms=5_000, max_attempts=0)

    async def test(replica: Replica) -> None:
        for attempt, delay_s in ((1, 1), (2, 3), (3, 5), (4, 5)):
            received = await receive(replica, settings=settings, wait_s=1)
            assert spans(received) == [(0, 1, attempt)]
            begun = replica_now(replica)
            await give_back(replica, 0, 1, received.grant, settings=settings)
            early = await receive(replica, settings=settings)
            assert (early.leases, early.stall) == ((), "waiting")
            waited = await receive(replica, settings=settings, wait_s=60)
            assert delay_s * 1000 <= replica_now(replica) - begun < delay_s * 1000 + 100
            assert (
                await replica.queues.settle(settle(releases=[ReceiptRange(0, 1, waited.grant)]), settings)
            ).stale == ()

    with_records(test, 1)


def test_delay_of_a_return_is_that_of_the_worker() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica)
        await give_back(replica, 3, 2, received.grant, delay_ms=0)
        assert spans(await receive(replica)) == [(3, 2, 2)]

    with_records(test)


def test_ranges_that_overlap_are_refused() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica)
        both = settle(acks=[ReceiptRange(0, 3, received.grant)], rejects=[QueueReject(2, 1, received.grant, "no")])
        with pytest.raises(RequestError, match="two ranges"):
            await replica.queues.settle(both, DEFAULTS)
        assert replica.state.queues[WORKERS].outstanding == 30

    with_records(test)


def test_settle_of_a_queue_without_state_is_stale() -> None:
    async def test(replica: Replica) -> None:
        assert (await ack(replica, 4, 2, 1)).stale == ((4, 2),)
        assert replica.state.queues == {}

    with_records(test)


# -- the end of attempts ---------------------------------------------------------------------------------


def test_last_attempt_ends_as_a_dead_letter() -> None:
    settings = QueueSettings(max_attempts=2, backoff_ms=0)

    async def test(replica: Replica) -> None:
        received = await receive(replica, 3, settings=settings)
        await give_back(replica, 0, 1, received.grant, settings=settings)
        await asyncio.sleep(LEASE_S)
        again = await receive(replica, 3, settings=settings)
        assert spans(again) == [(1, 2, 2), (0, 1, 2)]  # expired leases first
        await give_back(replica, 0, 1, again.grant, settings=settings)
        await asyncio.sleep(LEASE_S)
        assert spans(await receive(replica, 1, settings=settings)) == [(3, 1, 1)]
        dead = replica.queues.dead_letters(WORKERS)
        assert [(one.first, one.count, one.sequence, one.attempt, one.reason) for one in dead] == [
            (0, 1, 0, 2, "max_attempts"),
            (1, 2, 1, 2, "max_attempts"),
        ]
        assert replica.state.cursors == {WORKERS: 0}
        await replica.queues.bury(WORKERS, 3)
        assert replica.state.cursors == {WORKERS: 3}

    with_records(test)


def test_records_die_without_anybody_who_receives() -> None:
    settings = QueueSettings(max_attempts=1)

    async def test(replica: Replica) -> None:
        await receive(replica, 3, settings=settings)
        await replica.queues.expire(WORKERS, settings)
        assert replica.queues.dead_letters(WORKERS) == ()
        await asyncio.sleep(LEASE_S)
        await replica.queues.expire(WORKERS, settings)
        assert [(one.first, one.count) for one in replica.queues.dead_letters(WORKERS)] == [(0, 3)]
        assert replica.queues._meter.dead == 3

    with_records(test)


def test_rejected_record_is_dead_at_once() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 5)
        reject = settle(rejects=[QueueReject(1, 2, received.grant, "no such user")])
        assert (await replica.queues.settle(reject, DEFAULTS)).stale == ()
        assert (await replica.queues.settle(reject, DEFAULTS)).stale == ()
        dead = replica.queues.dead_letters(WORKERS)
        assert [(one.first, one.count, one.reason) for one in dead] == [(1, 2, "no such user")]
        assert (await ack(replica, 1, 1, received.grant)).stale == ((1, 1),)

    with_records(test)


def test_records_of_a_malformed_batch_are_dead_letters_and_the_queue_goes_on() -> None:
    async def test(replica: Replica) -> None:
        broken = build_malformed(bytearray(build_batch([b"x" * 20] * 3, timestamp=1)))
        await replica.append(record(b"a"))
        await replica.append(broken)
        await replica.append(record(b"b"))
        received = await receive(replica)
        assert (spans(received), values(received)) == ([(0, 1, 1), (4, 1, 1)], [b"a", b"b"])
        assert [(one.first, one.count, one.reason) for one in replica.queues.dead_letters(WORKERS)] == [
            (1, 3, "undecodable")
        ]

    run(test)


def build_malformed(batch: bytearray) -> bytearray:
    """Return a batch whose checksum is right, but whose lengths do not add up."""
    payload = batch[HEADER_BYTES:]
    payload[PREAMBLE_BYTES] ^= 1
    return bytearray(encode_header(decode_header(batch), payload)) + payload


# -- waiting ---------------------------------------------------------------------------------------------


def test_receive_waits_for_a_record() -> None:
    async def test(replica: Replica) -> None:
        waiting = [asyncio.create_task(receive(replica, 1, wait_s=20)) for _ in range(3)]
        await asyncio.sleep(1)
        assert replica.queues.waiting == 3
        await replica.append(record(b"a", b"b"))
        await asyncio.sleep(1)
        done = [task.result() for task in waiting if task.done()]
        assert sorted(spans(one) for one in done) == [[(0, 1, 1)], [(1, 1, 1)]]
        last = await asyncio.gather(*waiting)
        assert [one.stall for one in last if not one.leases] == ["empty"]
        assert replica.queues.waiting == 0

    run(test)


def test_receive_waits_until_a_lease_ends() -> None:
    async def test(replica: Replica) -> None:
        await receive(replica, 1)
        again = await receive(replica, 1, wait_s=60)
        assert spans(again) == [(0, 1, 2)]

    with_records(test, 1)


def test_cancelled_receive_leaves_the_record_to_the_next() -> None:
    async def test(replica: Replica) -> None:
        first = asyncio.create_task(receive(replica, 1, wait_s=60))
        await asyncio.sleep(1)
        second = asyncio.create_task(receive(replica, 1, wait_s=60))
        await asyncio.sleep(1)
        replica.queues._wake_first(replica.queues._queues[WORKERS])
        first.cancel()
        await replica.append(record(b"a"))
        assert spans(await second) == [(0, 1, 1)]

    run(test)


def test_returned_record_wakes_a_waiting_receive() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 1)
        waiting = asyncio.create_task(receive(replica, 1, wait_s=20))
        await asyncio.sleep(1)
        begun = replica_now(replica)
        await give_back(replica, 0, 1, received.grant, delay_ms=0)
        assert spans(await waiting) == [(0, 1, 2)]
        assert replica_now(replica) - begun < 100

    with_records(test, 1)


# -- delays, keys, limits -----------------------------------------------------------------------------------


def test_delayed_record_is_not_delivered_early_and_holds_nothing_up() -> None:
    async def test(replica: Replica) -> None:
        at_ms = replica_now(replica) + 10_000
        late = ((DELIVER_AT_HEADER, encode_deliver_at(at_ms)),)
        await replica.append(bytearray(build_batch([b"a", b"b", b"c"], timestamp=1, headers=[(), late, ()])))
        received = await receive(replica)
        assert values(received) == [b"a", b"c"]
        assert spans(received) == [(0, 1, 1), (2, 1, 1)]
        await ack(replica, 0, 1, received.grant)
        await ack(replica, 2, 1, received.grant)
        assert replica.state.cursors == {WORKERS: 1}
        assert (await receive(replica)).stall == "waiting"
        delayed = await receive(replica, wait_s=60)
        assert (values(delayed), spans(delayed)) == ([b"b"], [(1, 1, 1)])
        assert at_ms <= replica_now(replica) < at_ms + 1_100
        await ack(replica, 1, 1, delayed.grant)
        assert replica.state.cursors == {WORKERS: 3}

    run(test)


BY_KEY = QueueSettings(order="key", backoff_ms=5_000)


async def receive_keys(replica: Replica, records_max: int = 100) -> tuple[ReceiveResult, list[object]]:
    received = await receive(replica, records_max, settings=BY_KEY)
    return received, values(received)


def test_one_record_of_a_key_is_under_way_and_their_order_is_kept() -> None:
    async def test(replica: Replica) -> None:
        keys = [b"x", b"x", b"y", None, b"x", None, b"y"]
        data = [b"x1", b"x2", b"y1", b"-1", b"x3", b"-2", b"y2"]
        await replica.append(bytearray(build_batch(data, timestamp=1, keys=keys)))
        received, found = await receive_keys(replica)
        assert found == [b"x1", b"y1", b"-1", b"-2"]
        assert (await receive(replica, settings=BY_KEY)).stall == "key_order"
        await ack(replica, 0, 1, received.grant)
        second, found = await receive_keys(replica)
        assert found == [b"x2"]
        await give_back(replica, 1, 1, second.grant, settings=BY_KEY)
        assert (await receive_keys(replica))[1] == []  # x2 waits for its retry, and x3 waits for x2
        await replica.queues.settle(settle(rejects=[QueueReject(2, 1, received.grant, "bad")]), BY_KEY)
        assert (await receive_keys(replica))[1] == [b"y2"]
        await asyncio.sleep(6)
        third, found = await receive_keys(replica)
        assert found == [b"x2"]
        await ack(replica, 1, 1, third.grant)
        assert (await receive_keys(replica))[1] == [b"x3"]

    run(test)


def test_no_more_is_leased_than_may_be_under_way() -> None:
    settings = QueueSettings(in_flight_max=8)

    async def test(replica: Replica) -> None:
        received = await receive(replica, 100, settings=settings)
        assert spans(received) == [(0, 8, 1)]
        refused = await receive(replica, settings=settings)
        assert (refused.leases, refused.stall) == ((), "in_flight_max")
        status = await replica.queues.describe(WORKERS, settings, start="earliest")
        assert (status.ready, status.leased, status.stall) == (22, 8, "in_flight_max")
        waiting = asyncio.create_task(receive(replica, settings=settings, wait_s=20))
        await asyncio.sleep(1)
        await ack(replica, 3, 2, received.grant)
        assert spans(await waiting) == [(8, 2, 1)]

    with_records(test)


def test_answer_is_bounded_by_bytes_but_has_a_record() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(*(bytes(100) for _ in range(10))))
        assert spans(await receive(replica, bytes_max=350)) == [(0, 3, 1)]
        assert spans(await receive(replica, bytes_max=0)) == [(3, 1, 1)]

    run(test)


def test_status_counts_records_by_what_becomes_of_them() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 10)
        await ack(replica, 0, 3, received.grant)
        await give_back(replica, 4, 2, received.grant)
        await replica.queues.settle(settle(rejects=[QueueReject(9, 1, received.grant, "bad")]), DEFAULTS)
        status = await replica.queues.describe(WORKERS, DEFAULTS, start="earliest")
        assert (status.ready, status.leased, status.waiting, status.dying) == (20, 4, 2, 1)
        assert (status.next_offset, status.first_unsettled, status.end_offset) == (10, 3, 30)
        await asyncio.sleep(LEASE_S)
        status = await replica.queues.describe(WORKERS, DEFAULTS, start="earliest")
        assert (status.ready, status.leased, status.waiting) == (26, 0, 0)

    with_records(test)


# -- where a queue begins, and what else touches it -------------------------------------------------------------


def test_queue_begins_at_the_cursor_of_the_group() -> None:
    async def test(replica: Replica) -> None:
        await replica.move_cursors([(WORKERS, Offset(7))])
        assert spans(await receive(replica, 2)) == [(7, 2, 1)]

    with_records(test)


def test_group_that_is_a_queue_cannot_be_consumed() -> None:
    async def test(replica: Replica) -> None:
        await receive(replica, 2)
        with pytest.raises(ConflictError, match="work queue") as refused:
            await replica.consume(WORKERS, bytes_max=LARGE)
        assert refused.value.code == "is_queue"
        with pytest.raises(ConflictError, match="work queue"):
            await replica.consume_many([(WORKERS, "earliest")])
        assert replica.state.cursors == {WORKERS: 0}

    with_records(test)


def test_moved_cursor_begins_the_queue_again_and_makes_receipts_stale() -> None:
    async def test(replica: Replica) -> None:
        received = await receive(replica, 10)
        await replica._gate.propose_entry(CursorsEntry(((WORKERS, Offset(4)),)))  # as a program before this one did
        assert (await ack(replica, 4, 2, received.grant)).stale == ((4, 2),)
        again = await receive(replica, 3)
        assert spans(again) == [(4, 3, 1)]
        assert again.grant > received.grant

    with_records(test)


def test_forgotten_queue_wakes_nobody_and_begins_anew() -> None:
    async def test(replica: Replica) -> None:
        await receive(replica, 10)
        await replica._gate.propose_entry(ForgetEntry(Index(0), consumers=(WORKERS,)))
        assert spans(await receive(replica, 3)) == [(0, 3, 1)]

    with_records(test)


# -- restarts and failures -----------------------------------------------------------------------------------------


def test_leases_and_acknowledgements_survive_a_restart() -> None:
    async def test(partition: PartitionHarness) -> None:
        async with partition.open_replica() as replica:
            await fill(replica, 30)
            received = await receive(replica, 10)
            await ack(replica, 2, 3, received.grant)
            await give_back(replica, 6, 1, received.grant, delay_ms=60_000)
        async with partition.open_replica() as replica:
            assert spans(await receive(replica, 1)) == [(10, 1, 1)]
            assert (await ack(replica, 0, 1, received.grant)).stale == ()
            await asyncio.sleep(LEASE_S)
            assert spans(await receive(replica)) == [(1, 1, 2), (5, 1, 2), (7, 4, 2), (11, 19, 1)]
            await asyncio.sleep(LEASE_S - 1)
            assert spans(await receive(replica, wait_s=60)) == [(6, 1, 2)]

    run_harness(test)


def test_records_are_returned_only_after_their_leases_are_committed() -> None:
    assert watch_commit() == [2]
    with disabled(QueueSafeguard.COMMIT_BEFORE_DELIVERY):
        assert watch_commit() == []


def watch_commit() -> list[int]:
    """Return the window's next offset as it was when the entry of a receive was committed, before it returned."""
    committed: list[int] = []

    async def test(replica: Replica) -> None:
        await receive(replica, 1)
        proposed: list[int] = []
        propose = replica._gate.propose_entry

        def watch(entry: PartitionEntry) -> ProposalOutcome:
            outcome = propose(entry)
            outcome.add_done_callback(lambda _: proposed.append(replica.state.queues[WORKERS].next_offset))
            return outcome

        replica._gate.propose_entry = watch  # type: ignore[method-assign]
        await receive(replica, 1)
        committed.extend(proposed)

    with_records(test)
    return committed


def test_waiting_receive_is_refused_with_the_opening_of_its_queue() -> None:
    async def test(replica: Replica) -> None:
        propose, refusals = replica._gate.propose_entry, 0

        def refuse(_: object) -> object:
            nonlocal refusals
            refusals += 1
            if refusals == 10:
                replica._gate.propose_entry = propose  # type: ignore[method-assign]
            raise OverloadedError("not done: a test")

        replica._gate.propose_entry = refuse  # type: ignore[method-assign,assignment]
        with pytest.raises(OverloadedError):
            await receive(replica, wait_s=1)
        assert refusals == 1

    run(test)


def test_failed_entry_voids_what_was_planned_after_it() -> None:
    async def test(replica: Replica) -> None:
        await receive(replica, 1)
        propose = replica._gate.propose_entry
        refused = OutcomeUnknownError("may have been done: a test")

        def fail(_: object) -> object:
            raise refused

        replica._gate.propose_entry = fail  # type: ignore[method-assign,assignment]
        results = await asyncio.gather(receive(replica, 3), ack(replica, 0, 1, 1), return_exceptions=True)
        assert all(isinstance(one, QuiverError) for one in results)
        replica._gate.propose_entry = propose  # type: ignore[method-assign]
        assert spans(await receive(replica, 3)) == [(1, 3, 1)]
        assert replica.state.queues[WORKERS].outstanding == 4

    with_records(test)

"""State of clients that are gone is dropped by two rules only, and no retry of theirs is appended a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest
from metadata_world import NOW_MS, do, formed_state, register_consumer, register_producer
from partition_harness import LARGE, PartitionHarness, batch, record, run, run_harness

from quiver.config import PartitionSettings
from quiver.errors import OverloadedError, UnavailableError, UnknownVersionError
from quiver.features import LEVEL_MAX
from quiver.metadata import EntityKind, ExpireClients, SilentClient
from quiver.model import ConsumerId, Index, Offset, ProducerId
from quiver.partition import PartitionState, Replica
from quiver.partition.client_cleaner import IDS_PER_ENTRY
from quiver.partition.entries import (
    ProducerSnapshot,
    SentBatch,
    StateSnapshotEntry,
    TrimPoint,
    decode_entry,
    join_snapshot_entry,
)
from quiver.partition.producers import ProducerTable
from quiver.partition.state import _SavedState
from quiver.record import Batch, seal_control_batch
from quiver.replication import SLICE_ROWS


class Registered:
    """Metadata in which clients up to an id were registered, and some are left."""

    def __init__(self, index: int, *, producers: Iterable[int] = (), consumers: Iterable[int] = ()) -> None:
        self.index = Index(index)
        self.next_id = 10_000
        self.producers, self.consumers = set(producers), set(consumers)

    def gone_producers(self, ids: Iterable[ProducerId]) -> list[ProducerId]:
        return [id_ for id_ in ids if id_ not in self.producers and id_ < self.next_id]

    def gone_consumers(self, ids: Iterable[ConsumerId]) -> list[ConsumerId]:
        return [id_ for id_ in ids if id_ not in self.consumers and id_ < self.next_id]


async def set_cursors(replica: Replica, consumers: Iterable[int]) -> None:
    await replica.move_cursors([(ConsumerId(number), Offset(0)) for number in consumers])


def test_nothing_is_left_of_producers_in_flight_when_they_are_answered() -> None:
    async def test(replica: Replica) -> None:
        appends = [replica.append(batch(0, producer=number)) for number in range(500)]
        fences = [replica.begin_epoch(ProducerId(number), 1) for number in range(500, 600)]
        await asyncio.gather(*appends, *fences)
        await asyncio.sleep(0)
        assert not replica._deduplicator._in_flight

    run(test)


def test_removed_clients_are_dropped_from_the_state_and_the_others_stay() -> None:
    async def test(replica: Replica) -> None:
        for number in range(5):
            await replica.append(batch(0, producer=number))
        await set_cursors(replica, range(5))
        replica.set_clients(lambda: Registered(70, producers=(1, 3), consumers=(0, 4)))
        await replica.maintain(0)
        assert replica.state.producers.ids() == [1, 3]
        assert sorted(replica.state.cursors) == [0, 4]
        assert replica.state.metadata_index == 70

    run(test)


def test_consumers_that_fill_a_partition_make_room_when_they_are_forgotten() -> None:
    async def test(replica: Replica) -> None:
        replica._moves._cursors_max = 2
        registered = Registered(70, consumers=(1, 2, 3))
        replica.set_clients(lambda: registered)
        await set_cursors(replica, (1, 2))
        with pytest.raises(OverloadedError, match="quiver consumer forget"):
            await set_cursors(replica, (3,))
        registered.consumers.discard(1)  # `quiver consumer forget`
        replica.note_removed(consumers=[ConsumerId(1)])
        await replica.maintain(0)
        await set_cursors(replica, (3,))
        assert sorted(replica.state.cursors) == [2, 3]

    run(test)


def test_session_that_began_while_its_consumer_was_dropped_goes_with_the_next_scan() -> None:
    async def test(replica: Replica) -> None:
        await set_cursors(replica, [5])
        replica.set_clients(lambda: Registered(70))
        dropping = asyncio.create_task(replica.maintain(0))
        while all(proposed.is_done for proposed in replica._gate._pending):  # noqa: ASYNC110 - until it is proposed
            await asyncio.sleep(0)
        await replica.move_cursors([(ConsumerId(5), Offset(0))], only_new=True, session=3)
        await dropping
        assert (replica.state.cursors, replica.state.sessions) == ({}, {5: 3})
        replica._maintenance.cleaner.is_scan_due = True
        await replica.maintain(0)
        assert (replica.state.cursors, replica.state.sessions) == ({}, {})

    run(test)


def test_client_that_the_metadata_does_not_know_yet_stays() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0, producer=10_000))
        await set_cursors(replica, [10_001])
        replica.set_clients(lambda: Registered(70))
        await replica.maintain(0)
        assert (replica.state.producers.ids(), list(replica.state.cursors)) == ([10_000], [10_001])

    run(test)


def test_many_removed_clients_need_few_entries_each_of_them_small() -> None:
    async def test(replica: Replica) -> None:
        await set_cursors(replica, range(3_500))
        replica.set_clients(lambda: Registered(70))
        before = replica.member.applied_index
        await replica.maintain(0)
        assert not replica.state.cursors
        assert replica.member.applied_index - before == -(-3_500 // IDS_PER_ENTRY)

    run(test)


def test_removal_is_carried_out_soon_without_waiting_for_the_next_scan() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(retention_interval_ms=3_600_000)
        async with partition.open_replica() as replica:
            registered = Registered(70, consumers=(7, 8))
            replica.set_clients(lambda: registered)
            running = asyncio.create_task(replica.run(partition.clock))
            await replica.maintain(0)
            await set_cursors(replica, (7, 8))
            registered.consumers.discard(7)
            replica.note_removed(consumers=[ConsumerId(7), ConsumerId(99)])
            await asyncio.sleep(1)
            assert list(replica.state.cursors) == [8]
            await replica.close()
            await running

    run_harness(test)


def test_dropped_state_stays_dropped_after_a_restart_and_in_snapshots() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(summary_entries=10)
        async with partition.open_replica() as replica:
            for number in range(20):
                await replica.append(batch(0, producer=number))
            await set_cursors(replica, range(20))
            replica.set_clients(lambda: Registered(70, producers=[3], consumers=[4]))
            await replica.maintain(0)
            await replica.append(batch(1, producer=3))
            await replica.maintain(0)
            assert replica.state.trim_points
            await replica.close()
        async with partition.open_replica() as replica:
            assert (replica.state.producers.ids(), list(replica.state.cursors)) == ([3], [4])
            assert replica.state.metadata_index == 70

    run_harness(test)


def test_retry_of_a_removed_producer_that_old_metadata_admits_is_refused() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(batch(0, producer=5), checked_index=Index(60))
        replica.set_clients(lambda: Registered(70))
        await replica.maintain(0)
        with pytest.raises(UnavailableError) as caught:
            await replica.append(batch(0, producer=5), checked_index=Index(69))
        assert caught.value.code == "behind"
        with pytest.raises(UnavailableError):
            await replica.begin_epoch(ProducerId(5), 1, checked_index=Index(69))
        assert replica.high_watermark == 1
        await replica.append(batch(0, producer=6), checked_index=Index(70))  # a new producer, by metadata as new
        assert replica.high_watermark == 2

    run(test)


def test_removed_consumer_that_old_metadata_admits_gets_no_new_cursor() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"v"))
        await set_cursors(replica, [5])
        replica.set_clients(lambda: Registered(70))
        await replica.maintain(0)
        old, consumer = Index(69), ConsumerId(5)
        for call in (
            replica.consume(consumer, bytes_max=LARGE, checked_index=old),
            replica.consume_many([(consumer, "earliest")], checked_index=old),
            replica.move_cursors([(consumer, Offset(1))], checked_index=old),
        ):
            with pytest.raises(UnavailableError):
                await call
        assert not replica.state.cursors

    run(test)


def test_full_table_refuses_new_producers_until_idle_ones_are_dropped_after_the_window() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(dedup_window_ms=60_000)
        async with partition.open_replica() as replica:
            replica.state.producers._producers_max = 10
            replica.set_clients(lambda: Registered(70, producers=range(100)))
            await replica.maintain(0)
            for number in range(10):
                await replica.append(batch(0, producer=number))
            with pytest.raises(OverloadedError):
                await replica.append(batch(0, producer=10))
            for _ in range(6):
                await asyncio.sleep(10)
                await replica.append(batch(replica.state.producers.next_sequence(ProducerId(9), 0) or 0, producer=9))
                await replica.maintain(0)
                retry = await replica.append(batch(0, producer=0))  # inside the window every retry is recognised
                assert (retry.base_offset, retry.is_duplicate) == (0, True)
            for _ in range(3):
                await asyncio.sleep(10)
                await replica.maintain(0)
            assert replica.state.producers.ids() == [9]
            await replica.append(batch(0, producer=10))

    run_harness(test)


def test_new_leader_waits_a_whole_window_before_it_drops_idle_producers() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(dedup_window_ms=60_000)
        async with partition.open_replica() as replica:
            for number in range(10):
                await replica.append(batch(0, producer=number))
            await asyncio.sleep(300)
        async with partition.open_replica() as replica:
            replica.state.producers._producers_max = 10
            replica.set_clients(lambda: Registered(70, producers=range(100)))
            await replica.maintain(0)
            await asyncio.sleep(50)
            await replica.maintain(0)
            assert len(replica.state.producers) == 10
            await asyncio.sleep(20)
            await replica.maintain(0)
            assert not replica.state.producers.ids()

    run_harness(test)


def test_producer_that_becomes_active_while_idle_ones_are_dropped_keeps_its_state() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(dedup_window_ms=60_000)
        async with partition.open_replica() as replica:
            replica.state.producers._producers_max = 10
            replica.set_clients(lambda: Registered(70, producers=range(100)))
            await replica.begin_epoch(ProducerId(0), 1)
            for number in range(1, 9):
                await replica.append(batch(0, producer=number))
            await replica.maintain(0)
            await asyncio.sleep(100)
            await replica.append(batch(0, producer=9))
            sends = [asyncio.create_task(replica.append(batch(0, producer=0, epoch=1)))]
            await asyncio.sleep(0)  # it is proposed, and not committed yet
            await replica.maintain(0)
            sent = await sends[0]
            retry = await replica.append(batch(0, producer=0, epoch=1))
            assert (retry.base_offset, retry.is_duplicate) == (sent.base_offset, True)
            assert replica.state.producers.ids() == [9, 0]

    run_harness(test)


def test_table_lists_idle_producers_by_the_index_of_their_last_batch() -> None:
    table = ProducerTable()
    for index, producer in ((1, 7), (2, 8), (3, 9), (4, 7)):
        table.fence(ProducerId(producer), 0, Index(index))
    assert table.find_idle(Index(2), ids_max=9) == [8]
    assert table.find_idle(Index(4), ids_max=9) == [8, 9, 7]
    assert table.find_idle(Index(4), ids_max=2) == [8, 9]


def large_state(clients: int) -> PartitionState:
    state = PartitionState()
    state.producers.replace(
        ProducerSnapshot(ProducerId(number), 1, 9, (SentBatch(0, 9, Offset(number)),), Index(number))
        for number in range(clients)
    )
    state.cursors = {ConsumerId(number * 7919 % clients): Offset(number) for number in range(clients)}
    state.trim_points = [TrimPoint(Index(3), Offset(1), 5, 6)]
    state.applied_index, state.end_offset, state.metadata_index = Index(77), Offset(8), Index(70)
    return state


@pytest.mark.parametrize("clients", [0, 1, 15, 16, 255, 256, 257, 1_000, 70_000])
def test_state_is_encoded_and_decoded_in_small_steps(clients: int) -> None:
    state = large_state(clients)
    parts = list(state.snapshot_steps())
    assert max(map(len, parts)) < 20_000
    assert len(parts) >= 2 * clients // SLICE_ROWS
    copy = PartitionState()
    steps = sum(1 for _ in copy.restore_steps(state.snapshot()))
    assert steps == 2 * -(-clients // SLICE_ROWS)
    assert copy.cursors == {}  # nothing has changed yet
    data = state.snapshot()
    for _ in copy.restore_steps(data):
        pass
    copy.restore(data)
    assert copy.contents() == state.contents()
    assert (copy.applied_index, copy.end_offset, copy.is_complete) == (77, 8, True)
    assert copy.snapshot() == data


@pytest.mark.parametrize("clients", [0, 3, 300])
def test_states_of_this_and_of_earlier_programs_read_each_other(clients: int) -> None:
    state = large_state(clients)
    earlier = msgspec.msgpack.encode(_SavedState(Index(77), Offset(8), is_complete=True, contents=state.contents()))
    copy = PartitionState()
    copy.restore(earlier)
    assert copy.contents() == state.contents()
    assert msgspec.msgpack.decode(state.snapshot(), type=_SavedState).contents == state.contents()
    entry = msgspec.msgpack.decode(b"".join(state.entry_steps()), type=StateSnapshotEntry)
    assert entry.contents == state.contents()
    sealed = join_snapshot_entry(state.entry_steps())
    seal_control_batch(sealed, timestamp=0)
    assert decode_entry(Batch.decode(sealed)) == entry


def test_damaged_state_is_reported_as_one_that_cannot_be_read() -> None:
    data = large_state(300).snapshot()
    with pytest.raises(UnknownVersionError):
        PartitionState().restore(data[:2_000] + b"\xc1" * 50 + data[2_050:])
    with pytest.raises(UnknownVersionError):
        PartitionState().restore(data[:-5])


def test_snapshot_is_of_the_moment_at_which_it_was_begun() -> None:
    state = large_state(2_000)
    before = state.contents()
    parts = state.snapshot_steps()
    taken = [next(parts)]
    state.producers.forget([ProducerId(1)])
    state.cursors[ConsumerId(1)] = Offset(5)
    taken += parts
    copy = PartitionState()
    copy.restore(b"".join(taken))
    assert copy.contents() == before


def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    """Run a small version of the soak of `benches/bench_clients.py`, with real commands and entries."""
    sizes: list[tuple[int, int]] = []

    async def test(replica: Replica) -> None:
        metadata = formed_state()
        metadata.counters = msgspec.structs.replace(metadata.counters, feature_level=LEVEL_MAX)
        replica.set_clients(metadata.view)
        for number in range(20):
            first = 1 + number * 100
            for _ in range(100):
                do(metadata, register_producer())
                do(metadata, register_consumer())
            view = metadata.view()
            for id_ in range(first, first + 100):
                await replica.append(batch(0, producer=id_), checked_index=view.index)
            await set_cursors(replica, range(first, first + 100))
            if number:
                kinds = (EntityKind.PRODUCER, EntityKind.CONSUMER)
                gone = [
                    SilentClient(kind, id_, view.last_seen_ms(kind, id_) or 0)
                    for id_ in range(first - 100, first)
                    for kind in kinds
                ]
                do(metadata, ExpireClients(now_ms=NOW_MS, clients=tuple(gone)))
            replica._maintenance.cleaner.is_scan_due = True
            await replica.maintain(0)
            view = metadata.view()
            assert len(view.producers) == len(view.consumers) == len(replica.state.cursors) == 100
            assert len(replica.state.producers) == 100
            sizes.append((len(view.encode()), len(replica.state.snapshot())))

    run(test)
    settled = sizes[5]  # before, numbers of fewer digits make it smaller
    assert max(size for size, _ in sizes[5:]) <= 1.05 * settled[0]
    assert max(size for _, size in sizes[5:]) <= 1.05 * settled[1]

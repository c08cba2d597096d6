"""Retention: records are trimmed to a state snapshot, equally on every replica, and the trim survives a restart."""

from __future__ import annotations

import asyncio

import pytest
from partition_harness import DIRECTORY, LARGE, PartitionHarness, batch, record, run, run_harness

from quiver.config import LogSettings, PartitionSettings
from quiver.errors import DiskFullError, FencedError, TrimmedError, UnavailableError
from quiver.model import Buffer, ConsumerId, Index, Offset, ProducerId, Term
from quiver.partition import PartitionState, Replica, RetentionPolicy
from quiver.partition.entries import StateSnapshotEntry, TrimEntry, TrimPoint, build_entry, decode_entry
from quiver.partition.maintenance import find_trim, is_snapshot_due
from quiver.partition.state import TRIM_POINTS_MAX
from quiver.raft import Role
from quiver.record import Batch, stamp
from quiver.storage import DiskSpace

ALICE, BOB = ConsumerId(1), ConsumerId(2)
SMALL = PartitionSettings(checkpoint_bytes=4096, summary_bytes=2048, retention_interval_ms=1_000)
SMALL_LOG = LogSettings(segment_bytes_max=2048, tail_cache_bytes_max=1000)


def state_with(*points: TrimPoint, end: int = 100, record_bytes: int = 1000) -> PartitionState:
    state = PartitionState()
    state.trim_points = list(points)
    state.end_offset, state.record_bytes = Offset(end), record_bytes
    state.applied_index = Index(200)
    return state


def trim_point(index: int, offset: int, record_bytes: int, newest_ms: int) -> TrimPoint:
    return TrimPoint(Index(index), Offset(offset), record_bytes, newest_ms)


TRIM_POINTS = (trim_point(10, 5, 100, 1_000), trim_point(20, 15, 400, 2_000), trim_point(30, 25, 700, 3_000))


# -- when records may go ---------------------------------------------------------------------------


def test_nothing_goes_without_a_bound() -> None:
    assert find_trim(state_with(*TRIM_POINTS), RetentionPolicy(), now_ms=1 << 50) is None


@pytest.mark.parametrize(("now_ms", "index"), [(1_500, None), (2_001, 10), (3_500, 20), (9_000, 30)])
def test_records_go_when_all_before_a_snapshot_are_too_old(now_ms: int, index: int | None) -> None:
    found = find_trim(state_with(*TRIM_POINTS), RetentionPolicy(age_ms=1_000), now_ms=now_ms)
    assert (found.index if found is not None else None) == index


@pytest.mark.parametrize(("size_bytes", "index"), [(901, None), (900, 10), (600, 20), (0, 30)])
def test_records_go_while_enough_bytes_stay(size_bytes: int, index: int | None) -> None:
    found = find_trim(state_with(*TRIM_POINTS), RetentionPolicy(size_bytes=size_bytes), now_ms=0)
    assert (found.index if found is not None else None) == index


def test_records_go_when_every_consumer_is_past_them() -> None:
    state = state_with(*TRIM_POINTS)
    both = RetentionPolicy(consumers=frozenset((ALICE, BOB)))
    state.cursors = {ALICE: Offset(40)}
    assert find_trim(state, both, now_ms=0) is None, "one without a cursor holds everything back"
    state.cursors[ConsumerId(99)] = Offset(50)
    assert find_trim(state, both, now_ms=0) is None, "there are as many cursors, but not theirs"
    state.cursors[BOB] = Offset(15)
    found = find_trim(state, both, now_ms=0)
    assert found is not None
    assert found.index == 20
    assert find_trim(state, RetentionPolicy(consumers=frozenset()), now_ms=0) is None, "nobody has read anything"


def test_any_bound_is_enough() -> None:
    retention = RetentionPolicy(age_ms=1_000, consumers=frozenset((ALICE,)))
    assert find_trim(state_with(*TRIM_POINTS), retention, now_ms=9_000) == TRIM_POINTS[2]


@pytest.mark.parametrize(("held", "index"), [(4, None), (5, 10), (14, 10), (15, 20), (99, 30)])
@pytest.mark.parametrize("kind", ["age", "size", "consumed"])
def test_held_records_stay_regardless_of_the_bounds(kind: str, held: int, index: int | None) -> None:
    state = state_with(*TRIM_POINTS)
    state.cursors = {ALICE: Offset(40)}
    retention = {
        "age": RetentionPolicy(age_ms=1, held_offset=Offset(held)),
        "size": RetentionPolicy(size_bytes=0, held_offset=Offset(held)),
        "consumed": RetentionPolicy(consumers=frozenset((ALICE,)), held_offset=Offset(held)),
    }[kind]
    found = find_trim(state, retention, now_ms=9_000)
    assert (found.index if found is not None else None) == index


def test_what_was_trimmed_is_not_trimmed_again() -> None:
    state = state_with(*TRIM_POINTS)
    state.trimmed_index = Index(30)
    assert find_trim(state, RetentionPolicy(size_bytes=0), now_ms=0) is None


def test_snapshot_is_due_by_bytes_by_entries_and_by_age() -> None:
    settings = PartitionSettings(summary_bytes=1 << 20, summary_entries=171)
    state = state_with(*TRIM_POINTS)
    assert not is_snapshot_due(state, RetentionPolicy(), settings, now_ms=1 << 50)
    assert is_snapshot_due(
        state_with(*TRIM_POINTS, record_bytes=700 + (1 << 20)), RetentionPolicy(), settings, now_ms=0
    )
    assert is_snapshot_due(state_with(TRIM_POINTS[0], record_bytes=100), RetentionPolicy(), settings, now_ms=0), (
        "190 entries"
    )
    assert not is_snapshot_due(state, RetentionPolicy(age_ms=8_000), settings, now_ms=3_999)
    assert is_snapshot_due(state, RetentionPolicy(age_ms=8_000), settings, now_ms=4_000)
    nothing_new = state_with(*TRIM_POINTS, record_bytes=700)
    assert not is_snapshot_due(nothing_new, RetentionPolicy(age_ms=8_000), settings, now_ms=1 << 50)


def test_small_bound_in_bytes_brings_snapshots_closer_together() -> None:
    settings, state = PartitionSettings(), state_with(record_bytes=10_000)
    assert not is_snapshot_due(state, RetentionPolicy(), settings, now_ms=0)
    assert is_snapshot_due(state, RetentionPolicy(size_bytes=80_000), settings, now_ms=0)


# -- snapshots and trims in the log ----------------------------------------------------------------


def entry(index: int, data: Buffer, *, offset: int) -> Batch:
    stamped = stamp(data, term=Term(1), index=Index(index), base_offset=Offset(offset), append_timestamp=5)
    return Batch.decode(stamped)


def test_blank_state_becomes_complete_by_a_snapshot() -> None:
    whole = PartitionState()
    whole.apply([entry(1, batch(0, count=3), offset=0)])
    whole.cursors[ALICE] = Offset(2)
    snapshot = entry(2, build_entry(StateSnapshotEntry(whole.contents())), offset=3)
    whole.apply([snapshot])
    late = PartitionState()
    late.restore(PartitionState.blank(Index(1), Offset(3)))
    assert not late.is_complete
    late.apply([snapshot])
    assert late.is_complete
    assert late.snapshot() == whole.snapshot()


def test_snapshot_of_the_own_state_only_adds_a_trim_point() -> None:
    state = PartitionState()
    state.apply([entry(1, batch(0, count=3), offset=0)])
    before = state.contents()
    state.apply([entry(2, build_entry(StateSnapshotEntry(before)), offset=3)])
    assert state.trim_points == [trim_point(2, 3, before.record_bytes, 5)]
    state.trim_points.clear()
    assert state.contents() == before


def test_marks_are_thinned_out_and_the_newest_stays() -> None:
    state = PartitionState()
    for index in range(1, 3 * TRIM_POINTS_MAX):
        state.apply([entry(index, build_entry(StateSnapshotEntry(state.contents())), offset=0)])
    assert len(state.trim_points) <= TRIM_POINTS_MAX
    assert state.trim_points[-1].index == 3 * TRIM_POINTS_MAX - 1
    assert [found.index for found in state.trim_points] == sorted(found.index for found in state.trim_points)


def test_older_trim_does_not_bring_records_back() -> None:
    state = state_with(*TRIM_POINTS)
    state.apply([entry(201, build_entry(TrimEntry(Index(20), Offset(15))), offset=100)])
    state.apply([entry(202, build_entry(TrimEntry(Index(10), Offset(5))), offset=100)])
    assert (state.first_offset, state.trimmed_index) == (15, 20)
    assert [found.index for found in state.trim_points] == [20, 30]


async def fill(replica: Replica, count: int) -> None:
    start = replica.high_watermark
    for number in range(start, start + count):
        await replica.append(batch(number, value=b"%06d" % number * 10))


def test_old_records_are_trimmed_and_reads_below_are_refused() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings, partition.log_settings = SMALL, SMALL_LOG
        async with partition.open_replica() as replica:
            await replica.move_cursors([(ALICE, Offset(0))])
            replica.set_retention(RetentionPolicy(size_bytes=4096))
            for _ in range(10):
                await fill(replica, 20)
                await replica.maintain(partition.clock.wall_ms())
            await replica.maintain(partition.clock.wall_ms())
            first = replica.first_offset
            assert 0 < first < 200
            assert 0 < replica.member.log.first_offset <= first
            kept_bytes = replica.member.log.status().size_bytes
            assert kept_bytes < 4096 + 4 * 4096, "what is kept, a snapshot's distance, and a segment"
            with pytest.raises(TrimmedError):
                await replica.fetch(Offset(0), bytes_max=LARGE)
            with pytest.raises(TrimmedError):
                await replica.consume(ALICE, offset=Offset(first - 1), bytes_max=LARGE)
            assert await replica.find_offset("earliest") == first
            assert await replica.find_offset(0) == first
            assert (await replica.get_cursors([ALICE])).cursors == (first,)
            consumed = await replica.consume(ALICE, bytes_max=LARGE)
            assert (consumed.first_offset, consumed.cursor) == (first, first + 1), "the cursor moves up to the start"
            assert (await replica.append(batch(199, value=b"%06d" % 199 * 10))).is_duplicate

    run_harness(test)


class MetadataThatLags:
    """A source of policies: a hold is known only once the metadata is confirmed, if it can be."""

    def __init__(self, *, is_reachable: bool, held_offset: int) -> None:
        self.is_reachable = is_reachable
        self.held_offset = held_offset
        self._is_confirmed = False

    async def confirm(self) -> None:
        await asyncio.sleep(0.1)
        if not self.is_reachable:
            raise UnavailableError("not done: there is no primary")
        self._is_confirmed = True

    def policy(self) -> RetentionPolicy:
        assert self._is_confirmed
        return RetentionPolicy(size_bytes=4096, held_offset=Offset(self.held_offset))


@pytest.mark.parametrize(
    ("is_reachable", "held_offset", "trims"), [(False, 500, False), (True, 0, False), (True, 500, True)]
)
def test_nothing_is_trimmed_by_metadata_that_may_not_know_a_hold(
    *, is_reachable: bool, held_offset: int, trims: bool
) -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings, partition.log_settings = SMALL, SMALL_LOG
        async with partition.open_replica() as replica:
            replica.set_retention(RetentionPolicy(size_bytes=4096))  # as a leader knows it that lags behind
            replica.set_policy_source(MetadataThatLags(is_reachable=is_reachable, held_offset=held_offset))
            for _ in range(10):
                await fill(replica, 20)
                await replica.maintain(partition.clock.wall_ms())
            assert bool(replica.first_offset) is trims

    run_harness(test)


class PrimaryThatNeverAnswers(MetadataThatLags):
    """A source of policies that confirms nothing, and waits."""

    async def confirm(self) -> None:
        await asyncio.get_running_loop().create_future()


def test_replica_closes_although_nobody_confirms_its_policy() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings, partition.log_settings = SMALL, SMALL_LOG
        async with partition.open_replica() as replica:
            replica.set_policy_source(PrimaryThatNeverAnswers(is_reachable=False, held_offset=0))
            replica.set_retention(RetentionPolicy(size_bytes=0))
            await fill(replica, 200)
            working = asyncio.ensure_future(replica.run(partition.clock))
            await asyncio.sleep(1.5)
            async with asyncio.timeout(10):
                await replica.close()
                await working
            assert not replica.first_offset

    run_harness(test)


def test_first_offset_is_told_after_a_trim_that_is_already_proposed() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings, partition.log_settings = SMALL, SMALL_LOG
        async with partition.open_replica() as replica:
            await fill(replica, 200)
            replica.set_retention(RetentionPolicy(size_bytes=4096))
            await replica.maintain(partition.clock.wall_ms())  # at most a state snapshot and its trim
            replica.set_retention(RetentionPolicy(size_bytes=0))
            maintaining = asyncio.ensure_future(replica.maintain(partition.clock.wall_ms()))
            while not replica._maintenance.is_trimming:  # noqa: ASYNC110 - it looks in every turn
                await asyncio.sleep(0)
            told = await replica.find_offset("earliest")
            await maintaining
            assert told == replica.first_offset > 0

    run_harness(test)


def test_idle_partition_is_trimmed_by_age() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = SMALL
        async with partition.open_replica() as replica:
            replica.set_retention(RetentionPolicy(age_ms=60_000))
            working = asyncio.ensure_future(replica.run(partition.clock))
            await fill(replica, 10)
            await asyncio.sleep(50)
            assert replica.first_offset == 0
            await asyncio.sleep(20)
            assert replica.first_offset == 10
            await replica.close()
            await working

    run_harness(test)


def test_restart_without_a_checkpoint_replays_from_the_logs_start_to_the_same_state() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(summary_bytes=2048)
        partition.log_settings = SMALL_LOG
        async with partition.open_replica() as replica:
            replica.set_retention(RetentionPolicy(size_bytes=4096))
            for _ in range(8):
                await fill(replica, 20)
                await replica.move_cursors([(ALICE, replica.high_watermark)])
                await replica.maintain(partition.clock.wall_ms())
            await replica.maintain(partition.clock.wall_ms())
            before = replica.state.contents()
            assert before.first_offset > 0
        partition.disk.remove(f"{DIRECTORY}/checkpoint")
        async with partition.open_replica() as replica:
            assert replica.state.is_complete
            assert replica.state.contents() == before
            assert (await replica.append(batch(159, value=b"%06d" % 159 * 10))).is_duplicate

    run_harness(test)


def test_clean_close_leaves_nothing_to_replay() -> None:
    async def test(partition: PartitionHarness) -> None:
        async with partition.open_replica() as replica:
            await fill(replica, 50)
            await replica.begin_epoch(ProducerId(3), 4)
            applied, before = replica.member.applied_index, replica.state.contents()
            await replica.close()
            await replica.close()
        async with partition.open_replica() as replica:
            assert partition.opened_index == applied
            assert replica.state.contents() == before
            with pytest.raises(FencedError):
                await replica.append(batch(50))

    run_harness(test)


def test_checkpoint_is_saved_after_checkpoint_bytes() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = SMALL
        async with partition.open_replica() as replica:
            working = asyncio.ensure_future(replica.run(partition.clock))
            await fill(replica, 10)
            await asyncio.sleep(0.5)
            assert not partition.disk.exists(f"{DIRECTORY}/checkpoint")
            await fill(replica, 40)
            await asyncio.sleep(0.5)
            assert partition.disk.exists(f"{DIRECTORY}/checkpoint")
            await replica.close()
            await working

    run_harness(test)


def test_snapshot_holds_exactly_what_was_proposed_before_it() -> None:
    async def test(partition: PartitionHarness) -> None:
        partition.settings = PartitionSettings(summary_bytes=1024)
        async with partition.open_replica() as replica:
            await fill(replica, 20)
            calls = [asyncio.ensure_future(replica.append(batch(20 + number))) for number in range(5)]
            calls += [asyncio.ensure_future(replica.append(record(b"x" * 500))) for _ in range(5)]
            await asyncio.sleep(0)
            moving = asyncio.ensure_future(replica.move_cursors([(ALICE, Offset(3))]))
            tending = asyncio.ensure_future(replica.maintain(partition.clock.wall_ms()))
            await asyncio.sleep(0)
            later = asyncio.ensure_future(replica.append(batch(25)))
            await asyncio.gather(*calls, moving, tending, later)
            log = replica.member.log
            entries = await log.read_entries(Index(1), end_index=log.end_index, bytes_max=LARGE)
            replayed, snapshots = PartitionState(), 0
            for found in entries:
                if found.header.is_control and isinstance(snapshot := decode_entry(found), StateSnapshotEntry):
                    assert replayed.contents() == snapshot.contents
                    snapshots += 1
                replayed.apply([found])
            assert snapshots == 1
            assert replayed.snapshot() == replica.state.snapshot()

    run_harness(test)


# -- status and room -------------------------------------------------------------------------------


def test_status_describes_the_replica() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b"))
        await replica.move_cursors([(ALICE, Offset(1))])
        status = replica.status(now_ms=0)
        assert (status.role, status.leader, status.is_ready) == (Role.LEADER, 1, True)
        assert (status.first_offset, status.end_offset, status.consumers) == (0, 2, 1)
        assert status.in_sync == status.voters == (1,)
        assert status.size_bytes > 0

    run(test)


def test_nearly_full_disk_refuses_records_only() -> None:
    async def test(partition: PartitionHarness) -> None:
        settings = LogSettings(free_bytes_min=10_000)
        partition.space = DiskSpace(partition.disk, DIRECTORY, executor=partition.executor, settings=settings)
        async with partition.open_replica() as replica:
            await partition.space.refresh()
            await replica.append(batch(0))
            partition.disk.limit_space(12_000)
            await partition.space.refresh()
            await replica.append(batch(1, value=b"x" * 1500))
            assert not partition.space.is_full
            with pytest.raises(DiskFullError):
                await replica.append(batch(2, value=b"x" * 1500))
            assert partition.space.is_full
            await partition.space.refresh()
            assert partition.space.is_full, "it has not clearly room again"
            assert (await replica.append(batch(1, value=b"x" * 1500))).is_duplicate
            await replica.move_cursors([(ALICE, Offset(1))])
            assert (await replica.consume(ALICE, bytes_max=LARGE)).cursor == 2
            assert replica.high_watermark == 2
            partition.disk.limit_space(5_000)
            await partition.space.refresh()
            assert partition.space.is_full
            partition.disk.limit_space(None)
            await partition.space.refresh()
            assert not partition.space.is_full
            assert (await replica.append(batch(2))).base_offset == 2

    run_harness(test)

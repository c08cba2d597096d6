"""A full disk: a log waits for room and continues; what did not fit was never durable and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno

import msgspec
import pytest
from log_world import (
    DIRECTORY,
    TINY,
    InlineExecutor,
    all_values,
    append,
    next_batches,
    open_log,
    wait_durable,
)
from test_log import VALUES, runs

from quiver.config import LogSettings
from quiver.errors import DiskFullError, LogClosedError, LogFailedError, StorageError
from quiver.model import Index, Offset, Term
from quiver.storage import DiskSpace, HardStateFile, Log, SnapshotStore, StoredHardState, StoredSnapshot, writer
from quiver.storage.sealing import LogCipher
from quiver.testing import SimulatedDisk
from quiver.testing.disk_faults import DiskOperation

BIG = b"too much" * 40


@pytest.fixture(autouse=True)
def _retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ROOM_RETRY_S", 0.002)


async def hold(log: Log, disk: SimulatedDisk, room_bytes: int, *values: bytes) -> None:
    """Append more than fits, and wait until the log waits for room."""
    disk.limit_space(room_bytes)
    log.append(next_batches(log, *values))
    while not log.is_out_of_space:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


@runs
async def test_log_waits_for_room_and_continues() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:10])
    durable = log.durable_end_index
    await hold(log, disk, 50, BIG)
    log.append(next_batches(log, b"meanwhile"))
    await asyncio.sleep(0.02)
    assert log.durable_end_index == durable, "what is not stored is not reported"
    assert log.status().failure is None
    disk.limit_space(None)
    await wait_durable(log, log.end_index)
    assert not log.is_out_of_space
    expected = [*VALUES[:10], BIG, b"meanwhile"]
    assert await all_values(log) == expected
    disk.crash()
    assert await all_values(open_log(disk)) == expected


@pytest.mark.parametrize("room_bytes", range(0, 2600, 97))
@runs
async def test_flush_over_several_segments_continues_where_it_did_not_fit(room_bytes: int) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:3])
    await hold(log, disk, room_bytes, *VALUES[3:])
    disk.limit_space(400)
    await asyncio.sleep(0.005)
    disk.limit_space(None)
    await wait_durable(log, log.end_index)
    await append(log, b"after")
    assert await all_values(log) == [*VALUES, b"after"]
    await log.close()
    assert await all_values(open_log(disk)) == [*VALUES, b"after"]


@pytest.mark.parametrize("room_bytes", range(0, 2600, 500))
@runs
async def test_encrypted_entries_that_did_not_fit_are_encrypted_once(room_bytes: int) -> None:
    disk, cipher = SimulatedDisk(), LogCipher(b"k" * 32)
    log = open_log(disk, cipher=cipher)
    await hold(log, disk, room_bytes, *VALUES)
    disk.limit_space(None)
    await wait_durable(log, log.end_index)
    await log.close()
    assert await all_values(open_log(disk, cipher=cipher)) == VALUES


@pytest.mark.parametrize("room_bytes", range(0, 1500, 250))
@runs
async def test_power_loss_while_the_log_waits_loses_nothing_durable(room_bytes: int) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:10])
    await hold(log, disk, room_bytes, *VALUES[10:])
    disk.crash()
    disk.limit_space(None)
    log = open_log(disk)
    found = await all_values(log)
    assert found == VALUES[: len(found)]
    assert len(found) >= 10
    await append(log, b"room again")
    assert await all_values(log) == [*found, b"room again"]


@runs
async def test_bytes_that_did_not_fit_are_given_back() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:3])
    await hold(log, disk, 100, BIG)
    assert disk.free_bytes(DIRECTORY) == 100, "votes and snapshots may need them"
    disk.limit_space(None)
    await wait_durable(log, log.end_index)


@runs
async def test_log_that_waits_is_closed_without_what_did_not_fit() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:10])
    await hold(log, disk, 50, BIG)
    log.append(next_batches(log, b"meanwhile"))
    await log.close()
    with pytest.raises(LogClosedError):
        log.append(next_batches(log, b"more"))
    disk.limit_space(None)
    log = open_log(disk)
    assert await all_values(log) == VALUES[:10]
    await append(log, b"room again")
    assert await all_values(log) == [*VALUES[:10], b"room again"]


@runs
async def test_old_segments_are_removed_while_the_log_waits_and_make_room() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    assert log.status().segments > 2
    await hold(log, disk, 10, BIG)
    await log.truncate_prefix(log.end_index)
    await wait_durable(log, log.end_index)
    assert (await all_values(log))[-1] == BIG
    found = await all_values(log)
    disk.limit_space(None)
    await log.close()
    assert await all_values(open_log(disk)) == found


@runs
async def test_log_that_waits_is_replaced_without_what_did_not_fit() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    await hold(log, disk, 200, BIG)
    await log.reset(first_index=Index(100), first_offset=Offset(90), previous_term=Term(1))
    await append(log, b"after the snapshot")
    assert await all_values(log) == [b"after the snapshot"]
    disk.crash()
    assert await all_values(open_log(disk)) == [b"after the snapshot"]


@runs
async def test_entries_that_are_truncated_while_the_log_waits_are_not_reported() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES[:5])
    reported: list[Index] = []
    log.on_durable = reported.append
    await hold(log, disk, 50, BIG, BIG)
    log.truncate_suffix(Index(6))
    log.append(next_batches(log, b"instead", term=2))
    disk.limit_space(None)
    await wait_durable(log, Index(7))
    assert reported == [7]
    assert await all_values(log) == [*VALUES[:5], b"instead"]


@runs
async def test_sync_that_fails_for_want_of_room_is_final() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"kept")
    disk.fail("sync", nth=1, error=errno.ENOSPC)
    log.append(next_batches(log, b"lost"))
    with pytest.raises(LogFailedError):
        await wait_durable(log, log.end_index)


@runs
async def test_sync_by_interval_that_fails_for_want_of_room_is_final() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings(durability="interval", flush_interval_ms=1))
    failed: asyncio.Future[StorageError] = asyncio.get_running_loop().create_future()
    log.on_failure = failed.set_result
    disk.fail("sync", error=errno.ENOSPC)
    await append(log, b"acknowledged, but dropped by the kernel")
    assert isinstance(await asyncio.wait_for(failed, 5), LogFailedError)


@runs
async def test_removal_without_room_waits_beside_the_entries_that_wait() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    await hold(log, disk, 10, BIG)
    disk.fail("remove", error=errno.EDQUOT)  # as ZFS answers at a quota
    removal = asyncio.ensure_future(log.truncate_prefix(log.end_index))
    await asyncio.sleep(0.01)
    disk.limit_space(None)
    await asyncio.wait_for(removal, 5)
    await append(log, b"after")
    disk.crash()
    assert (await all_values(open_log(disk)))[-2:] == [BIG, b"after"]


@pytest.mark.parametrize("operation", ["remove", "sync_directory"])
@runs
async def test_removal_continues_after_the_segments_that_were_removed(operation: DiskOperation) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    disk.fail(operation, nth=2, error=errno.EDQUOT)
    await asyncio.wait_for(log.truncate_prefix(log.end_index), 5)
    await append(log, b"after")
    assert log.status().segments <= 2


@pytest.mark.parametrize("operation", ["sync_directory", "truncate"])
@runs
async def test_truncation_continues_after_the_segments_that_were_removed(operation: DiskOperation) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, *VALUES)
    disk.fail(operation, error=errno.EDQUOT)
    log.truncate_suffix(Index(3))
    await append(log, b"instead")
    assert await all_values(log) == [*VALUES[:2], b"instead"]


@runs
async def test_sync_that_is_due_comes_after_the_replacement_of_a_log_that_waits() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, msgspec.structs.replace(TINY, durability="interval", flush_interval_ms=1))
    await append(log, *VALUES[:3])
    await hold(log, disk, 50, BIG)
    await asyncio.sleep(0.01)  # the sync of the first entries is due, and waits
    disk.limit_space(200)
    await log.reset(first_index=Index(100), first_offset=Offset(90), previous_term=Term(1))
    await append(log, b"after the snapshot")
    assert await all_values(log) == [b"after the snapshot"]


def test_snapshot_that_does_not_fit_leaves_nothing() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/s")
    store = SnapshotStore(disk, "/s")
    disk.limit_space(100)
    snapshot = StoredSnapshot(last_index=Index(1), last_term=Term(1), end_offset=Offset(0), state=b"x" * 200)
    with pytest.raises(OSError, match="No space"):
        store.save(snapshot)
    assert disk.free_bytes("/s") == 100
    disk.limit_space(None)
    store.save(snapshot)
    assert store.load_newest() == (snapshot, ())


def test_hard_state_of_an_old_member_needs_no_room() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/h")
    file = HardStateFile(disk, "/h")
    file.save(StoredHardState(term=Term(1)))
    disk.limit_space(0)
    file.save(StoredHardState(term=Term(2)))
    assert HardStateFile(disk, "/h").load() == StoredHardState(term=Term(2))


async def make_space(disk: SimulatedDisk, free_bytes: int, *, free_bytes_min: int) -> DiskSpace:
    disk.make_directory("/d")
    disk.limit_space(free_bytes)
    space = DiskSpace(disk, "/d", executor=InlineExecutor(), settings=LogSettings(free_bytes_min=free_bytes_min))
    await space.refresh()
    return space


@runs
async def test_reserve_is_used_up_in_steps() -> None:
    space = await make_space(SimulatedDisk(), 1_010, free_bytes_min=1_000)
    space.admit(10)
    with pytest.raises(DiskFullError, match="not done"):
        space.admit(1)
    assert space.is_full
    assert space.take(500, is_control=False), "a follower stores what a leader has taken"
    assert not space.take(1, is_control=False)
    assert space.take(250, is_control=True)
    assert not space.take(1, is_control=True)
    with pytest.raises(DiskFullError, match="not done"):
        space.check_control(1)
    assert space.refused_appends == 2


@runs
async def test_disk_without_a_reserve_is_full_until_what_was_refused_would_fit() -> None:
    disk = SimulatedDisk()
    space = await make_space(disk, 88, free_bytes_min=0)
    assert not space.is_full
    with pytest.raises(DiskFullError, match="not done"):
        space.check_control(100)
    await space.refresh()
    assert space.is_full, "leadership is transferred at the next check"
    disk.limit_space(100)
    await space.refresh()
    assert not space.is_full


@runs
async def test_nothing_is_taken_while_a_write_waits_for_room() -> None:
    space = await make_space(SimulatedDisk(), 1_000_000, free_bytes_min=0)
    space.begin_stall()
    assert space.is_full
    assert not space.take(1, is_control=True)
    with pytest.raises(DiskFullError, match="not done"):
        space.admit(1)
    space.end_stall()
    assert space.take(1, is_control=False)
    assert space.stalls == 1

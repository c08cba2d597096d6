"""A disk that fails: nothing acknowledged is lost, nothing is retried, and the log says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from log_world import DIRECTORY, TINY, SteppingExecutor, all_values, append, next_batches, open_log, wait_durable
from test_log import VALUES, runs

from quiver.config import LogSettings
from quiver.errors import LogClosedError, LogFailedError, RequestError, StorageError
from quiver.model import Index, Offset, Term
from quiver.storage import HardStateFile, Log, SnapshotStore, StoredHardState, StoredSnapshot
from quiver.storage.hardstate import MEMBERSHIP_BYTES_MAX
from quiver.testing import SimulatedDisk
from quiver.testing.disk_faults import DiskOperation


@pytest.mark.parametrize("operation", ["write", "sync"])
@runs
async def test_failed_write_or_sync_closes_the_log_for_good(operation: DiskOperation) -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    failures: list[StorageError] = []
    log.on_failure = failures.append
    await append(log, b"kept", b"kept too")
    disk.fail(operation, nth=1)
    log.append(next_batches(log, b"lost"))
    with pytest.raises(LogFailedError) as raised:
        await wait_durable(log, Index(4))
    assert raised.value.outcome == "unknown"
    assert len(failures) == 1
    assert await all_values(log) == [b"kept", b"kept too"]
    assert (log.end_index, log.durable_end_index, log.end_offset) == (3, 3, 2)
    operations = disk.operation_count
    with pytest.raises(LogClosedError):
        log.append(next_batches(log, b"more"))
    with pytest.raises(LogFailedError):
        await wait_durable(log, Index(4))
    with pytest.raises(LogClosedError):
        await log.truncate_prefix(Index(3)) if log.status().segments > 1 else log.truncate_suffix(Index(1))
    await log.close()
    assert disk.operation_count == operations, "nothing is written or synced after a failure"
    assert log.status().failure
    disk.crash()
    assert await all_values(open_log(disk, LogSettings())) == [b"kept", b"kept too"]


@runs
async def test_cut_whose_place_cannot_be_read_changes_nothing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings(tail_cache_bytes_max=0))
    await append(log, b"one", b"two", b"three")
    disk.fail("read", nth=1)
    with pytest.raises(StorageError, match="entry 2 cannot be read"):
        log.truncate_suffix(Index(2))
    assert (log.end_index, log.end_offset) == (4, 3)
    assert await all_values(log) == [b"one", b"two", b"three"]


@runs
async def test_short_writes_are_completed() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    disk.shorten(37, nth=1)
    disk.shorten(11, nth=2)
    await append(log, b"a" * 100, b"b" * 100)
    assert disk.faults.total() >= 2
    await log.close()
    assert await all_values(open_log(disk, LogSettings())) == [b"a" * 100, b"b" * 100]


@runs
async def test_jobs_that_wait_when_the_log_fails_are_told() -> None:
    disk = SimulatedDisk()
    executor = SteppingExecutor()
    log = open_log(disk, TINY, executor=executor)
    log.append(next_batches(log, *VALUES))
    await executor.step()
    log.append(next_batches(log, b"fails"))
    await asyncio.sleep(0)
    removing = asyncio.ensure_future(log.truncate_prefix(Index(20)))
    closing = asyncio.ensure_future(log.close())
    await asyncio.sleep(0)
    disk.fail("sync", nth=1)
    await executor.step()
    with pytest.raises(LogFailedError):
        await removing
    await closing


async def _trim(log: Log) -> None:
    await log.truncate_prefix(Index(20))


async def _trim_all(log: Log) -> None:
    await log.truncate_prefix(log.end_index)


async def _cut(log: Log) -> None:
    log.truncate_suffix(Index(3))
    log.append(next_batches(log, b"x", term=2))
    await wait_durable(log, Index(4))


async def _reset(log: Log) -> None:
    await log.reset(first_index=Index(99), first_offset=Offset(99), previous_term=Term(1))


@pytest.mark.parametrize("job", [_trim, _trim_all, _cut, _reset])
@runs
async def test_failed_removal_closes_the_log(job: Callable[[Log], Awaitable[None]]) -> None:
    disk = SimulatedDisk()
    log = open_log(disk, TINY)
    await append(log, *VALUES)
    disk.fail("sync_directory", nth=1)
    with pytest.raises(StorageError):
        await job(log)
    assert log.status().failure


@runs
async def test_interval_sync_that_fails_closes_the_log() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings(durability="interval", flush_interval_ms=1))
    await append(log, b"a")
    disk.fail("sync", nth=1)
    await asyncio.sleep(0.02)
    assert log.status().failure
    with pytest.raises(LogClosedError):
        log.append(next_batches(log, b"b"))


@runs
async def test_unreadable_file_is_a_storage_error() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings(tail_cache_bytes_max=0))
    await append(log, b"a")
    disk.fail("read", nth=1)
    with pytest.raises(StorageError, match="cannot read the log"):
        await log.read_entries(Index(1), end_index=Index(2), bytes_max=1)
    disk.fail("read", nth=1)
    with pytest.raises(StorageError, match="cannot open"):
        open_log(disk)


@runs
async def test_a_clean_stop_with_a_failing_disk_is_quiet() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    disk.fail("sync", nth=1)  # of the mark that a clean stop leaves
    await log.close()
    assert log.status().failure
    assert await all_values(open_log(disk, LogSettings())) == [b"a"]


def test_hard_state_is_none_before_the_first_save_and_kept_after() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    file = HardStateFile(disk, DIRECTORY)
    assert file.load() is None
    for term in range(1, 5):
        file.save(StoredHardState(term=Term(term), membership=bytes(term)))
    assert HardStateFile(disk, DIRECTORY).load() == StoredHardState(term=Term(4), membership=bytes(4))
    with pytest.raises(RequestError):
        file.save(StoredHardState(membership=bytes(MEMBERSHIP_BYTES_MAX + 1)))


def test_hard_state_that_was_never_saved_whole_is_none() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    for content in (b"", b"torn", bytes(4096), b"x" * 4096 + bytes(4096)):
        disk.write_file(f"{DIRECTORY}/hardstate", content)
        assert HardStateFile(disk, DIRECTORY).load() is None


def test_snapshots_keep_the_newest_two() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    store = SnapshotStore(disk, DIRECTORY)
    assert store.load_newest() == (None, ())
    for index in (3, 7, 20, 11):
        store.save(
            StoredSnapshot(last_index=Index(index), last_term=Term(1), end_offset=Offset(1), state=b"%d" % index)
        )
    assert store.names() == ["snapshot-00000000000000000011", "snapshot-00000000000000000020"]
    snapshot, warnings = store.load_newest()
    assert snapshot is not None
    assert (snapshot.state, warnings) == (b"20", ())


def test_snapshot_save_goes_on_after_an_interrupted_one() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    store = SnapshotStore(disk, DIRECTORY)
    snapshot = StoredSnapshot(last_index=Index(3), last_term=Term(1), end_offset=Offset(1), state=b"three")
    disk.fail("sync", nth=1)
    with pytest.raises(OSError, match="error"):
        store.save(snapshot)
    store.save(snapshot)
    assert store.load_newest()[0] == snapshot


def test_snapshot_of_another_version_is_not_taken() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    store = SnapshotStore(disk, DIRECTORY)
    store.save(StoredSnapshot(last_index=Index(3), last_term=Term(1), end_offset=Offset(1), state=b"three"))
    path = f"{DIRECTORY}/{store.names()[0]}"
    disk.write_file(path, disk.read_file(path)[:20])
    with pytest.raises(StorageError, match="too few"):
        store.load_newest()


def test_the_oldest_intact_snapshot_that_reaches_an_index_is_found() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    store = SnapshotStore(disk, DIRECTORY)
    for index in (3, 7):
        store.save(
            StoredSnapshot(last_index=Index(index), last_term=Term(1), end_offset=Offset(1), state=b"%d" % index)
        )

    def found(index: int) -> bytes | None:
        snapshot = store.load_from(Index(index))
        return snapshot.state if snapshot else None

    assert [found(index) for index in (1, 3, 4, 7, 8)] == [b"3", b"3", b"7", b"7", None]
    disk.write_file(f"{DIRECTORY}/{store.names()[0]}", b"rotten")
    assert found(1) == b"7"

"""The real side of the seams: files of the operating system, and threads."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from log_world import TINY, FixedClock, all_entries, all_values, append, next_batches, wait_durable
from test_log import VALUES, runs

from quiver.config import LogSettings
from quiver.errors import StorageError
from quiver.model import Buffer, Index
from quiver.storage import Log, SystemDisk, ThreadExecutor
from quiver.storage.disk import IOV_MAX, READ_AHEAD_BYTES_MIN, SystemFile
from quiver.storage.flush import write_all


def test_a_file_is_made_written_read_cut_and_closed(tmp_path: Path) -> None:
    disk, path = SystemDisk(), str(tmp_path / "file")
    file = disk.open(path, create=True)
    assert file.write([b"abc", bytearray(b"def"), memoryview(b"gh")], 0) == 8
    file.sync()
    assert file.size() == 8
    assert file.read(4, 2) == b"cdef"
    assert file.read(100, 6) == b"gh", "fewer only at the end of the file"
    assert file.read(5, 8) == b""
    file.truncate(3)
    assert file.read(100, 0) == b"abc"
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        file.size()
    with pytest.raises(FileExistsError):
        disk.open(path, create=True)
    with pytest.raises(FileNotFoundError):
        disk.open(path + "x")


def test_names_are_listed_moved_and_removed(tmp_path: Path) -> None:
    disk, folder = SystemDisk(), f"{tmp_path}/a/b"
    disk.make_directory(folder)
    disk.make_directory(folder)
    for name in ("two", "one"):
        disk.open(f"{folder}/{name}", create=True).close()
    assert disk.names(folder) == ["one", "two"]
    disk.rename(f"{folder}/one", f"{folder}/two")
    disk.sync_directory(folder)
    assert disk.names(folder) == ["two"]
    disk.remove(f"{folder}/two")
    assert not disk.exists(f"{folder}/two")
    assert disk.exists(folder)
    with pytest.raises(NotADirectoryError):
        disk.sync_directory(__file__)


def test_a_read_that_the_system_cuts_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SystemDisk().open(str(tmp_path / "file"), create=True)
    write_all(file, [bytes(range(200))], 0)
    whole_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, position: whole_pread(fd, min(length, 7), position))
    assert file.read(50, 3) == bytes(range(3, 53))
    assert file.read(50, 190) == bytes(range(190, 200))
    file.close()


def test_more_buffers_than_the_system_takes_at_once_are_all_written(tmp_path: Path) -> None:
    file = SystemDisk().open(str(tmp_path / "file"), create=True)
    buffers = [b"%06d" % n for n in range(2 * IOV_MAX + 5)]
    with pytest.raises(OSError, match="Invalid argument"):
        file.write(buffers, 0)
    write_all(file, buffers, 10)
    assert file.read(10_000_000, 10) == b"".join(buffers)
    file.close()


def test_large_reads_at_the_end_and_behind_it_are_like_small_ones(tmp_path: Path) -> None:
    file = SystemDisk().open(str(tmp_path / "file"), create=True)
    content = bytes(range(256)) * 2048
    write_all(file, [content], 0)
    assert file.read(READ_AHEAD_BYTES_MIN, 0) == content[:READ_AHEAD_BYTES_MIN]
    assert file.read(10 * READ_AHEAD_BYTES_MIN, 100) == content[100:]
    assert file.read(READ_AHEAD_BYTES_MIN, len(content) + 5) == b""
    file.close()


class ShortFile(SystemFile):
    """Write at most seven bytes at a time."""

    def write(self, buffers: object, position: int) -> int:
        taken = b"".join(buffers)[:7]  # type: ignore[arg-type]  # buffers, as the seam says
        return super().write([taken], position)


def test_short_writes_go_on_where_they_stopped(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file = ShortFile(descriptor)
    buffers: list[Buffer] = [b"one", b"", bytearray(b"twenty-two"), memoryview(b"3" * 20), b"four"]
    write_all(file, buffers, 5)
    assert file.read(100, 5) == b"".join(buffers)
    file.close()


@runs
async def test_work_runs_in_threads_and_its_outcome_in_the_loop() -> None:
    executor = ThreadExecutor()
    assert await executor.submit(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await executor.submit(lambda: 1 // 0)
    for work in (lambda: 1, lambda: 1 // 0):
        executor.submit(work).cancel()  # it is done all the same, and nobody is told
    assert await executor.submit(lambda: 2) == 2
    await asyncio.sleep(0)
    executor.close()
    executor.close()


def test_work_that_outlives_its_loop_ends_quietly() -> None:
    executor, may_end = ThreadExecutor(), threading.Event()

    async def leave_work_behind() -> None:
        executor.submit(may_end.wait)

    asyncio.run(leave_work_behind())
    may_end.set()
    executor.close()


def open_real(path: Path, executor: ThreadExecutor, settings: LogSettings = TINY) -> Log:
    return Log.open(
        str(path / "deep" / "log"), disk=SystemDisk(), executor=executor, clock=FixedClock(), settings=settings
    )


@runs
async def test_a_log_on_a_real_disk_keeps_everything_over_restarts(tmp_path: Path) -> None:
    executor = ThreadExecutor()
    log = open_real(tmp_path, executor)
    async with asyncio.TaskGroup() as tasks:
        for value in VALUES:
            log.append(next_batches(log, value))
            tasks.create_task(wait_durable(log, log.end_index))
    assert await all_values(log) == VALUES
    log.truncate_suffix(Index(35))
    await append(log, b"instead", term=2)
    await log.close()
    log = open_real(tmp_path, executor)
    assert await all_values(log) == [*VALUES[:34], b"instead"]
    await log.truncate_prefix(Index(20))
    entries = [bytes(entry.data) for entry in await all_entries(log)]
    await log.reset(first_index=Index(9), first_offset=log.first_offset, previous_term=log.last_term)
    await append(log, b"new", term=3)
    await log.close()
    log = open_real(tmp_path, executor)
    assert await all_values(log) == [b"new"]
    assert entries
    await log.close()
    executor.close()


def test_a_directory_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    executor = ThreadExecutor()
    (tmp_path / "deep").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot open"):
        open_real(tmp_path, executor)
    executor.close()


def test_free_bytes_are_told(tmp_path: Path) -> None:
    assert SystemDisk().free_bytes(str(tmp_path)) > 0
    with pytest.raises(FileNotFoundError):
        SystemDisk().free_bytes(str(tmp_path / "missing"))

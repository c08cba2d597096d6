"""The simulated disk keeps the seam's promises, and nothing beyond them."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from quiver.storage.disk import IOV_MAX, Disk, File
from quiver.testing import PowerLoss, SimulatedDisk


def make_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory("/data")
    disk.sync_all()
    return disk


def synced_file(disk: SimulatedDisk, path: str, data: bytes) -> File:
    file = disk.open(path, create=True)
    file.write([data], 0)
    file.sync()
    disk.sync_directory("/data")
    return file


def test_disk_and_file_implement_the_seams() -> None:
    disk: Disk = make_disk()
    file: File = disk.open("/data/log", create=True)
    assert file.write([b"ab", bytearray(b"cd"), memoryview(b"ef")], 0) == 6
    assert file.size() == 6
    assert file.read(10, 2) == b"cdef"
    assert file.read(3, 1) == b"bcd"
    assert file.read(3, 6) == b""


def test_write_beyond_the_end_fills_the_gap_with_zeros() -> None:
    file = make_disk().open("/data/log", create=True)
    file.write([b"xy"], 4)
    assert file.read(6, 0) == b"\0\0\0\0xy"


def test_write_does_not_keep_a_reference_to_the_callers_buffer() -> None:
    disk = make_disk()
    buffer = bytearray(b"first")
    file = disk.open("/data/log", create=True)
    file.write([buffer], 0)
    buffer[:] = b"other"
    file.sync()
    assert disk.read_durable("/data/log") == b"first"


def test_truncate_cuts_and_extends() -> None:
    file = make_disk().open("/data/log", create=True)
    file.write([b"abcdef"], 0)
    file.truncate(2)
    file.truncate(4)
    assert file.read(9, 0) == b"ab\0\0"


@pytest.mark.parametrize(
    ("act", "number"),
    [
        (lambda disk: disk.open("/data/none"), errno.ENOENT),
        (lambda disk: disk.open("/none/log", create=True), errno.ENOENT),
        (lambda disk: disk.open("/data/log", create=True), errno.EEXIST),
        (lambda disk: disk.open("/data"), errno.EISDIR),
        (lambda disk: disk.names("/none"), errno.ENOENT),
        (lambda disk: disk.names("/data/log"), errno.ENOTDIR),
        (lambda disk: disk.remove("/data/none"), errno.ENOENT),
        (lambda disk: disk.remove("/data"), errno.EISDIR),
        (lambda disk: disk.rename("/data/none", "/data/x"), errno.ENOENT),
        (lambda disk: disk.rename("/data", "/data/log"), errno.ENOTDIR),
        (lambda disk: disk.remove_directory("/data"), errno.ENOTEMPTY),
        (lambda disk: disk.remove_directory("/none"), errno.ENOENT),
        (lambda disk: disk.rename("/data/log", "/data"), errno.EISDIR),
        (lambda disk: disk.make_directory("/data/log"), errno.EEXIST),
        (lambda disk: disk.open("/data/log").write([b""] * (IOV_MAX + 1), 0), errno.EINVAL),
        (lambda disk: disk.open("/data/log").read(1, -1), errno.EINVAL),
        (lambda disk: disk.open("/data/log").truncate(-1), errno.EINVAL),
    ],
)
def test_misuse_raises_the_errno_of_linux(act: Callable[[SimulatedDisk], object], number: int) -> None:
    disk = make_disk()
    synced_file(disk, "/data/log", b"x")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what is asserted
        act(disk)
    assert caught.value.errno == number


def test_names_are_sorted_and_paths_lists_every_file() -> None:
    disk = make_disk()
    disk.make_directory("/data/deep/er")
    for path in ("/data/b", "/data/a", "/data/deep/er/c"):
        disk.open(path, create=True)
    assert disk.names("data") == ["a", "b", "deep"]
    assert disk.paths() == ["/data/a", "/data/b", "/data/deep/er/c"]
    assert disk.exists("/data/deep")
    assert not disk.exists("/data/deep/x/y")


def test_closed_handle_refuses_work_and_close_is_idempotent() -> None:
    file = make_disk().open("/data/log", create=True)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.size()


def test_synced_bytes_and_name_survive_a_power_loss() -> None:
    disk = make_disk()
    synced_file(disk, "/data/log", b"kept")
    disk.crash()
    assert disk.read_file("/data/log") == b"kept"


def test_unsynced_bytes_are_gone_after_a_power_loss_that_keeps_nothing() -> None:
    disk = make_disk()
    file = synced_file(disk, "/data/log", b"kept")
    file.write([b"lost"], 4)
    assert disk.read_file("/data/log") == b"keptlost"
    disk.crash()
    assert disk.read_file("/data/log") == b"kept"


def test_sync_without_directory_sync_loses_the_name() -> None:
    disk = make_disk()
    file = disk.open("/data/log", create=True)
    file.write([b"bytes"], 0)
    file.sync()
    disk.crash()
    assert disk.paths() == []


def test_directory_sync_without_sync_keeps_the_name_and_loses_the_bytes() -> None:
    disk = make_disk()
    disk.open("/data/log", create=True).write([b"bytes"], 0)
    disk.sync_directory("/data")
    disk.crash()
    assert disk.read_file("/data/log") == b""


def test_folder_without_a_sync_of_its_parent_takes_its_files_with_it() -> None:
    disk = make_disk()
    disk.make_directory("/data/inner")
    disk.open("/data/inner/log", create=True).sync()
    disk.sync_directory("/data/inner")
    lost = disk.clone()
    lost.crash()
    assert not lost.exists("/data/inner")
    disk.sync_directory("/data")
    disk.crash()
    assert disk.paths() == ["/data/inner/log"]


def test_folder_moves_with_its_files_and_goes_when_it_is_empty() -> None:
    disk = SimulatedDisk()
    disk.write_file("/data/old/log", b"x")
    disk.sync_all()
    disk.rename("/data/old", "/data/new")
    assert disk.paths() == ["/data/new/log"]
    disk.sync_directory("/data")
    disk.crash()
    assert disk.paths() == ["/data/new/log"]
    disk.remove("/data/new/log")
    disk.remove_directory("/data/new")
    assert disk.names("/data") == []


def test_unsynced_rename_and_remove_are_undone() -> None:
    disk = make_disk()
    synced_file(disk, "/data/a", b"new")
    synced_file(disk, "/data/b", b"old")
    synced_file(disk, "/data/c", b"removed")
    disk.rename("/data/a", "/data/b")
    disk.remove("/data/c")
    assert disk.names("/data") == ["b"]
    disk.crash()
    assert {path: disk.read_file(path) for path in disk.paths()} == {
        "/data/a": b"new",
        "/data/b": b"old",
        "/data/c": b"removed",
    }


def test_rename_is_atomic_over_all_seeds() -> None:
    seen: set[tuple[str, ...]] = set()
    for seed in range(200):
        disk = make_disk()
        synced_file(disk, "/data/state", b"old")
        file = disk.open("/data/state.tmp", create=True)
        file.write([b"new"], 0)
        file.sync()
        disk.rename("/data/state.tmp", "/data/state")
        disk.crash(random.Random(seed))
        names = tuple(disk.names("/data"))
        assert disk.read_file("/data/state") == (b"new" if _renamed(disk) else b"old")
        seen.add((*names, disk.read_file("/data/state").decode()))
    assert seen == {("state", "old"), ("state", "state.tmp", "old"), ("state", "new")}


def _renamed(disk: SimulatedDisk) -> bool:
    return disk.names("/data") == ["state"] and disk.read_file("/data/state") == b"new"


def test_rename_across_folders_never_shows_both_or_neither_name() -> None:
    seen = set()
    for seed in range(100):
        disk = make_disk()
        disk.make_directory("/bin")
        disk.sync_directory("/")
        synced_file(disk, "/data/log", b"x")
        disk.rename("/data/log", "/bin/log")
        disk.crash(random.Random(seed))
        assert len(disk.paths()) == 1
        seen.update(disk.paths())
    assert seen == {"/data/log", "/bin/log"}


@pytest.mark.parametrize("seed", range(20))
def test_directory_sync_brings_the_other_side_of_a_rename_along(seed: int) -> None:
    disk = make_disk()
    disk.make_directory("/bin")
    disk.sync_directory("/")
    disk.open("/data/log", create=True)
    disk.rename("/data/log", "/bin/log")
    disk.sync_directory("/bin")
    disk.crash(random.Random(seed))
    assert disk.paths() == ["/bin/log"]


def test_renamed_file_is_not_lost_when_its_old_name_is_taken_again() -> None:
    for seed in range(100):
        disk = make_disk()
        synced_file(disk, "/data/log", b"old")
        disk.rename("/data/log", "/data/log.1")
        disk.open("/data/log", create=True)
        disk.crash(random.Random(seed))
        assert b"old" in [disk.read_file(path) for path in disk.paths()]


def test_independent_names_survive_independently() -> None:
    seen = set()
    for seed in range(200):
        disk = make_disk()
        disk.open("/data/a", create=True)
        disk.open("/data/b", create=True)
        disk.crash(random.Random(seed))
        seen.add(tuple(disk.names("/data")))
    assert seen == {(), ("a",), ("b",), ("a", "b")}


@pytest.mark.parametrize("end", [SimulatedDisk.crash, SimulatedDisk.restart])
def test_handles_are_dead_after_a_crash_and_after_a_restart(end: Callable[[SimulatedDisk], None]) -> None:
    disk = make_disk()
    file = synced_file(disk, "/data/log", b"x")
    end(disk)
    for use in (file.size, file.sync, lambda: file.read(1, 0), lambda: file.write([b"y"], 0)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()
    file.close()


def test_restart_keeps_the_cache_and_leaves_it_pending() -> None:
    disk = make_disk()
    file = synced_file(disk, "/data/log", b"kept")
    file.write([b"cached"], 4)
    disk.restart()
    assert disk.read_file("/data/log") == b"keptcached"
    disk.crash()
    assert disk.read_file("/data/log") == b"kept"


def test_clone_is_independent_and_keeps_what_is_pending() -> None:
    disk = make_disk()
    file = synced_file(disk, "/data/log", b"kept")
    file.write([b"pending"], 4)
    disk.open("/data/new", create=True)
    copy = disk.clone()
    file.sync()
    file.write([b"later"], 0)
    disk.sync_directory("/data")
    copy.crash()
    assert copy.paths() == ["/data/log"]
    assert copy.read_file("/data/log") == b"kept"
    assert disk.read_file("/data/log") == b"laterending"


def test_write_file_is_durable_at_once_and_counts_no_operation() -> None:
    disk = SimulatedDisk()
    disk.write_file("/data/deep/log", b"abc")
    disk.write_file("/data/deep/log", b"abcd")
    assert (disk.operation_count, disk.used_bytes) == (0, 4)
    disk.crash()
    assert disk.read_file("/data/deep/log") == b"abcd"


def test_sync_costs_the_pending_bytes_not_the_file() -> None:
    disk = make_disk()
    file = disk.open("/data/log", create=True)
    for position in range(0, 4096, 64):
        file.write([b"x" * 64], position)
        file.sync()
    assert disk.bytes_synced == disk.bytes_written == 4096


def test_power_loss_is_not_an_exception_that_handlers_can_swallow() -> None:
    assert not issubclass(PowerLoss, Exception)


def test_free_bytes_shrink_with_what_is_written() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    assert disk.free_bytes("/d") > 1 << 30
    disk.limit_space(100)
    file = disk.open("/d/f", create=True)
    file.write([b"x" * 60], 0)
    assert disk.free_bytes("/d") == 40

"""Disks that change nothing, whatever is asked of them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.storage.disk import Disk
from quiver.storage.dry_run import DryRunDisk, ReadOnlyDisk
from quiver.testing import SimulatedDisk

Attempt = Callable[[Disk, str], object]

ATTEMPTS: list[Attempt] = [
    lambda disk, folder: disk.open(f"{folder}/new", create=True),
    lambda disk, folder: disk.make_directory(f"{folder}/more"),
    lambda disk, folder: disk.rename(f"{folder}/file", f"{folder}/other"),
]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(b"0123456789")
    return str(tmp_path)


def simulated() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    disk.open("/d/file", create=True).write([b"0123456789"], 0)
    return disk


@pytest.mark.parametrize(
    "attempt",
    [
        *ATTEMPTS,
        lambda disk, folder: disk.remove(f"{folder}/file"),
        lambda disk, folder: disk.sync_directory(folder),
    ],
)
def test_read_only_disk_refuses_every_change(folder: str, attempt: Attempt) -> None:
    with pytest.raises(OSError, match="Read-only") as refused:
        attempt(ReadOnlyDisk(), folder)
    assert refused.value.errno == errno.EROFS
    assert ReadOnlyDisk().names(folder) == ["file"]


def test_read_only_disk_reads(folder: str) -> None:
    file = ReadOnlyDisk().open(f"{folder}/file")
    assert (file.size(), file.read(3, 2)) == (10, b"234")
    file.close()


def test_file_of_a_read_only_disk_cannot_be_written(folder: str) -> None:
    file = ReadOnlyDisk().open(f"{folder}/file")
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write([b"x"], 0)
    with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
        file.truncate(0)
    file.close()
    assert (Path(folder) / "file").read_bytes() == b"0123456789"


def test_read_only_disk_reads_what_may_not_be_written(folder: str) -> None:
    (Path(folder) / "file").chmod(0o444)
    file = ReadOnlyDisk().open(f"{folder}/file")
    assert file.size() == 10
    file.close()


@pytest.mark.parametrize("attempt", [*ATTEMPTS, lambda disk, folder: disk.open(f"{folder}/file").write([b"x"], 0)])
def test_rehearsal_refuses_what_recovery_never_does(attempt: Attempt) -> None:
    with pytest.raises(OSError, match="Read-only"):
        attempt(DryRunDisk(simulated()), "/d")


def test_rehearsed_cut_is_seen_but_not_done() -> None:
    disk = simulated()
    before = disk.operation_count
    rehearsal = DryRunDisk(disk)
    file = rehearsal.open("/d/file")
    file.truncate(4)
    file.sync()
    assert (file.size(), file.read(10, 2), file.read(10, 6)) == (4, b"23", b"")
    file.close()
    assert rehearsal.open("/d/file").size() == 4
    assert rehearsal.truncated_to == {"/d/file": 4}
    assert (disk.operation_count, disk.open("/d/file").size()) == (before, 10)


def test_rehearsed_removal_is_seen_but_not_done() -> None:
    disk = simulated()
    rehearsal = DryRunDisk(disk)
    assert rehearsal.exists("/d/file")
    rehearsal.remove("/d/file")
    rehearsal.sync_directory("/d")
    assert not rehearsal.exists("/d/file")
    assert rehearsal.names("/d") == []
    with pytest.raises(FileNotFoundError):
        rehearsal.open("/d/file")
    assert disk.names("/d") == ["file"]

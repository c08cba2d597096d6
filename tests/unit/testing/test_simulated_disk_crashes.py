"""What a power loss may leave of unsynced bytes, and how crash points are enumerated."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quiver.storage.disk import File
from quiver.testing import PowerLoss, SimulatedDisk
from quiver.testing.disk_faults import Moment
from quiver.testing.filesystem import SECTOR_BYTES

SECTORS = b"".join(bytes([65 + number]) * SECTOR_BYTES for number in range(6))


def disk_with_pending(old: bytes, new: bytes, position: int) -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.write_file("/log", old)
    disk.open("/log").write([new], position)
    return disk


def crashed_contents(disk: SimulatedDisk, seeds: int = 400) -> Counter[bytes]:
    contents: Counter[bytes] = Counter()
    for seed in range(seeds):
        copy = disk.clone()
        copy.crash(random.Random(seed))
        contents[copy.read_file("/log")] += 1
    return contents


def sectors_kept(content: bytes) -> tuple[bool, ...]:
    padded = content.ljust(len(SECTORS), b"\0")
    return tuple(
        padded[start : start + SECTOR_BYTES] == SECTORS[start : start + SECTOR_BYTES]
        for start in range(0, len(SECTORS), SECTOR_BYTES)
    )


def test_crash_keeps_all_none_a_prefix_or_some_sectors() -> None:
    contents = crashed_contents(disk_with_pending(b"", SECTORS, 0))
    assert contents[SECTORS] > 0
    assert contents[b""] > 0
    assert any(SECTORS.startswith(content) and 0 < len(content) < len(SECTORS) for content in contents)
    assert any(not SECTORS.startswith(content) for content in contents)


def test_later_sectors_survive_while_earlier_ones_read_as_zeros() -> None:
    contents = crashed_contents(disk_with_pending(b"", SECTORS, 0))
    reordered = [content for content in contents if sectors_kept(content)[-1] and not sectors_kept(content)[0]]
    assert reordered
    assert all(content[:SECTOR_BYTES] == bytes(SECTOR_BYTES) for content in reordered)


def test_length_may_survive_without_the_last_sectors() -> None:
    contents = crashed_contents(disk_with_pending(b"", SECTORS, 0))
    assert any(len(content) == len(SECTORS) and content.endswith(bytes(SECTOR_BYTES)) for content in contents)


def test_cut_falls_on_sector_edges_and_on_any_byte() -> None:
    contents = crashed_contents(disk_with_pending(b"", SECTORS, 0))
    cuts = [
        len(content)
        for content in contents.elements()
        if SECTORS.startswith(content) and 0 < len(content) < len(SECTORS)
    ]
    assert sum(cut % SECTOR_BYTES > 0 for cut in cuts) > 25
    assert sum(cut % SECTOR_BYTES == 0 for cut in cuts) > 25


def test_lost_sectors_of_an_overwrite_keep_the_old_bytes() -> None:
    old = b"." * len(SECTORS)
    for content in crashed_contents(disk_with_pending(old, SECTORS, 0)):
        assert len(content) == len(old)
        assert all(byte in (ord("."), wanted) for byte, wanted in zip(content, SECTORS, strict=True))


def test_one_sector_keeps_a_prefix_of_its_writes() -> None:
    disk = SimulatedDisk()
    disk.write_file("/log", b"")
    file = disk.open("/log")
    for position in range(3):
        file.write([b"abc"[position : position + 1]], position)
    contents = {content.rstrip(b"\0") for content in crashed_contents(disk)}
    assert contents == {b"", b"a", b"ab", b"abc"}


def test_synced_bytes_never_change_in_a_crash() -> None:
    disk = disk_with_pending(b"s" * 700, SECTORS, 700)
    assert all(content.startswith(b"s" * 700) for content in crashed_contents(disk))


def test_pending_truncate_is_kept_or_lost() -> None:
    disk = SimulatedDisk()
    disk.write_file("/log", b"x" * 1000)
    disk.open("/log").truncate(10)
    assert set(crashed_contents(disk)) == {b"x" * 1000, b"x" * 10}


def test_same_seed_gives_the_same_crash() -> None:
    disk = disk_with_pending(b"", SECTORS, 0)
    first, second = disk.clone(), disk.clone()
    first.crash(random.Random("seed"))
    second.crash(random.Random("seed"))
    assert first.read_file("/log") == second.read_file("/log")


def test_crash_counts_what_it_kept() -> None:
    disk = SimulatedDisk()
    disk.write_file("/log", b"")
    rng = random.Random(1)
    for _ in range(100):
        disk.open("/log").write([SECTORS], 0)
        disk.crash(rng)
    kinds = {kind for kind in disk.faults if kind.startswith("crash_keeps")}
    assert kinds == {"crash_keeps_all", "crash_keeps_none", "crash_keeps_prefix", "crash_keeps_sectors"}
    assert disk.faults["power_loss"] == 100


def run_all_kinds(disk: SimulatedDisk) -> None:
    """Perform one of every mutating operation."""
    disk.make_directory("/data")
    file: File = disk.open("/data/a", create=True)
    file.write([b"0123456789"], 0)
    file.truncate(8)
    file.sync()
    disk.rename("/data/a", "/data/b")
    disk.sync_directory("/data")
    disk.remove("/data/b")


def test_every_mutating_operation_is_a_crash_point() -> None:
    disk = SimulatedDisk(keep_journal=True)
    run_all_kinds(disk)
    assert disk.journal is not None
    kinds = ["create", "create", "write", "truncate", "sync", "rename", "sync_directory", "remove"]
    assert [kind for kind, _ in disk.journal] == kinds
    assert disk.operation_count == len(kinds)
    for operation in range(1, disk.operation_count + 1):
        victim = SimulatedDisk()
        victim.crash_after(operation)
        with pytest.raises(PowerLoss):
            run_all_kinds(victim)
        assert victim.operation_count == operation
        assert not victim.has_power


def test_no_power_until_crash_or_restart() -> None:
    disk = SimulatedDisk()
    disk.write_file("/log", b"x")
    file = disk.open("/log")
    disk.crash_after(1)
    for use in (
        lambda: file.write([b"y"], 1),
        lambda: file.read(1, 0),
        lambda: file.sync(),
        lambda: disk.open("/log"),
        lambda: disk.exists("/log"),
        lambda: disk.names("/"),
        lambda: disk.make_directory("/data"),
        lambda: disk.remove("/log"),
        lambda: disk.sync_directory("/"),
    ):
        with pytest.raises(PowerLoss):
            use()
    file.close()
    disk.crash()
    assert disk.open("/log").read(5, 0) == b"x"


@pytest.mark.parametrize(("moment", "expected"), [("before", b""), ("during", b"0123"), ("after", b"01234567")])
def test_power_goes_before_during_or_after_a_write(moment: Moment, expected: bytes) -> None:
    disk = SimulatedDisk()
    disk.write_file("/log", b"")
    disk.crash_after(1, moment=moment)
    with pytest.raises(PowerLoss):
        disk.open("/log").write([b"01234567"], 0)
    disk.restart()
    assert disk.read_file("/log") == expected


@pytest.mark.parametrize(("moment", "expected"), [("before", b""), ("during", b""), ("after", b"x")])
def test_power_goes_before_during_or_after_a_sync(moment: Moment, expected: bytes) -> None:
    disk = SimulatedDisk()
    disk.write_file("/log", b"")
    file = disk.open("/log")
    file.write([b"x"], 0)
    disk.crash_after(1, moment=moment)
    with pytest.raises(PowerLoss):
        file.sync()
    disk.crash()
    assert disk.read_file("/log") == expected


def test_crash_after_counts_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        SimulatedDisk().crash_after(0)

"""Each fault of the simulated disk happens when planned, is counted, and does what it says."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from quiver.clock import Rng
from quiver.testing import DiskFaults, SimulatedDisk
from quiver.testing.disk_faults import DiskOperation


def disk_with_log(data: bytes = b"", *, rng: Rng | None = None, rates: DiskFaults | None = None) -> SimulatedDisk:
    disk = SimulatedDisk(rng=rng, rates=rates)
    disk.write_file("/log", data)
    return disk


def test_failed_sync_drops_the_bytes_and_the_next_sync_succeeds() -> None:
    disk = disk_with_log(b"old")
    file = disk.open("/log")
    file.write([b"dropped"], 3)
    disk.fail("sync")
    with pytest.raises(OSError, match="Input/output error") as caught:
        file.sync()
    assert caught.value.errno == errno.EIO
    file.sync()
    assert file.read(10, 0) == b"olddropped"
    assert disk.read_durable("/log") == b"old"
    assert disk.faults["eio_sync"] == 1


def test_write_after_a_failed_sync_leaves_a_hole_of_zeros() -> None:
    disk = disk_with_log(b"old")
    file = disk.open("/log")
    file.write([b"xx"], 3)
    disk.fail("sync")
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    file.write([b"new"], 5)
    file.sync()
    disk.crash()
    assert disk.read_file("/log") == b"old\0\0new"


@pytest.mark.parametrize("operation", ["read", "write", "truncate"])
def test_nth_operation_fails_once_and_changes_nothing(operation: DiskOperation) -> None:
    disk = disk_with_log(b"abc")
    file = disk.open("/log")
    uses: dict[DiskOperation, Callable[[], object]] = {
        "read": lambda: file.read(1, 0),
        "write": lambda: file.write([b"X"], 0),
        "truncate": lambda: file.truncate(2),
    }
    disk.fail(operation, nth=2)
    uses[operation]()
    before = disk.read_file("/log")
    with pytest.raises(OSError, match="Input/output"):
        uses[operation]()
    assert disk.read_file("/log") == before
    uses[operation]()
    assert disk.faults == {f"eio_{operation}": 1}


def test_failure_can_be_aimed_at_one_path_with_another_errno() -> None:
    disk = disk_with_log()
    disk.write_file("/other", b"")
    disk.fail("sync", path="/log", error=errno.EROFS)
    disk.open("/other").sync()
    with pytest.raises(OSError, match="Read-only"):
        disk.open("/log").sync()
    assert disk.faults["erofs_sync"] == 1


def test_two_planned_failures_count_the_same_operations() -> None:
    disk = disk_with_log(b"abc")
    file = disk.open("/log")
    disk.fail("read", nth=1)
    disk.fail("read", nth=2)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            file.read(1, 0)
    assert file.read(1, 0) == b"a"


def test_lying_sync_reports_success_and_stays_pending() -> None:
    disk = disk_with_log(b"old")
    file = disk.open("/log")
    file.write([b"new"], 3)
    disk.lie()
    file.sync()
    assert disk.read_durable("/log") == b"old"
    assert disk.faults["lying_sync"] == 1
    file.sync()
    assert disk.read_durable("/log") == b"oldnew"


def test_full_disk_takes_a_short_write_then_raises() -> None:
    disk = disk_with_log(b"abc")
    file = disk.open("/log")
    disk.limit_space(4)
    assert file.write([b"123456"], 3) == 4
    with pytest.raises(OSError, match="No space") as caught:
        file.write([b"56"], 7)
    assert caught.value.errno == errno.ENOSPC
    assert file.write([b"ABC"], 0) == 3
    assert file.read(9, 0) == b"ABC1234"
    assert disk.faults["enospc"] == 2


def test_space_returns_on_truncate_remove_and_a_raised_limit() -> None:
    disk = disk_with_log(b"abc")
    disk.write_file("/other", b"12345")
    file = disk.open("/log")
    disk.limit_space(0)
    file.truncate(1)
    assert file.write([b"xxxxx"], 1) == 2
    disk.remove("/other")
    assert file.write([b"yyyyyyyyyy"], 3) == 5
    disk.limit_space(1)
    assert file.write([b"zz"], 8) == 1
    disk.limit_space(None)
    assert file.write([b"z" * 100], 9) == 100


def test_replaced_and_crashed_files_give_their_space_back() -> None:
    disk = disk_with_log(b"abc")
    disk.write_file("/other", b"12345")
    disk.rename("/log", "/other")
    assert disk.used_bytes == 3
    disk.open("/other").write([b"x" * 10], 3)
    disk.crash()
    assert disk.used_bytes == 8


def test_planned_short_write_takes_some_bytes() -> None:
    disk = disk_with_log()
    disk.shorten(2)
    assert disk.open("/log").write([b"abcd"], 0) == 2
    assert disk.read_file("/log") == b"ab"
    assert disk.faults["short_write"] == 1


def test_seeded_short_writes_take_between_one_byte_and_all_but_one() -> None:
    disk = disk_with_log(rng=random.Random(1), rates=DiskFaults(p_short_write=1.0))
    file = disk.open("/log")
    lengths = {file.write([b"abcd"], 0) for _ in range(100)}
    assert lengths == {1, 2, 3}
    assert file.write([b"a"], 0) == 1


def test_bit_flip_changes_one_durable_bit_that_reads_see() -> None:
    disk = disk_with_log(b"abc")
    disk.flip_bit("/log", 1, bit=5)
    assert disk.open("/log").read(3, 0) == b"aBc"
    disk.crash()
    assert disk.read_file("/log") == b"aBc"
    assert disk.faults["bit_flip"] == 1


def test_bit_flip_needs_a_durable_byte() -> None:
    disk = disk_with_log(b"a")
    disk.open("/log").write([b"pending"], 1)
    with pytest.raises(ValueError, match="1 durable bytes, none at 3"):
        disk.flip_bit("/log", 3)


def test_misdirected_write_reaches_another_position_behind_the_cache() -> None:
    disk = disk_with_log(b"aaaabbbb")
    file = disk.open("/log")
    disk.misdirect(0)
    file.write([b"cccc"], 8)
    file.sync()
    assert disk.read_file("/log") == b"aaaabbbbcccc"
    disk.drop_caches()
    assert disk.read_file("/log") == b"ccccbbbb\0\0\0\0"
    assert disk.faults["misdirect"] == 1


def test_seeded_faults_happen_at_about_their_rate() -> None:
    rates = DiskFaults(p_eio_read=0.2, p_eio_write=0.2, p_eio_sync=0.2, p_misdirect=0.2, p_lying_sync=0.2)
    disk = disk_with_log(b"x" * 100, rng=random.Random(7), rates=rates)
    file = disk.open("/log")
    for _ in range(1000):
        for use in (lambda: file.read(1, 0), lambda: file.write([b"y"], 50), lambda: file.sync()):
            with suppress(OSError):
                use()
    for kind in ("eio_read", "eio_write", "eio_sync", "misdirect", "lying_sync"):
        assert 100 < disk.faults[kind] < 300


def test_rates_can_change_while_running() -> None:
    disk = disk_with_log(b"x", rng=random.Random(1))
    disk.rates.p_eio_read = 1.0
    with pytest.raises(OSError, match="Input/output"):
        disk.open("/log").read(1, 0)
    disk.rates.p_eio_read = 0.0
    assert disk.open("/log").read(1, 0) == b"x"


def test_probabilities_without_a_random_stream_are_refused() -> None:
    disk = disk_with_log(b"x", rates=DiskFaults(p_eio_read=0.5))
    with pytest.raises(ValueError, match="pass rng"):
        disk.open("/log").read(1, 0)


def test_clone_starts_without_faults() -> None:
    disk = disk_with_log(b"x")
    disk.fail("read")
    assert disk.clone().open("/log").read(1, 0) == b"x"

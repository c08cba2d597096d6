"""What a log does by itself after a while, on virtual time."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from log_world import DIRECTORY, FixedClock, InlineExecutor, append, next_batches, open_log, wait_durable

from quiver.config import LogSettings
from quiver.config.storage import Durability
from quiver.model import Index, Offset, Term
from quiver.storage import Log, SystemDisk
from quiver.storage.frames import MARK_BYTES
from quiver.storage.segment import segment_name
from quiver.testing import SimulatedDisk, SimulatedExecutor, SimulatedLoop

PATH = f"{DIRECTORY}/{segment_name(1)}"


def on_virtual_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        loop = SimulatedLoop(random.Random(1))
        loop.run_until_complete(test())
        loop.close()

    return run


def marks_in(disk: SimulatedDisk) -> int:
    return disk.read_file(PATH).count(b"MRKQ")


@on_virtual_time
async def test_an_idle_log_vouches_for_its_last_flush_once() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    size = len(disk.read_file(PATH))
    await asyncio.sleep(9)
    assert marks_in(disk) == 0
    await asyncio.sleep(12)
    assert marks_in(disk) == 1
    assert len(disk.read_file(PATH)) == size + MARK_BYTES
    await append(log, b"b")
    await asyncio.sleep(21)
    assert marks_in(disk) == 2
    await log.close()
    assert marks_in(disk) == 3, "a clean stop ends with a mark that is synced"
    assert disk.read_durable(PATH) == disk.read_file(PATH)


@on_virtual_time
async def test_a_log_that_a_mark_covers_is_opened_without_a_sync_and_does_not_grow() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    await log.close()
    stopped = disk.read_file(PATH)
    for _ in range(3):
        operations = disk.operation_count
        log = open_log(disk, LogSettings())
        assert disk.operation_count == operations
        await log.close()
        assert disk.read_durable(PATH) == disk.read_file(PATH) == stopped
    log = open_log(disk, LogSettings())
    await append(log, b"b")
    assert disk.read_file(PATH).startswith(stopped)
    disk.restart()  # killed: no mark covers the last entry
    operations = disk.operation_count
    open_log(disk, LogSettings())
    assert disk.operation_count > operations


@on_virtual_time
async def test_a_log_that_was_reset_needs_no_mark() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    await log.reset(first_index=Index(9), first_offset=Offset(4), previous_term=Term(1))
    path = f"{DIRECTORY}/{segment_name(9)}"
    empty = disk.read_file(path)
    await asyncio.sleep(25)
    assert disk.read_file(path) == disk.read_durable(path) == empty
    await log.close()


@on_virtual_time
async def test_a_busy_log_is_not_marked_by_the_timer() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    await asyncio.sleep(0.9999)
    log.append(next_batches(log, b"b"))
    log._writer._handle_idle_timer()  # as if it struck in the turn of the append
    assert marks_in(disk) == 1, "the one that the flush itself began with"
    await wait_durable(log, log.end_index)
    assert marks_in(disk) == 1, "the flush brought its own"
    await log.close()


def interval_log(disk: SimulatedDisk, durability: Literal["interval", "none"]) -> Log:
    return open_log(disk, LogSettings(durability=durability, flush_interval_ms=50))


@on_virtual_time
async def test_interval_durability_syncs_once_after_each_interval_with_appends() -> None:
    disk = SimulatedDisk()
    log = interval_log(disk, "interval")
    await append(log, b"a")
    await append(log, b"b")
    assert len(disk.read_durable(PATH)) < len(disk.read_file(PATH))
    operations = disk.operation_count
    await asyncio.sleep(0.06)
    assert disk.read_durable(PATH) == disk.read_file(PATH)
    await asyncio.sleep(10)
    assert disk.operation_count == operations + 1
    await append(log, b"c")
    await asyncio.sleep(0.06)
    assert disk.read_durable(PATH) == disk.read_file(PATH)
    await log.close()


@on_virtual_time
async def test_without_durability_nothing_is_synced_while_the_log_is_in_use() -> None:
    disk = SimulatedDisk()
    log = interval_log(disk, "none")
    for _ in range(10):
        await append(log, b"a")
        await asyncio.sleep(2)
    assert disk.read_durable(PATH) == disk.read_file(PATH)[: len(disk.read_durable(PATH))]
    assert len(disk.read_durable(PATH)) < len(disk.read_file(PATH))
    await log.close()
    assert disk.read_durable(PATH) == disk.read_file(PATH)


def open_logs(directory: Path) -> int:
    """Return how many descriptors this process has open on files of a directory."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(target.startswith(f"{directory}/") for target in targets)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("durability", ["fsync", "interval", "none"])
def test_only_a_log_in_use_holds_a_descriptor(tmp_path: Path, durability: Durability) -> None:
    def reopened() -> Log:
        return Log.open(
            str(tmp_path),
            disk=SystemDisk(),
            executor=InlineExecutor(),
            clock=FixedClock(),
            settings=LogSettings(durability=durability),
        )

    async def use() -> None:
        log = reopened()
        assert open_logs(tmp_path) == 0
        for _ in range(2):
            for _ in range(8):  # longer than the time after which an idle log's file is closed
                await append(log, b"a")
                await asyncio.sleep(4)
                assert open_logs(tmp_path) == 1
            await asyncio.sleep(20)
            assert open_logs(tmp_path) == 0
        log.truncate_suffix(Index(9))
        await log.roll_if_old()
        await asyncio.sleep(21)
        assert open_logs(tmp_path) == 0
        await append(log, b"b")
        await log.close()
        assert open_logs(tmp_path) == 0
        log = reopened()
        assert log.end_index == 10
        await log.close()

    on_virtual_time(use)()


@on_virtual_time
async def test_a_file_is_synced_before_it_is_put_away() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    size = len(disk.read_file(PATH))
    await asyncio.sleep(21)
    assert disk.read_durable(PATH) == disk.read_file(PATH)
    assert len(disk.read_file(PATH)) == size + MARK_BYTES
    await log.close()


@on_virtual_time
async def test_a_log_whose_file_cannot_be_synced_when_it_is_put_away_fails() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"a")
    disk.fail("sync", path=PATH)
    await asyncio.sleep(21)
    status = log.status()
    assert status.failure is not None
    assert status.end_index == status.durable_end_index == 2, "the entry was durable before"
    await log.close()


@pytest.mark.parametrize("durability", ["interval", "none"])
def test_with_weaker_durability_a_power_loss_costs_only_the_end(durability: Literal["interval", "none"]) -> None:
    async def append_much(disk: SimulatedDisk) -> Log:
        settings = LogSettings(durability=durability, segment_bytes_max=2048)
        log = open_log(disk, settings, executor=InlineExecutor(), clock=FixedClock())
        for n in range(60):
            await append(log, b"value %d" % n * 5)
        return log

    for seed in range(20):
        disk = SimulatedDisk()
        sealed = asyncio.run(append_much(disk)).status().segments - 1
        disk.crash(random.Random(seed))
        recovered = open_log(disk)
        assert recovered.damage == ()
        assert recovered.status().segments >= sealed > 2, "a segment is synced when it is sealed"


def test_a_log_runs_on_the_simulated_executor() -> None:
    loop = SimulatedLoop(random.Random(3))
    disk = SimulatedDisk()

    async def use() -> None:
        executor = SimulatedExecutor(loop, random.Random(4))
        log = Log.open(DIRECTORY, disk=disk, executor=executor, clock=FixedClock(), settings=LogSettings())
        await append(log, b"a", b"b")
        await log.close()

    loop.run_until_complete(use())
    loop.close()
    assert open_log(disk).end_index == 3

"""`kill -9` in the middle of appends: every acknowledged batch is there after a restart, and the log goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quiver.clock import SystemClock
from quiver.config import LogSettings
from quiver.model import Index, Term
from quiver.record import Batch, build_batch, stamp
from quiver.storage import Log, SystemDisk, ThreadExecutor

SETTINGS = LogSettings(segment_bytes_max=64 * 1024)
APPENDERS = 8
ACKNOWLEDGED_MIN = 200
TIMEOUT_S = 60


def open_log(directory: Path, executor: ThreadExecutor) -> Log:
    return Log.open(str(directory), disk=SystemDisk(), executor=executor, clock=SystemClock(), settings=SETTINGS)


def next_batch(log: Log) -> Batch:
    value = b"entry %d " % log.end_index * (1 + log.end_index % 90)
    built = bytearray(build_batch([value], timestamp=1))
    return Batch.decode(stamp(built, term=Term(1), index=log.end_index, base_offset=log.end_offset, append_timestamp=1))


async def append_for_ever(directory: Path) -> None:
    """Append, and print the index of each entry once it is durable: what the child process does."""
    log, flushed = open_log(directory, ThreadExecutor()), asyncio.Condition()

    async def wait_durable(end_index: int) -> None:
        async with flushed:
            await flushed.wait_for(lambda: log.durable_end_index >= end_index)

    async def notify() -> None:
        async with flushed:
            flushed.notify_all()

    async def append() -> None:
        while True:
            batch = next_batch(log)
            log.append([batch])
            await wait_durable(batch.header.index + 1)
            sys.stdout.write(f"{batch.header.index}\n")
            sys.stdout.flush()

    async with asyncio.TaskGroup() as tasks:

        def handle_durable(_: Index) -> None:
            tasks.create_task(notify())

        log.on_durable = handle_durable
        for _ in range(APPENDERS):
            tasks.create_task(append())


def kill_an_appender(directory: Path, *, acknowledged_min: int) -> int:
    """Start a process that appends, kill it, and return the last index that it called durable."""
    command = [sys.executable, __file__, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        deadline, acknowledged = time.monotonic() + TIMEOUT_S, list[int]()
        while len(acknowledged) < acknowledged_min and time.monotonic() < deadline:
            acknowledged.append(int(process.stdout.readline()))
        process.kill()
        rest, _ = process.communicate()
        acknowledged += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return max(acknowledged)


@pytest.mark.parametrize("round_number", range(3))
def test_a_killed_appender_loses_nothing_that_was_acknowledged(tmp_path: Path, round_number: int) -> None:
    directory = tmp_path / "log"
    for kill_number in range(2):
        acknowledged_min = ACKNOWLEDGED_MIN + 37 * round_number
        last = kill_an_appender(directory, acknowledged_min=acknowledged_min)
        assert last >= acknowledged_min * (kill_number + 1)
        asyncio.run(check_and_append(directory, last))


async def check_and_append(directory: Path, last_acknowledged: int) -> None:
    executor = ThreadExecutor()
    log = open_log(directory, executor)
    assert log.damage == ()
    assert log.end_index > last_acknowledged
    index = log.first_index
    while index < log.end_index:
        for entry in await log.read_entries(index, end_index=log.end_index, bytes_max=1 << 20):
            assert entry.header.index == index
            assert entry.values() == [b"entry %d " % index * (1 + index % 90)]
            index = Index(index + 1)
    log.append([next_batch(log)])
    await log.close()
    assert log.durable_end_index == log.end_index
    executor.close()


if __name__ == "__main__":
    asyncio.run(append_for_ever(Path(sys.argv[1])))

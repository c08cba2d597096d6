"""What a reopened log says is durable survives a power loss, whatever failed before it was reopened.

After a failed sync the system keeps the bytes in its cache, where a restarted process reads them, and counts them as
written although the disk never got them.
"""

from __future__ import annotations

import asyncio

import pytest
from log_world import DIRECTORY, all_values, append, open_log

from quiver.errors import LogFailedError
from quiver.storage import Log
from quiver.testing import SimulatedDisk
from quiver.testing.disk_faults import DiskOperation


async def append_until_it_fails(log: Log) -> None:
    for number in range(20):
        await append(log, b"x" * 200, b"%d" % number)


@pytest.mark.parametrize("operation", ["sync", "sync_directory"])
@pytest.mark.parametrize("nth", [1, 2])
def test_reopened_log_keeps_what_it_read_back(operation: DiskOperation, nth: int) -> None:
    async def run() -> None:
        disk = SimulatedDisk()
        log = open_log(disk)
        await append(log, b"before")
        disk.fail(operation, nth=nth)
        with pytest.raises(LogFailedError):
            await append_until_it_fails(log)
        await log.close()
        disk.restart()  # the process ends, the machine goes on
        reopened = open_log(disk)
        vouched_for = (await all_values(reopened))[: reopened.durable_end_index - 1]
        disk.crash()
        assert (await all_values(open_log(disk)))[: len(vouched_for)] == vouched_for

    asyncio.run(run())


def test_rewriting_changes_no_byte() -> None:
    async def run() -> None:
        disk = SimulatedDisk()
        log = open_log(disk)
        await append(log, b"a", b"b")
        disk.restart()
        path = f"{DIRECTORY}/00000000000000000001.log"
        before = disk.read_file(path)
        open_log(disk)
        assert disk.read_file(path) == before

    asyncio.run(run())

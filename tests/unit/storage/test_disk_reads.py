"""Reads of a log whose callers are gone."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from quiver.errors import DamageError
from quiver.storage.disk_reads import DiskReads
from quiver.storage.executor import Lane, ThreadExecutor


def test_damage_found_by_a_cancelled_read_ends_no_node() -> None:
    asyncio.run(cancel_read_of_damage())


async def cancel_read_of_damage() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    executor, is_cancelled = ThreadExecutor(), threading.Event()

    def find_damage() -> None:
        is_cancelled.wait()
        raise DamageError("a batch fails its checksum")

    reads = DiskReads("log", executor)
    reader = asyncio.create_task(reads.run(find_damage, Lane.READS))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    is_cancelled.set()
    await reads.wait_ended()
    await asyncio.sleep(0)
    executor.close()  # its threads keep what they did last
    gc.collect()  # a future says then that nobody asked for its error
    assert reported == []

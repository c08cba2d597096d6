"""The disk reads of one log that are in flight, which must end before its files are removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from quiver.errors import UnavailableError
from quiver.storage.executor import Executor, Lane

T = TypeVar("T")


class DiskReads:
    """Run the reads of one log, until it is closed."""

    def __init__(self, directory: str, executor: Executor) -> None:
        self._directory = directory
        self._executor = executor
        self._is_closed = False
        self._running = 0
        self._ended = asyncio.Event()

    async def run(self, work: Callable[[], T], lane: Lane) -> T:
        """Run a read; one whose caller is cancelled goes on until it has ended.

        Raises:
            UnavailableError: not done; the log is closed.
        """
        if self._is_closed:
            raise UnavailableError(f"{self._directory}: not done: the log is closed; retry", code="log_closed")
        self._running += 1
        reading = self._executor.submit(work, lane)
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._end(reading)
            else:
                reading.add_done_callback(self._end)

    def refuse(self) -> None:
        """Refuse all reads from now on."""
        self._is_closed = True

    async def wait_ended(self) -> None:
        """Wait until no read uses the files."""
        while self._running:
            self._ended.clear()
            await self._ended.wait()

    def _end(self, reading: asyncio.Future[Any]) -> None:
        if not reading.cancelled():
            reading.exception()  # of a read without a caller nobody asks; an error that nobody asks for ends the node
        self._running -= 1
        if not self._running:
            self._ended.set()

"""Readers that wait for records: woken when the high watermark moves, never by the clock.

Pure bookkeeping over futures, bounded in number. Whoever waits and gives up cancels; whoever waits on a replica
that stops leading is told so.
"""

from __future__ import annotations

import asyncio
import heapq

from quiver.errors import OverloadedError, QuiverError
from quiver.model import Offset

WAITERS_MAX = 10_000
"""How many readers may wait for records of one partition: some 5 MB."""


class FetchWaiters:
    """The readers of one partition that wait for records."""

    def __init__(self, *, waiters_max: int = WAITERS_MAX) -> None:
        self._waiters_max = waiters_max
        self._waiting: list[tuple[Offset, int, asyncio.Future[None]]] = []
        self._numbers = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    async def wait_past(self, offset: Offset) -> None:
        """Wait until there is a record at `offset`, if there is none yet: the caller has looked in this very turn.

        Raises:
            OverloadedError: too many wait.
            QuiverError: what `fail` was called with.
        """
        if self._live >= self._waiters_max:
            raise OverloadedError(f"{self._waiters_max} readers wait for this partition")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers += 1
        self._live += 1
        heapq.heappush(self._waiting, (offset, self._numbers, done))
        try:
            await done
        finally:
            self._live -= 1
            self._drop_if_mostly_gone()

    def wake(self, end_offset: Offset) -> None:
        """Wake those whose record is there now."""
        waiting = self._waiting
        while waiting and waiting[0][0] < end_offset:
            done = heapq.heappop(waiting)[2]
            if not done.done():
                done.set_result(None)

    def fail(self, error: QuiverError) -> None:
        """Send everybody away."""
        waiting, self._waiting = self._waiting, []
        for _, _, done in waiting:
            if not done.done():
                done.set_exception(error)

    def _drop_if_mostly_gone(self) -> None:
        """Forget those who gave up, before they fill the memory of a partition where nothing arrives."""
        if len(self._waiting) > 64 and len(self._waiting) > 2 * self._live:
            self._waiting = [item for item in self._waiting if not item[2].done()]
            heapq.heapify(self._waiting)

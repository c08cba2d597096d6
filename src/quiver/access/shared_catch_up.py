"""Catching up with the primary before credentials are refused, at a cost that does not depend on who asks.

A token works at the primary as soon as it is created, and at every other node once that has applied it, some tenths of
a second later. A node that does not accept a token therefore asks the primary first how far the metadata goes, and
decides when it has applied that much.

Strangers can send any number of tokens, so what they can cause is bounded here: one catch-up runs at a time, the next
one begins at least `INTERVAL_MS` after it, all that wait share it, at most `WAITERS_MAX` wait, and none of them longer
than `WAIT_MS_MAX`. Beyond these bounds the node decides by what it knows, which is always safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.tasks import timeout

INTERVAL_MS: Final = 250
"""Least time between the starts of two catch-ups."""
WAIT_MS_MAX: Final = 1_500
"""Longest time that a caller waits, for its turn and for the primary."""
WAITERS_MAX: Final = 64
"""Callers that wait at a time."""


class SharedCatchUp:
    """Lets callers wait until this node has applied what the primary had when they asked."""

    def __init__(self, catch_up: Callable[[], Awaitable[object]], clock: Clock) -> None:
        """`catch_up` waits until the node has applied all metadata that the primary has; it may fail."""
        self._catch_up = catch_up
        self._clock = clock
        self._lock = asyncio.Lock()
        self._waiters = 0
        self._begun = 0
        self._ended = 0
        self._begun_ms = clock.monotonic_ms() - INTERVAL_MS

    async def wait(self) -> None:
        """Wait for a catch-up that begins after this call; return early, without an error, at one of the bounds."""
        if self._waiters >= WAITERS_MAX:
            return
        self._waiters += 1
        try:
            with suppress(TimeoutError):
                async with timeout(WAIT_MS_MAX / 1_000):
                    await self._take_part(self._begun)
        finally:
            self._waiters -= 1

    async def _take_part(self, begun: int) -> None:
        async with self._lock:
            if self._ended > begun:
                return  # one of those that waited longer has done it
            rest_ms = self._begun_ms + INTERVAL_MS - self._clock.monotonic_ms()
            if rest_ms > 0:
                await asyncio.sleep(rest_ms / 1_000)
            self._begun += 1
            self._begun_ms = self._clock.monotonic_ms()
            with suppress(QuiverError):  # failed for all that wait: each of them decides by what is known
                await self._catch_up()
            self._ended = self._begun

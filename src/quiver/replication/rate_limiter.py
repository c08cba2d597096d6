"""How fast this node sends others what they lack, so that moving replicas leaves room for everybody's records.

One allowance for all groups of a node: whoever sends takes its bytes from it and waits until they have passed. Only
old entries for learners are held back by it; what is new goes out at once, to whomever.
"""

from __future__ import annotations

import asyncio

from quiver.clock import Clock


class RateLimiter:
    """Let so many bytes a second pass, in the order in which they are asked for."""

    def __init__(self, clock: Clock, *, bytes_per_second: int) -> None:
        self._clock = clock
        self._bytes_per_ms = bytes_per_second / 1000
        self._free_ms = 0.0

    async def wait_turn(self, size_bytes: int) -> None:
        """Return when everything that was asked for before has passed."""
        now_ms = self._clock.monotonic_ms()
        begin_ms = max(self._free_ms, now_ms)
        self._free_ms = begin_ms + size_bytes / self._bytes_per_ms
        if begin_ms > now_ms:
            await asyncio.sleep((begin_ms - now_ms) / 1000)

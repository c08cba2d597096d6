"""The rate at which a node sends old entries to replicas that are being added.

A fixed rate is too high for a busy node and too low for an idle one: copying a replica uses the disks, the network and
the processors that clients need, too. So the rate follows what clients notice, the time from a proposal to its commit.
Its usual value and deviation are measured while nothing is copied. While something is copied, each commit that takes
unusually long lowers the rate by a fifth, and each other one raises it by a hundredth of the maximum. A quarter of the
maximum is always allowed, so that redundancy returns in time.

All times come from the event loop and the clock that are passed in, so that a simulation repeats every decision.
"""

from __future__ import annotations

import asyncio

from quiver.clock import Clock
from quiver.model import Index

ACTIVE_MS = 2_000
"""Time after the last copied bytes during which commits still count as affected by them."""
DEVIATIONS = 4
SLOW_EXTRA_S = 0.002
"""A commit is slow if it takes longer than usual by so many mean deviations, and by this much: clocks count
milliseconds."""
DECREASE = 0.8
INCREASE_SHARE = 0.01
RATE_SHARE_MIN = 1 / 4
USUAL_WEIGHT = 0.02
USUAL_FACTOR_MAX = 4
"""A single commit counts for the usual time with at most this multiple of it."""


class CatchUpLimiter:
    """Limits the bytes per second of all groups of a node together, first come, first served.

    It only delays old entries that are read from disk for learners. New entries are never delayed.
    """

    def __init__(self, clock: Clock, *, bytes_per_second: int) -> None:
        self.sent_bytes = 0
        """Bytes that have passed."""
        self._clock = clock
        self._bytes_per_ms_max = self._bytes_per_ms = bytes_per_second / 1000
        self._free_ms = 0.0
        self._used_ms = -ACTIVE_MS
        self._usual_s: float | None = None
        self._deviation_s = 0.0
        self._turn = asyncio.Lock()

    @property
    def bytes_per_second(self) -> int:
        """Return the present rate."""
        return round(self._bytes_per_ms * 1000)

    async def wait_turn(self, size_bytes: int) -> None:
        """Return when all earlier bytes have passed; the next ones wait for these, at the rate of that moment."""
        async with self._turn:
            now_ms = self._clock.monotonic_ms()
            if self._free_ms > now_ms:
                await asyncio.sleep((self._free_ms - now_ms) / 1000)
            self._used_ms = self._clock.monotonic_ms()
            self.sent_bytes += size_bytes
            self._free_ms = max(self._free_ms, self._used_ms) + size_bytes / self._bytes_per_ms

    def add_commit(self, latency_s: float) -> None:
        """Adapt the rate to the time that a proposal of this node took to be committed."""
        if self._clock.monotonic_ms() - self._used_ms >= ACTIVE_MS:
            self._bytes_per_ms = self._bytes_per_ms_max
            self._learn(latency_s)
        elif self._usual_s is None:
            self._usual_s = latency_s
        elif latency_s > self._usual_s + max(DEVIATIONS * self._deviation_s, SLOW_EXTRA_S):
            self._bytes_per_ms = max(self._bytes_per_ms * DECREASE, self._bytes_per_ms_max * RATE_SHARE_MIN)
        else:
            self._bytes_per_ms = min(
                self._bytes_per_ms + self._bytes_per_ms_max * INCREASE_SHARE, self._bytes_per_ms_max
            )

    def _learn(self, latency_s: float) -> None:
        if self._usual_s is None:
            self._usual_s = latency_s
        else:
            difference_s = min(latency_s, self._usual_s * USUAL_FACTOR_MAX) - self._usual_s
            self._usual_s += difference_s * USUAL_WEIGHT
            self._deviation_s += (abs(difference_s) - self._deviation_s) * USUAL_WEIGHT


class CommitSampler:
    """Measures the commits of one member, one at a time, for the node's limiter."""

    __slots__ = ("_begun_s", "_end_index", "_limiter")

    def __init__(self, limiter: CatchUpLimiter) -> None:
        self._limiter = limiter
        self._end_index: Index | None = None
        self._begun_s = 0.0

    def note_appended(self, end_index: Index) -> None:
        """Start to measure the proposals below `end_index`, unless earlier ones are being measured."""
        if self._end_index is None:
            self._end_index, self._begun_s = end_index, asyncio.get_running_loop().time()

    def note_applied(self, index: Index, *, is_leader: bool) -> None:
        """Finish the measurement if its proposals are applied; without leadership it says nothing."""
        if self._end_index is not None and self._end_index <= index + 1:
            self._end_index = None
            if is_leader:
                self._limiter.add_commit(asyncio.get_running_loop().time() - self._begun_s)

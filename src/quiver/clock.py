"""The interfaces of time and randomness.

Nothing else in `quiver` may read a clock or draw a random number (`metrics` measures durations, which decide
nothing): both are passed in, so that a whole cluster can run under a seeded simulation (`quiver.testing`).
`random.Random` is an `Rng`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time: monotonic for waiting, wall for timestamps."""

    def monotonic_ms(self) -> int:
        """Return milliseconds that never go back, from an arbitrary start."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC; may jump."""
        ...


class Rng(Protocol):
    """A source of random numbers."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Return an integer in [0, stop)."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ms(self) -> int:
        """Return the machine's monotonic time in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return the machine's wall time in milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

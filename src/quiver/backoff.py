"""Exponential backoff with jitter, the one way in which Quiver spaces out retries.

The step doubles from attempt to attempt up to its maximum, and each wait is drawn between half of the step and the
whole of it: clients and nodes that failed together do not retry together.
"""

from __future__ import annotations

from quiver.clock import Rng

_DOUBLINGS_MAX = 16
"""Bounds the shift; every step has reached its maximum long before."""


class Backoff:
    """The waits between the attempts of one operation."""

    __slots__ = ("_first_ms", "_max_ms", "_rng", "attempts")

    def __init__(self, rng: Rng, *, first_ms: int, max_ms: int) -> None:
        self._rng = rng
        self._first_ms, self._max_ms = first_ms, max_ms
        self.attempts = 0
        """How many waits were drawn since the last reset."""

    def next_ms(self) -> float:
        """Return how long to wait before the next attempt."""
        step_ms = min(self._max_ms, self._first_ms << min(self.attempts, _DOUBLINGS_MAX))
        self.attempts += 1
        return step_ms * (0.5 + self._rng.random() / 2)

    def reset(self) -> None:
        """Start again with the shortest wait, after a success."""
        self.attempts = 0

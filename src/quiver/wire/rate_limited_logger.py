"""Warnings that a stranger can cause, at most one per cause and while.

Whoever can reach the port could otherwise fill the disk with log lines. What is not written is counted and told with
the next line of the same key. The memory for keys is bounded: beyond it the oldest is forgotten.
"""

from __future__ import annotations

import logging

from quiver.clock import Clock
from quiver.logs import facts

INTERVAL_MS = 10_000
KEYS_MAX = 1024


class RateLimitedLogger:
    """Write warnings, one per key in ten seconds."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        # Key: when it was last written, and how often it was not since; oldest first.
        self._said: dict[str, tuple[int, int]] = {}

    def tell(self, key: str, event: str, **about: object) -> None:
        """Write a warning, unless one of this key was written a short while ago."""
        now_ms = self._clock.monotonic_ms()
        said_at_ms, unsaid = self._said.get(key, (now_ms - INTERVAL_MS, 0))
        if now_ms - said_at_ms < INTERVAL_MS:
            self._said[key] = (said_at_ms, unsaid + 1)
            return
        self._said.pop(key, None)
        if len(self._said) >= KEYS_MAX:
            del self._said[next(iter(self._said))]
        self._said[key] = (now_ms, 0)
        if unsaid:
            about["unsaid"] = unsaid
        self._logger.warning(event, extra=facts(**about))

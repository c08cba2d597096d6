"""One timer for many deadlines: it rings when the earliest is due, and not again too soon after.

Deadlines move all the time, mostly to later: that costs nothing, since the timer is left as it is and what is
due is looked up when it rings. Only a deadline before the timer's own moves it. Between two rings lies at
least `spacing_ms`, so that a thousand groups, each with deadlines of its own, share their wake-ups.

It reads the clock that the deadlines are given in, which may run slower or faster than the event loop's: a ring
that comes early finds nothing due and is followed by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quiver.clock import Clock

_NEVER = 1 << 62
_FIXED = -1
"""Earlier than every deadline: nothing moves the timer, because it is closed, or rings and is set anew in the end."""


class DeadlineTimer:
    """Ring for the earliest of many deadlines. Used inside one event loop; `close` it in the end."""

    def __init__(self, clock: Clock, *, spacing_ms: int, action: Callable[[int], int]) -> None:
        """Let `action` do what is due at the time it is given, and return the next deadline."""
        self._clock = clock
        self._spacing_ms = spacing_ms
        self._action = action
        self._earliest_ms = 0
        self._due_ms = _NEVER
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def ring_by(self, deadline_ms: int) -> None:
        """Ring when a deadline is due, if not before."""
        if deadline_ms >= self._due_ms:
            return
        due_ms = max(deadline_ms, self._earliest_ms)
        if due_ms < self._due_ms:
            self._cancel()
            self._due_ms = due_ms
            delay_s = max(0, due_ms - self._clock.monotonic_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def close(self) -> None:
        """Never ring again."""
        self._is_closed = True
        self._cancel()
        self._due_ms = _FIXED

    def _ring(self) -> None:
        next_ms = now_ms = self._clock.monotonic_ms()
        self._earliest_ms = now_ms + self._spacing_ms
        self._due_ms = _FIXED
        try:
            next_ms = self._action(now_ms)
        finally:
            if not self._is_closed:
                self._due_ms = _NEVER
                self.ring_by(next_ms)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

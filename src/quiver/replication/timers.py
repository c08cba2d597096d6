"""One timer for all deadlines of a node's groups.

`DeadlineTimer` fires when the earliest of many deadlines is due. Deadlines move all the time, mostly to later. Moving
one to later costs nothing: the timer stays as it is, and its action checks what is due when it fires. Only a deadline
earlier than the timer's own moves the timer. Two firings are at least `spacing_ms` apart, so that a thousand
groups, each with its own deadlines, share their wake-ups.

The timer reads the clock that the deadlines are given in, which may run slower or faster than the event loop's. If it
fires early, nothing is due and it is set again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quiver.clock import Clock

_NEVER = 1 << 62
_FIXED = -1
"""Earlier than every deadline, so that nothing moves the timer: it is closed, or it is firing and is set at the end."""


class DeadlineTimer:
    """Fire for the earliest of many deadlines. Used inside one event loop; `close` it at the end."""

    def __init__(self, clock: Clock, *, spacing_ms: int, action: Callable[[int], int]) -> None:
        """Make a timer whose `action` gets the current time, does what is due, and returns the next deadline."""
        self._clock = clock
        self._spacing_ms = spacing_ms
        self._action = action
        self._earliest_ms = 0
        self._due_ms = _NEVER
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def fire_by(self, deadline_ms: int) -> None:
        """Fire at this deadline, if not before."""
        if deadline_ms >= self._due_ms:
            return
        due_ms = max(deadline_ms, self._earliest_ms)
        if due_ms < self._due_ms:
            self._cancel()
            self._due_ms = due_ms
            delay_s = max(0, due_ms - self._clock.monotonic_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def close(self) -> None:
        """Never fire again."""
        self._is_closed = True
        self._cancel()
        self._due_ms = _FIXED

    def _fire(self) -> None:
        next_ms = now_ms = self._clock.monotonic_ms()
        self._earliest_ms = now_ms + self._spacing_ms
        self._due_ms = _FIXED
        try:
            next_ms = self._action(now_ms)
        finally:  # an action that fails must not stop the ticks of every other group
            if not self._is_closed:
                self._due_ms = _NEVER
                self.fire_by(next_ms)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""When to try again: deadlines, growing waits with chance in them, and a budget that all calls of a client share.

Every wait of the SDK ends at a `Deadline`. `Retry` is one call's memory of its failed tries: it decides which errors
are worth another, waits, and at the end raises what is true: *unknown* only if some try was perhaps carried out and the
request changes something.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quiver.clock import Clock, Rng
from quiver.errors import (
    NotLeaderError,
    OutcomeUnknownError,
    QuiverError,
    RequestError,
    StorageError,
    TrimmedError,
    UnavailableError,
)

DELAY_MS_FIRST: Final = 10
"""The mean of the first wait; it doubles from try to try."""
DELAY_MS_MAX: Final = 400
"""The longest mean wait: a failover takes about this long, and a client should not sleep through much more."""
RETRIES_PER_SECOND: Final = 100
"""What all calls of one client may add to a sick cluster's load, on average."""
RETRIES_BURST: Final = 200
"""How many retries may be made at once before the average counts: a leader's fall fails many calls together."""


class Deadline:
    """A moment after which nobody waits any more."""

    __slots__ = ("_clock", "at_ms")

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock = clock
        self.at_ms = clock.monotonic_ms() + timeout_ms

    @property
    def remaining_ms(self) -> int:
        """How long there is left; never negative."""
        return max(0, self.at_ms - self._clock.monotonic_ms())

    @property
    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return not self.remaining_ms


class RetryBudget:
    """Bound how often a client tries again: above the budget retries are spread out, never refused."""

    def __init__(self, clock: Clock, *, per_second: int = RETRIES_PER_SECOND, burst: int = RETRIES_BURST) -> None:
        self._clock = clock
        self._interval_ms = 1000 / per_second
        self._burst_ms = burst * self._interval_ms
        self._free_at_ms: float = clock.monotonic_ms() - self._burst_ms
        """When the next retry would be due if they were spread evenly; lies in the past while there is budget."""

    def reserve(self) -> float:
        """Take one retry out of the budget; return how many milliseconds it must wait."""
        now_ms = self._clock.monotonic_ms()
        self._free_at_ms = max(self._free_at_ms, now_ms - self._burst_ms) + self._interval_ms
        return max(0.0, self._free_at_ms - now_ms)


class Retry:
    """One call's failed tries, and what follows from them."""

    def __init__(
        self, *, deadline: Deadline, rng: Rng, budget: RetryBudget, is_read: bool, is_repeatable: bool
    ) -> None:
        """Take what the call is: one that is not repeatable ends with the first try whose outcome is unknown."""
        self._deadline, self._rng, self._budget = deadline, rng, budget
        self._is_read = is_read
        self._is_repeatable = is_read or is_repeatable
        self._tries = 0
        self._unknown: QuiverError | None = None

    async def wait_turn(self, error: QuiverError) -> None:
        """Wait until the next try is due after `error`, or raise if there is to be none."""
        if error.outcome == "unknown":
            self._unknown = error
        if not self._is_worth_a_try(error):
            raise self._truth(error)
        delay_ms = self._delay_ms(error)
        if delay_ms >= self._deadline.remaining_ms:
            raise self._truth(error)
        self._tries += 1
        await asyncio.sleep(delay_ms / 1000)

    def _is_worth_a_try(self, error: QuiverError) -> bool:
        if error.outcome == "unknown" and not self._is_repeatable:
            return False
        return not isinstance(error, RequestError | TrimmedError) or error.code == "unknown_request"

    def _delay_ms(self, error: QuiverError) -> float:
        budgeted_ms = self._budget.reserve()
        if isinstance(error, NotLeaderError) and error.leader is not None and not self._tries:
            return budgeted_ms  # it said where to go
        mean_ms = min(DELAY_MS_MAX, DELAY_MS_FIRST << min(self._tries, 10))
        wished_ms = getattr(error, "retry_after_ms", None) or 0
        return max(budgeted_ms, wished_ms) + mean_ms * (0.5 + self._rng.random())

    def _truth(self, error: QuiverError) -> QuiverError:
        """Return what can honestly be said after the last try."""
        if self._is_read or self._unknown is None:
            return _as_not_done(error) if self._deadline.is_over or not isinstance(error, RequestError) else error
        if error is self._unknown and isinstance(error, OutcomeUnknownError):
            return error
        unknown = OutcomeUnknownError(f"perhaps done: {self._unknown}; last: {error}", code=self._unknown.code)
        unknown.__cause__ = error
        return unknown


def _as_not_done(error: QuiverError) -> QuiverError:
    """Return an error of a call that changed nothing as one that says so."""
    if isinstance(error, RequestError | UnavailableError | StorageError) and error.outcome == "not_done":
        return error
    gone = UnavailableError(f"not done in time: {error}", code=error.code)
    gone.__cause__ = error
    return gone

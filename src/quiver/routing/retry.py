"""Deadlines, and the retries of one call: exponential backoff and a retry budget that all calls of a client share.

Every wait of the SDK ends at a `Deadline`. `Retry` records the failed attempts of one call: it decides which errors
are retried, waits, and finally raises the true outcome: *unknown* only if an attempt may have been carried out and the
request changes something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from quiver.backoff import Backoff
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

BACKOFF_MS_FIRST: Final = 15
"""Upper bound of the first wait; it doubles from attempt to attempt."""
BACKOFF_MS_MAX: Final = 500
"""Upper bound of a wait: a failover takes about this long, and a client should not sleep much longer."""
RETRIES_PER_SECOND: Final = 100
"""Retries that all calls of one client may add to the load of a failing cluster, on average."""
RETRIES_BURST: Final = 200
"""Retries allowed in a burst before the average applies: the loss of a leader fails many calls together."""
PARTITION_RETRIES_PER_SECOND: Final = 2
"""Further retries on average for each partition that the client uses: a client of many partitions sends many requests
anyway, and when a node is lost, each of its partitions has to find its new leader."""
PARTITION_RETRIES_BURST: Final = 8
"""Further retries in a burst for each partition that the client uses."""


class Deadline:
    """The end of a call by the monotonic clock."""

    __slots__ = ("_clock", "at_ms")

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock = clock
        self.at_ms = clock.monotonic_ms() + timeout_ms

    @property
    def remaining_ms(self) -> int:
        """The time that is left; 0 once it is over."""
        return max(0, self.at_ms - self._clock.monotonic_ms())

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return not self.remaining_ms


class RetryBudget:
    """Bound the rate of a client's retries: beyond the budget they are spread out, never refused.

    It grows with the partitions that the client uses.
    """

    def __init__(self, clock: Clock, *, count_partitions: Callable[[], int] = lambda: 0) -> None:
        self._clock = clock
        self._count_partitions = count_partitions
        self._spent: float = 0.0
        """Retries of the burst that are used up; they come back with time."""
        self._updated_ms = clock.monotonic_ms()

    def reserve(self) -> float:
        """Take one retry out of the budget; return how many milliseconds it must wait."""
        now_ms, partitions = self._clock.monotonic_ms(), self._count_partitions()
        per_ms = (RETRIES_PER_SECOND + PARTITION_RETRIES_PER_SECOND * partitions) / 1000
        self._spent = max(0.0, self._spent - (now_ms - self._updated_ms) * per_ms) + 1
        self._updated_ms = now_ms
        return max(0.0, self._spent - RETRIES_BURST - PARTITION_RETRIES_BURST * partitions) / per_ms


class Retry:
    """The failed attempts of one call."""

    def __init__(
        self, *, deadline: Deadline, rng: Rng, budget: RetryBudget, is_read: bool, is_repeatable: bool
    ) -> None:
        """Start without failures. A call that is not repeatable ends at the first attempt of unknown outcome."""
        self._deadline, self._budget = deadline, budget
        self._backoff = Backoff(rng, first_ms=BACKOFF_MS_FIRST, max_ms=BACKOFF_MS_MAX)
        self._is_read = is_read
        self._is_repeatable = is_read or is_repeatable
        self._unknown: QuiverError | None = None

    async def wait_turn(self, error: QuiverError) -> None:
        """Wait until the next attempt is due after `error`, or raise if there is none."""
        if error.outcome == "unknown":
            self._unknown = error
        if not self._is_retried(error):
            raise self.final_error(error)
        delay_ms = self._delay_ms(error)
        if delay_ms >= self._deadline.remaining_ms:
            raise self.final_error(error)
        await asyncio.sleep(delay_ms / 1000)

    def _is_retried(self, error: QuiverError) -> bool:
        if error.outcome == "unknown" and not self._is_repeatable:
            return False
        return not isinstance(error, RequestError | TrimmedError) or error.code == "unknown_request"

    def _delay_ms(self, error: QuiverError) -> float:
        budgeted_ms = self._budget.reserve()
        if isinstance(error, NotLeaderError) and error.leader is not None and not self._backoff.attempts:
            self._backoff.attempts = 1  # a second redirect is not followed without a wait
            return budgeted_ms
        retry_after_ms = getattr(error, "retry_after_ms", None) or 0
        return max(budgeted_ms, retry_after_ms) + self._backoff.next_ms()

    def final_error(self, error: QuiverError) -> QuiverError:
        """Return the true outcome of all attempts, after the last one failed with `error`."""
        if self._is_read or self._unknown is None:
            return _as_not_done(error) if self._deadline.is_over or not isinstance(error, RequestError) else error
        return as_unknown(self._unknown, error)


def as_unknown(earlier: QuiverError, error: QuiverError) -> QuiverError:
    """Return the outcome of a call whose last attempt failed with `error`, after one of unknown outcome.

    A refusal of the last attempt says nothing about the earlier one.
    """
    if error is earlier and isinstance(error, OutcomeUnknownError):
        return error
    unknown = OutcomeUnknownError(f"may have been done: {earlier}; last attempt: {error}", code=earlier.code)
    unknown.__cause__ = error
    return unknown


def _as_not_done(error: QuiverError) -> QuiverError:
    """Return the error of a call that changed nothing as one that says *not done*."""
    if isinstance(error, RequestError | UnavailableError | StorageError) and error.outcome == "not_done":
        return error
    gone = UnavailableError(f"not done within the timeout: {error}", code=error.code)
    gone.__cause__ = error
    return gone

"""The retry budget of a client bounds how much its retries add to the load of a failing cluster."""

from __future__ import annotations

import pytest

from quiver.routing.retry import (
    PARTITION_RETRIES_BURST,
    PARTITION_RETRIES_PER_SECOND,
    RETRIES_BURST,
    RETRIES_PER_SECOND,
    RetryBudget,
)


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def test_burst_does_not_wait_and_what_follows_is_spread_evenly() -> None:
    budget = RetryBudget(ManualClock())
    assert [budget.reserve() for _ in range(RETRIES_BURST)] == [0.0] * RETRIES_BURST
    interval_ms = 1000 / RETRIES_PER_SECOND
    assert [budget.reserve() for _ in range(3)] == pytest.approx([interval_ms, 2 * interval_ms, 3 * interval_ms])


def test_budget_comes_back_with_time_up_to_the_burst() -> None:
    clock = ManualClock()
    budget = RetryBudget(clock)
    for _ in range(RETRIES_BURST):
        budget.reserve()
    clock.now_ms += 1_000
    assert [budget.reserve() for _ in range(RETRIES_PER_SECOND)] == [0.0] * RETRIES_PER_SECOND
    assert budget.reserve() > 0
    clock.now_ms += 3_600_000
    assert [budget.reserve() for _ in range(RETRIES_BURST)] == [0.0] * RETRIES_BURST
    assert budget.reserve() > 0


def test_client_of_many_partitions_may_retry_for_each_of_them() -> None:
    partitions = 1_000
    budget = RetryBudget(ManualClock(), count_partitions=lambda: partitions)
    burst = RETRIES_BURST + PARTITION_RETRIES_BURST * partitions
    assert not any(budget.reserve() for _ in range(burst))
    per_second = RETRIES_PER_SECOND + PARTITION_RETRIES_PER_SECOND * partitions
    assert budget.reserve() == pytest.approx(1000 / per_second)

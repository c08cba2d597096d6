"""Warnings that remote programs can cause are rate limited per key."""

from __future__ import annotations

import logging

import pytest

from quiver.logs import WARNING_INTERVAL_MS, WARNING_KEYS_MAX, RateLimitedLogger
from quiver.testing import SimulatedClock


class Time:
    now_ns = 0

    def pass_ms(self, duration_ms: int) -> None:
        self.now_ns += duration_ms * 1_000_000


def facts_of(caplog: pytest.LogCaptureFixture) -> list[object]:
    return [record.__dict__["facts"] for record in caplog.records]


def test_one_warning_per_key_and_interval_counts_the_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    warnings = RateLimitedLogger(logging.getLogger("quiver.test"), SimulatedClock(time))
    for at in range(4):
        warnings.warn("a", "refused", at=at)
    warnings.warn("b", "refused", at=4)
    time.pass_ms(WARNING_INTERVAL_MS - 1)
    warnings.warn("a", "refused", at=5)
    time.pass_ms(1)
    warnings.warn("a", "refused", at=6)
    warnings.warn("a", "refused", at=7)
    assert facts_of(caplog) == [{"at": 0}, {"at": 4}, {"at": 6, "suppressed": 4}]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_keys_are_bounded_and_the_oldest_is_evicted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RateLimitedLogger(logging.getLogger("quiver.test"), SimulatedClock(Time()))
    for at in range(WARNING_KEYS_MAX + 1):
        warnings.warn(str(at), "refused", at=at)
    caplog.clear()
    warnings.warn("1", "refused", at=-1)
    warnings.warn("0", "refused", at=-2)
    assert facts_of(caplog) == [{"at": -2}]

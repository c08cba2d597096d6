"""Warnings that strangers cause: told, but never in numbers."""

from __future__ import annotations

import logging

import pytest

from quiver.testing import SimulatedClock
from quiver.wire.rate_limited_logger import INTERVAL_MS, KEYS_MAX, RateLimitedLogger


class Time:
    now_ns = 0

    def pass_ms(self, duration_ms: int) -> None:
        self.now_ns += duration_ms * 1_000_000


def facts_of(caplog: pytest.LogCaptureFixture) -> list[object]:
    return [record.__dict__["facts"] for record in caplog.records]


def test_one_line_per_key_and_while_tells_how_many_were_not_written(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    quiet_log = RateLimitedLogger(logging.getLogger("quiver.test"), SimulatedClock(time))
    for at in range(4):
        quiet_log.tell("a", "refused", at=at)
    quiet_log.tell("b", "refused", at=4)
    time.pass_ms(INTERVAL_MS - 1)
    quiet_log.tell("a", "refused", at=5)
    time.pass_ms(1)
    quiet_log.tell("a", "refused", at=6)
    quiet_log.tell("a", "refused", at=7)
    assert facts_of(caplog) == [{"at": 0}, {"at": 4}, {"at": 6, "unsaid": 4}]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_memory_for_keys_is_bounded_and_the_oldest_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    quiet_log = RateLimitedLogger(logging.getLogger("quiver.test"), SimulatedClock(Time()))
    for at in range(KEYS_MAX + 1):
        quiet_log.tell(str(at), "refused", at=at)
    caplog.clear()
    quiet_log.tell("1", "refused", at=-1)
    quiet_log.tell("0", "refused", at=-2)
    assert facts_of(caplog) == [{"at": -2}]

"""The real sides of the clock and chance seams."""

from __future__ import annotations

import random
import time

from quiver.clock import Clock, Rng, SystemClock


def test_monotonic_time_never_goes_back() -> None:
    clock: Clock = SystemClock()
    times = [clock.monotonic_ms() for _ in range(1000)]
    assert times == sorted(times)


def test_monotonic_time_is_in_milliseconds() -> None:
    before = time.monotonic_ns() // 1_000_000
    assert before <= SystemClock().monotonic_ms() <= time.monotonic_ns() // 1_000_000


def test_wall_time_is_in_milliseconds_since_1970() -> None:
    before = time.time_ns() // 1_000_000
    assert before <= SystemClock().wall_ms() <= time.time_ns() // 1_000_000


def test_standard_random_generator_is_an_rng() -> None:
    rng: Rng = random.Random(7)
    assert 0 <= rng.random() < 1
    assert rng.randrange(1) == 0

"""One timer for many deadlines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from quiver.replication.timers import DeadlineTimer
from quiver.testing import SimulatedClock, SimulatedLoop

SPACING_MS = 25


class Rings:
    """What an alarm has done, and the deadline that it is told each time."""

    def __init__(self, loop: SimulatedLoop, *, drift_ppm: int = 0) -> None:
        self.at_ms: list[int] = []
        self.next_ms = 1_000_000
        self.during: Callable[[], None] = lambda: None
        self.alarm = DeadlineTimer(SimulatedClock(loop, drift_ppm=drift_ppm), spacing_ms=SPACING_MS, action=self.handle)

    def handle(self, now_ms: int) -> int:
        self.at_ms.append(now_ms)
        self.during()
        return self.next_ms


def run(test: Callable[[Rings], Coroutine[Any, Any, None]], *, drift_ppm: int = 0) -> Rings:
    loop = SimulatedLoop(random.Random(1))
    rings = Rings(loop, drift_ppm=drift_ppm)
    try:
        loop.run_until_complete(test(rings))
    finally:
        rings.alarm.close()
        loop.close()
    return rings


def fail() -> None:
    raise RuntimeError("an action that fails")


def test_the_earliest_deadline_rings() -> None:
    async def test(rings: Rings) -> None:
        for deadline_ms in (300, 100, 200):
            rings.alarm.fire_by(deadline_ms)
        await asyncio.sleep(0.5)

    assert run(test).at_ms == [100]


def test_the_next_deadline_is_what_the_action_returns() -> None:
    async def test(rings: Rings) -> None:
        rings.next_ms = 180
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.15)
        rings.next_ms = 1_000_000
        await asyncio.sleep(1)

    assert run(test).at_ms == [100, 180]


def test_rings_keep_their_distance() -> None:
    async def test(rings: Rings) -> None:
        rings.next_ms = 0  # always overdue
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.18)

    assert run(test).at_ms == [100, 125, 150, 175]


def test_an_earlier_deadline_keeps_the_distance_to_the_last_ring() -> None:
    async def test(rings: Rings) -> None:
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.101)
        rings.alarm.fire_by(102)
        rings.alarm.fire_by(101)
        await asyncio.sleep(0.5)

    assert run(test).at_ms == [100, 125]


def test_a_deadline_that_is_named_while_it_rings_is_the_actions_business() -> None:
    async def test(rings: Rings) -> None:
        rings.during = lambda: rings.alarm.fire_by(0)
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.5)

    assert run(test).at_ms == [100]


def test_a_clock_that_runs_slow_is_waited_for() -> None:
    async def test(rings: Rings) -> None:
        rings.next_ms = 100
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.13)

    assert run(test, drift_ppm=-100_000).at_ms == [90, 112]


def test_an_action_that_fails_does_not_end_the_alarm() -> None:
    async def test(rings: Rings) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        rings.during = fail
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.13)

    assert run(test).at_ms == [100, 125]


def test_a_closed_alarm_is_silent_even_if_it_is_closed_while_it_rings() -> None:
    async def test(rings: Rings) -> None:
        rings.next_ms = 0
        rings.during = rings.alarm.close
        rings.alarm.fire_by(100)
        await asyncio.sleep(0.5)
        rings.alarm.fire_by(200)
        await asyncio.sleep(0.5)

    assert run(test).at_ms == [100]

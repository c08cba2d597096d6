"""The watchdog of the event loop: lag is measured, and what holds the loop up is logged while it does."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from quiver.loop_watchdog import LoopWatchdog


def hold_the_loop_up() -> None:
    time.sleep(0.6)


def test_stack_of_a_loop_that_stands_still_is_logged_and_its_lag_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> LoopWatchdog:
        watchdog = LoopWatchdog(alarm_ms=100)
        watchdog.start()
        await asyncio.sleep(0.15)
        hold_the_loop_up()
        await asyncio.sleep(0.15)
        watchdog.stop()
        return watchdog

    with caplog.at_level(logging.WARNING):
        watchdog = asyncio.run(main())
    alarms = [record for record in caplog.records if record.message == "event loop stands still"]
    assert len(alarms) == 1
    assert "hold_the_loop_up" in alarms[0].facts["stack"]  # type: ignore[attr-defined] # set by `facts`
    assert watchdog.stalls >= 1
    assert sum(watchdog.lag.counts) >= 2
    assert watchdog.lag.total >= 0.3
    names = [family.name for family in watchdog.metrics()]
    assert names == ["quiver_loop_lag_seconds", "quiver_loop_stalls_total"]


def test_alarm_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watchdog = LoopWatchdog(alarm_ms=0)
        watchdog.start()
        hold_the_loop_up()
        await asyncio.sleep(0.01)
        watchdog.stop()

    asyncio.run(main())
    assert caplog.records == []

"""Measure how late the event loop of a node is, and log what holds it up.

A timer on the loop records by how much it is late (`quiver_loop_lag_seconds`). A thread watches that timer: if the loop
has not turned for `alarm_ms`, the thread logs the stack of the loop's thread while it is still held up, at most once
per `ALARM_INTERVAL_S`. A loop that never turns again, because something spins or blocks, is reported that way, too.

A process that was stopped or a machine that was asleep is no stall: then the watching thread was late itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable

from quiver.logs import facts
from quiver.metrics import Histogram, MetricFamily, counter

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""Interval of the timer on the loop."""
ALARM_INTERVAL_S = 10.0
"""Least time between two alarms."""
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FRAMES_SHOWN = 12


class LoopWatchdog:
    """Watches the event loop that starts it, from a thread of its own; `alarm_ms` of 0 only measures."""

    def __init__(self, *, alarm_ms: int) -> None:
        self.lag = Histogram(LAG_BOUNDS_S)
        """How late the loop called the timer."""
        self.stalls = 0
        """How often the loop did not turn for `alarm_ms`."""
        self._alarm_s = alarm_ms / 1000
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turned = 0.0
        """When the loop last turned, by `time.monotonic`."""
        self._due = 0.0
        self._watched = 0
        self._alarmed = -ALARM_INTERVAL_S
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the running loop until `stop`."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._schedule()
        if self._alarm_s:
            self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop watching; idempotent."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of the loop."""
        lag = "How late the event loop ran a timer; everything on the node waits as long."
        yield MetricFamily("quiver_loop_lag_seconds", "histogram", lag, tuple(self.lag.samples()))
        yield counter("quiver_loop_stalls_total", "Times that the event loop stood still for too long.", self.stalls)

    def _schedule(self) -> None:
        assert self._loop is not None, "the watchdog is started"
        self._turned = time.monotonic()
        self._due = self._turned + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self.lag.observe(max(0.0, time.monotonic() - self._due))
        self._schedule()

    def _watch(self) -> None:
        """Look at the timer several times per alarm; runs in the watchdog's thread."""
        step_s = self._alarm_s / 4
        looked = time.monotonic()
        stalled = 0.0
        while not self._ended.wait(step_s):
            now, turned = time.monotonic(), self._turned
            was_asleep = now - looked > step_s + self._alarm_s / 2
            looked = now
            if was_asleep or now - turned - TICK_S < self._alarm_s or turned == stalled:
                continue
            stalled = turned  # one stall is counted once, however long it lasts
            self.stalls += 1
            if now - self._alarmed >= ALARM_INTERVAL_S:
                self._alarmed = now
                self._alarm(now - turned)

    def _alarm(self, stalled_s: float) -> None:
        frames = traceback.extract_stack(sys._current_frames().get(self._watched), limit=_FRAMES_SHOWN)
        places = [f"{at.filename.rpartition('/')[2]}:{at.lineno} {at.name}" for at in frames]
        stack = " < ".join(reversed(places))  # innermost first: a long fact is cut at its end
        logger.warning("event loop stands still", extra=facts(stalled_ms=round(stalled_s * 1000), stack=stack))

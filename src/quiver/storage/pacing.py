"""Slow background work down while it delays writes.

Cold reads use the processor, the event loop and the disk that writes need, too. A fixed limit would be too low for an
idle node and too high for a busy one, so the limit follows a measurement: how long writes wait for a thread and for
the event loop. While they wait longer than the target, the pause after each piece of background work grows; otherwise
it shrinks. Without writes there is nothing to protect, and no pause.

Writes also delay each other. A write that was slow while no background work ran says nothing about such work: it must
not make the first readers after a bulk load wait.
"""

from __future__ import annotations

import threading

PAUSE_S_MIN = 0.002
"""The first pause; half of it counts as none."""
PAUSE_S_MAX = 0.4
"""The longest pause: background work always makes progress."""
INCREASE = 1.5
DECREASE = 0.95
"""Slower than the increase: the delay of one write in twenty decides."""
DECREASE_INTERVAL_S = 0.025
"""A fast write speaks for the time since the last one: it shrinks the pause once for each such interval. Otherwise a
node with a few writes a second would keep a pause for half a minute."""
SAMPLE_AGE_S_MAX = 0.5
"""A measurement older than this says nothing: no write has ended since."""


class LatencyPacer:
    """The pause after each piece of background work, by the latency of the work that it must not delay.

    `add_sample` belongs to the event loop; any thread may read `pause_s` and do the work.
    """

    def __init__(self, *, target_s: float) -> None:
        self._target_s = target_s
        self._pause_s = 0.0
        self._sampled_s = 0.0
        self._lock = threading.Lock()
        self._running = 0
        """Pieces of background work that run."""
        self._worked_s = 0.0
        """When the last one ended."""

    def begin_work(self) -> None:
        """Note that a piece of background work begins."""
        with self._lock:
            self._running += 1

    def end_work(self, now_s: float) -> None:
        """Note that a piece of background work has ended."""
        with self._lock:
            self._running -= 1
            self._worked_s = now_s

    def add_sample(self, latency_s: float, now_s: float) -> None:
        """Add the latency of one write that ended now."""
        if latency_s > self._target_s:
            if not self._running and self._worked_s < now_s - latency_s:
                return
            self._pause_s = min(max(self._pause_s * INCREASE, PAUSE_S_MIN), PAUSE_S_MAX)
        elif self._pause_s:
            intervals = max(1.0, (now_s - self._sampled_s) / DECREASE_INTERVAL_S)
            pause_s = self._pause_s * DECREASE**intervals
            self._pause_s = pause_s if pause_s > PAUSE_S_MIN / 2 else 0.0
        self._sampled_s = now_s

    def pause_s(self, now_s: float) -> float:
        """Return how long to pause now."""
        return self._pause_s if now_s - self._sampled_s < SAMPLE_AGE_S_MAX else 0.0

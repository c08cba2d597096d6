"""What a node remembers for consoles that are opened later: its own numbers of the last minutes, and recent events.

Every gateway measures its own node alone, every few seconds and more rarely if that takes long, into a ring; so a
cluster that nobody looks at pays almost nothing, whatever its size. Events come from the node's copy of the metadata,
which is compared only if it changed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.gateway.console.events import ConsoleEvent, Happening, find_happenings
from quiver.gateway.console.meter import NodeMeter
from quiver.metadata import View
from quiver.model import NodeId
from quiver.wire.admin_messages import HistorySample, NodeDescribed

INTERVAL_MS: Final = 5_000
"""Time between two samples."""
HISTORY_MS: Final = 15 * 60 * 1000
SAMPLES_MAX: Final = HISTORY_MS // INTERVAL_MS
EVENTS_MAX: Final = 500
COST_SHARE_MAX: Final = 0.01
"""A node spends no more of a core than this on its own samples: with very many replicas, there are fewer."""
_TICK_S: Final = 1.0
"""Time between two looks whether the metadata changed."""


class ConsoleRecorder:
    """The ring of samples and the ring of events of one node."""

    def __init__(
        self,
        *,
        view: Callable[[], View],
        describe: Callable[[], Awaitable[NodeDescribed]],
        clock: Clock,
    ) -> None:
        """Record what `view` shows, and what `describe` says of this node, with its metrics."""
        self._view = view
        self._describe = describe
        self._clock = clock
        self._samples: deque[HistorySample] = deque(maxlen=SAMPLES_MAX)
        self._events: deque[ConsoleEvent] = deque(maxlen=EVENTS_MAX)
        self._event_id = 0
        self._primary: NodeId | None = None

    async def run(self) -> None:
        """Record until cancelled."""
        meter, seen = NodeMeter(), self._view()
        next_ms = 0
        while True:
            now_ms = self._clock.monotonic_ms()
            if now_ms >= next_ms:
                next_ms = now_ms + await self._sample(meter)
            view = self._view()
            if view.index != seen.index:
                if seen.index:
                    self._record(find_happenings(seen, view))
                seen = view
            await asyncio.sleep(_TICK_S)

    def history(self) -> tuple[HistorySample, ...]:
        """Return the samples, oldest first."""
        return tuple(self._samples)

    def events(self, *, after_id: int = 0, events_max: int = EVENTS_MAX) -> list[ConsoleEvent]:
        """Return the newest events beyond one, oldest first."""
        return [event for event in self._events if event.id > after_id][-events_max:]

    async def _sample(self, meter: NodeMeter) -> int:
        """Measure the node once; return the time until the next measurement."""
        begun_s = time.thread_time()
        try:
            described = await self._describe()
        except QuiverError:
            return INTERVAL_MS  # the node is starting or stopping
        self._samples.append(meter.measure(described.metrics, time_ms=self._clock.wall_ms()))
        if described.primary != self._primary:
            self._primary = described.primary
            self._record([_tell_primary(described.primary)])
        # The thread's time also counts what else ran meanwhile: a busy node is measured more rarely, not more often.
        return max(INTERVAL_MS, round(1000 * (time.thread_time() - begun_s) / COST_SHARE_MAX))

    def _record(self, happenings: Iterable[Happening]) -> None:
        time_ms = self._clock.wall_ms()
        for one in happenings:
            self._event_id += 1
            self._events.append(
                ConsoleEvent(id=self._event_id, time_ms=time_ms, kind=one.kind, text=one.text, level=one.level)
            )


def _tell_primary(primary: NodeId | None) -> Happening:
    if primary is None:
        return Happening("primary", "there is no primary: topics cannot be changed", "critical")
    return Happening("primary", f"node {primary} is the primary")

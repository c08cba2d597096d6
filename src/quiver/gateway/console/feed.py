"""The one stream of server-sent events that keeps all open consoles current.

A console first gets `history`, the last minutes of the cluster, and then an `update` every second. Both are computed
and encoded once for all consoles, and only while one is open; if computing takes long, it is done more rarely, so that
it never costs more than a small share of a core. There is no queue: a console that reads slowly skips updates and gets
the newest one next. A console that opens while others are open gets the newest one at once; once all are closed it is
dropped, so that the next one never begins with an old state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from quiver.clock import Clock
from quiver.errors import OverloadedError, QuiverError
from quiver.gateway.console.events import ConsoleEvent
from quiver.gateway.console.meter import SERIES, merge
from quiver.gateway.console.overview import OverviewCollector
from quiver.gateway.console.recorder import INTERVAL_MS, ConsoleRecorder
from quiver.logs import facts
from quiver.metadata import BrokerState, View
from quiver.model import NodeId
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import DescribeNode, HistorySample

logger = logging.getLogger(__name__)

CONSOLES_MAX: Final = 200
"""Open consoles; more are refused."""
UPDATE_S: Final = 1.0
"""Time between two updates, unless they are expensive."""
UPDATE_S_MAX: Final = 30.0
COST_SHARE_MAX: Final = 0.03
"""Updates cost no more of a core than this, however many nodes and topics there are."""
SILENCE_S: Final = 10.0
"""A stream without an update for so long sends a comment, so that a console can tell a slow node from a dead one."""
EVENTS_IN_UPDATE: Final = 20
HISTORY_AGE_MS_MAX: Final = 2_000
"""Age of a history that is sent to one more console."""
_encode = msgspec.json.Encoder().encode
_PING: Final = b": waiting\n\n"


class ConsoleFeed:
    """Compute updates while consoles are open, and stream them."""

    def __init__(
        self,
        router: Router,
        view: Callable[[], View],
        recorder: ConsoleRecorder,
        *,
        clock: Clock,
        node: NodeId,
    ) -> None:
        self._router = router
        self._view = view
        self._recorder = recorder
        self._clock = clock
        self._collector = OverviewCollector(router, view, clock, node=node)
        self._open = 0
        self._update: bytes | None = None
        """The newest update, while consoles are open."""
        self._wanted = asyncio.Event()
        self._published: asyncio.Future[None] | None = None
        self._is_closed = False
        self._history: tuple[int, bytes] | None = None
        self._asking = asyncio.Lock()

    @property
    def open_consoles(self) -> int:
        """Return the number of open streams."""
        return self._open

    async def run(self) -> None:
        """Publish updates while a console is open, until cancelled."""
        while True:
            await self._wanted.wait()
            self._collector.forget()
            while self._open:
                pause_s = await self._publish()
                await asyncio.sleep(pause_s)
            self._update = None
            self._wanted.clear()

    def close(self) -> None:
        """End all streams; idempotent."""
        self._is_closed = True
        self._wake()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of one console.

        Raises:
            OverloadedError: not done; too many consoles are open.
        """
        self.check_room()
        self._open += 1
        self._wanted.set()
        try:
            yield await self._find_history()
            seen: bytes | None = None
            while not self._is_closed:
                update = self._update
                if update is not None and update is not seen:
                    seen = update
                    yield update
                elif not await self._wait_published():
                    yield _PING
        finally:
            self._open -= 1

    def check_room(self) -> None:
        """Raise `OverloadedError` if too many consoles are open."""
        if self._open >= CONSOLES_MAX:
            message = f"not done: {CONSOLES_MAX} consoles are open on this node; close one, or use another node"
            raise OverloadedError(message, retry_after_ms=1_000)

    async def _wait_published(self) -> bool:
        """Wait for the next update; return False if there is none for a while."""
        if self._published is None:
            self._published = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._published,), timeout=SILENCE_S)
        return bool(done)

    async def _publish(self) -> float:
        """Compute an update; return the time until the next one."""
        begun_s, cpu_s = time.monotonic(), time.thread_time()
        try:
            events = self._recorder.events(events_max=EVENTS_IN_UPDATE)
            update = await self._collector.collect(events)
        except QuiverError as error:
            logger.warning("console update failed", extra=facts(error=error.message))
            return UPDATE_S
        self._update = encode_event("update", update)
        self._wake()
        cost_s = (time.thread_time() - cpu_s) / COST_SHARE_MAX
        return max(0.05, min(UPDATE_S_MAX, max(UPDATE_S, cost_s)) - (time.monotonic() - begun_s))

    def _wake(self) -> None:
        if self._published is not None and not self._published.done():
            self._published.set_result(None)
        self._published = None

    async def _find_history(self) -> bytes:
        """Return the event with the last minutes of the cluster, asked for once for all consoles that open now."""
        async with self._asking:
            now_ms = self._clock.monotonic_ms()
            if self._history is None or now_ms - self._history[0] >= HISTORY_AGE_MS_MAX:
                self._history = (now_ms, encode_event("history", await self._ask_history()))
            return self._history[1]

    async def _ask_history(self) -> ConsoleHistory:
        brokers = [row for row in self._view().brokers.values() if row.state is not BrokerState.REMOVED]
        request, deadline = DescribeNode(with_history=True), self._router.deadline(1_000)
        answers = await gather_outcomes(
            self._router.ask_at(row.wire_address, request, deadline=deadline) for row in brokers
        )
        histories = {one.node: one.history for one in answers if not isinstance(one, QuiverError)}
        return describe_history(histories, self._recorder.events(), now_ms=self._clock.wall_ms())


class ConsoleHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The last minutes of a cluster and of each node."""

    series: tuple[str, ...]
    interval_ms: int
    cluster: list[HistorySample]
    nodes: dict[str, list[HistorySample]]
    events: list[ConsoleEvent]


def describe_history(
    histories: dict[NodeId, tuple[HistorySample, ...]], events: list[ConsoleEvent], *, now_ms: int
) -> ConsoleHistory:
    """Return the history that is sent to a console."""
    return ConsoleHistory(
        series=SERIES,
        interval_ms=INTERVAL_MS,
        cluster=merge(histories, interval_ms=INTERVAL_MS, now_ms=now_ms),
        nodes={str(node): list(samples) for node, samples in sorted(histories.items())},
        events=events,
    )


def encode_event(name: str, value: Any) -> bytes:
    """Return a server-sent event; JSON has no line ends outside of strings, and escapes those in them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))

"""`TlsAcceptor`: accepts connections and does their TLS handshakes, a bounded number at a time.

An event loop's own server takes every connection at once and tells its protocol only once TLS is established. Whoever
does not go on with a handshake would hold a descriptor and some 90 kB, unseen by every limit on connections, for a
minute. Here at most `HANDSHAKES_MAX` are under way; further connections wait in the kernel's queue, until one ends or
the oldest has had `YIELD_AFTER_S`: then that one is closed. So an honest burst waits a moment, and silent connections
keep nobody out.

Life: `bind`, `serve`, `close`; the tasks of handshakes belong to the scope of the owner.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from quiver.clock import Clock
from quiver.logs import RateLimitedLogger
from quiver.tasks import TaskScope

logger = logging.getLogger(__name__)

HANDSHAKES_MAX = 512
"""Handshakes under way at a time: about 45 MB. A handshake takes 2 to 4 ms of processor time."""
YIELD_AFTER_S = 1.0
"""Time that each handshake has before it must make room for others: some round trips on any network."""
RETRY_S = 1.0
"""Pause after the process or the system had no descriptor left."""
_BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsAcceptor:
    """Listen on an address, and give every connection with TLS a protocol of its own."""

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        *,
        tasks: TaskScope,
        clock: Clock,
        timeout_s: float,
        shutdown_timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: the longest time of a handshake, however few others there are."""
        self._make_protocol = make_protocol
        self._context = context
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._warnings = RateLimitedLogger(logger, clock)
        self._loop = asyncio.get_running_loop()
        self.sockets: list[socket.socket] = []
        """What it listens on, once bound."""
        self._handshakes: dict[asyncio.Task[Any], float] = {}
        """Those under way, oldest first, by the time when they began."""
        self._resume: asyncio.TimerHandle | None = None
        """What ends a pause."""
        self.evicted = 0
        """Handshakes that made room for others."""

    @property
    def pending(self) -> int:
        """Return how many handshakes are under way."""
        return len(self._handshakes)

    # Life.

    async def bind(self, host: str, port: int) -> None:
        """Bind the address, without accepting yet; raises `OSError` or `OverflowError` as sockets do."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self.sockets.append(listening)
                listening.settimeout(0)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
        except BaseException:
            self.close()
            raise

    async def start_serving(self) -> None:
        """Start accepting."""
        for listening in self.sockets:
            listening.listen(_BACKLOG)
        self._go_on()

    def close(self) -> None:
        """Stop accepting, and end the handshakes; established connections stay. Idempotent."""
        self._pause()
        for listening in self.sockets:
            listening.close()
        self.sockets = []
        for handshake in tuple(self._handshakes):
            handshake.cancel()

    # Accepting.

    def _go_on(self) -> None:
        self._pause()
        for listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _pause(self, delay_s: float | None = None) -> None:
        """Accept nothing, for good or for a while."""
        for listening in self.sockets:
            self._loop.remove_reader(listening.fileno())
        if self._resume is not None:
            self._resume.cancel()
        self._resume = None if delay_s is None else self._loop.call_later(delay_s, self._go_on)

    def _accept(self, listening: socket.socket) -> None:
        """Begin the handshakes of waiting connections, as far as there is room; called while at least one waits."""
        if len(self._handshakes) >= HANDSHAKES_MAX and not self._evict_oldest():
            return
        while len(self._handshakes) < HANDSHAKES_MAX:
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._warnings.warn("shortage", "no connection accepted", error=error)
                self._pause(RETRY_S)
                return
            self._begin(accepted)

    def _evict_oldest(self) -> bool:
        """End the oldest handshake; if it is too young, accept again once it is old enough, and return False."""
        oldest, begun_s = next(iter(self._handshakes.items()))
        left_s = begun_s + YIELD_AFTER_S - self._loop.time()
        if left_s > 0:
            self._pause(left_s)
            return False
        del self._handshakes[oldest]
        oldest.cancel()
        self.evicted += 1
        self._warnings.warn("evicted", "tls handshake ended", reason="it was not complete, and others waited")
        return True

    def _begin(self, accepted: socket.socket) -> None:
        accepted.settimeout(0)
        handshake = self._tasks.start(self._shake_hands(accepted))
        self._handshakes[handshake] = self._loop.time()
        handshake.add_done_callback(partial(self._handle_ended, accepted))

    async def _shake_hands(self, accepted: socket.socket) -> bool:
        """Return whether TLS is established, and the connection its protocol's."""
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=self._shutdown_timeout_s,
            )
        except Exception:  # noqa: BLE001 - what somebody sends before TLS is established must not end the node
            return False
        return True

    def _handle_ended(self, accepted: socket.socket, handshake: asyncio.Task[bool]) -> None:
        self._handshakes.pop(handshake, None)
        if handshake.cancelled() or handshake.exception() is not None or not handshake.result():
            accepted.close()  # also one that was cancelled before it began
        if self._resume is not None and len(self._handshakes) < HANDSHAKES_MAX:
            self._go_on()

"""The HTTP server: accepts connections, enforces their limits and deadlines, and closes them.

Limits: a connection beyond `connections_max` replaces the one that has been idle longest; if none is idle, it may only
ask for exempt paths (health checks), in a small reserve whose oldest connection makes room for the next. A request
beyond `requests_max` gets 503; so does a body that would exceed `bodies_bytes_max` of all bodies together. Both are
decided when the headers are complete, before the body is kept. Only bytes that have arrived count, and a body that
makes no progress is dropped as soon as its room is needed. A client that is too slow to send a request, to send the
next one or to read a response is disconnected. One timer serves all deadlines.

Turns: a request that is not exempt is answered when it arrives, waits undecoded for its turn, or is refused, as
`quiver.turns` decides. So a node does as much under overload as before it, the queue of a busy topic delays only that
topic, and what nobody waits for any more is not done.

Life: `async with` binds the address; `serve` starts accepting; `close` stops accepting, answers the received requests,
and ends.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Hashable, Iterator
from email.utils import formatdate
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from quiver.clock import Clock
from quiver.config import GatewaySettings
from quiver.errors import ConfigError
from quiver.gateway.http.connection import HttpConnection, PlainConnection, TlsConnection
from quiver.gateway.http.messages import Application, HttpHead, HttpRefusal, HttpRequest, HttpResponse
from quiver.logs import facts
from quiver.security import ANONYMOUS, Principal
from quiver.tasks import TaskScope, timeout
from quiver.tls_acceptor import TlsAcceptor
from quiver.turns import TURN_STARTS, Flow, Turns
from quiver.wire.answer_memory import AnswerMemory

logger = logging.getLogger(__name__)

LINGER_MS = 2_000
"""How long a closing connection is drained, so that its last response arrives."""
RESERVED_CONNECTIONS = 64
"""Connections beyond `connections_max` that are accepted for exempt paths."""
STALLED_MS = 1_000
"""A body without progress for this long is dropped if its room is needed."""
DROPPED_AFTER_S = 1.0
"""A request that waited this long for its turn is refused: its client may have given up, and others have not."""
READ_BYTES = 64 * 1024
"""Bytes that are received from a connection with TLS at once: four records of the largest size."""
HANDSHAKE_TIMEOUT_S = 10.0
"""The longest time of a TLS handshake, while there is room for others."""
_TICK_S = 0.25
"""Interval of the deadline check."""
_BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""


class HttpStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the server."""

    address: str
    connections: int
    idle: int
    requests: int
    body_bytes: int
    accepted: int
    refused: int
    timed_out: int


OnAnswered = Callable[[HttpRequest, HttpResponse | None, float], None]
"""Called for each request with its response (None: the client disconnected) and its duration in seconds."""


class HttpServer:
    """Serve an application over HTTP/1.1. Use as ``async with``."""

    def __init__(
        self,
        application: Application,
        *,
        host: str,
        port: int,
        settings: GatewaySettings,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        on_answered: OnAnswered,
        turns: Turns | None = None,
        memory: AnswerMemory | None = None,
        principal_of: Callable[[HttpRequest], Principal] = lambda _: ANONYMOUS,
    ) -> None:
        """Prepare to listen; `turns` and `memory` are shared with the node's other servers.

        What clients do not read of their responses counts in `memory`, for the principal that `principal_of` tells.
        """
        self.application = application
        self.settings = settings
        self.address = (host, port)
        """The bound address; once entered, with the actual port if 0 was given."""
        self.idle: Deadlines[HttpConnection] = Deadlines(clock, timeout_ms=settings.idle_timeout_ms)
        self.receiving: Deadlines[HttpConnection] = Deadlines(clock, timeout_ms=settings.receive_timeout_ms)
        self.progressing: Deadlines[HttpConnection] = Deadlines(clock, timeout_ms=settings.body_progress_timeout_ms)
        """Connections whose request's body is arriving, by the time of their last progress."""
        self.sending: Deadlines[HttpConnection] = Deadlines(clock, timeout_ms=settings.send_timeout_ms)
        self._ending: Deadlines[HttpConnection] = Deadlines(clock, timeout_ms=LINGER_MS)
        self.memory = memory
        self.principal_of = principal_of
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        """What all connections with TLS receive into."""
        self._connections: set[HttpConnection] = set()
        self._reserved: dict[HttpConnection, None] = {}
        self._clock = clock
        self._tls = tls
        self._on_answered = on_answered
        self._server: asyncio.Server | TlsAcceptor | None = None
        self._tasks = TaskScope(self._end)
        self._grace_ms = 0
        self._tick: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._is_closing = False
        self._requests = 0
        self._body_bytes = 0
        self._accepted = 0
        self._refused = 0
        self._timed_out = 0
        self._date_s = -1
        self._date = b""
        self.turns = turns or Turns()
        self._overloaded = application.refuse(
            503, "overloaded", "not done: more requests arrive than this node can answer; retry later"
        )

    # Life.

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self.turns.bind(self.loop)
        host, port = self.address
        connection = PlainConnection if self._tls is None else TlsConnection
        try:
            self._server = await self._bind(lambda: connection(self), host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
        self.address = self._server.sockets[0].getsockname()[:2]
        await self._tasks.__aenter__()
        return self

    async def _bind(
        self, make_connection: Callable[[], HttpConnection], host: str, port: int
    ) -> asyncio.Server | TlsAcceptor:
        if self._tls is None:
            return await self.loop.create_server(make_connection, host, port, backlog=_BACKLOG, start_serving=False)
        acceptor = TlsAcceptor(
            make_connection, self._tls, tasks=self._tasks, clock=self._clock, timeout_s=HANDSHAKE_TIMEOUT_S
        )
        await acceptor.bind(host, port)
        return acceptor

    async def serve(self) -> None:
        """Start accepting."""
        if self._server is not None:
            await self._server.start_serving()
            self._schedule_tick()
            address = f"{self.address[0]}:{self.address[1]}"
            logger.info("http serving", extra=facts(address=address, tls=self._tls is not None))

    async def close(self, *, grace_ms: int) -> None:
        """Stop accepting, answer received requests, and end; abort what takes longer than `grace_ms`. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._is_closing = True
        for connection in tuple(self._connections):
            connection.close_when_idle()
        try:
            async with timeout(grace_ms / 1000):
                while self._connections:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            logger.warning(
                "http shutdown grace is over, aborting connections", extra=facts(connections=len(self._connections))
            )
        for connection in tuple(self._connections):
            connection.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grace_ms = 0 if error is not None else self.settings.shutdown_grace_ms
        await self._tasks.__aexit__(kind, error, trace)

    async def _end(self) -> None:
        try:
            await self.close(grace_ms=self._grace_ms)
        finally:
            if self._tick is not None:
                self._tick.cancel()

    def status(self) -> HttpStatus:
        """Return a snapshot."""
        return HttpStatus(
            address=f"{self.address[0]}:{self.address[1]}",
            connections=len(self._connections),
            idle=len(self.idle),
            requests=self._requests,
            body_bytes=self._body_bytes,
            accepted=self._accepted,
            refused=self._refused,
            timed_out=self._timed_out,
        )

    # Called by its connections.

    def handle_opened(self, connection: HttpConnection) -> bool:
        """Admit a connection; return False if it was refused."""
        self._accepted += 1
        self._connections.add(connection)
        if self._is_closing:
            connection.abort()
            return False
        if len(self._connections) - len(self._reserved) <= self.settings.connections_max:
            return True
        longest_idle = self.idle.oldest()
        if longest_idle is not None:
            self.idle.end(longest_idle)
            longest_idle.close_when_idle()
            return True
        if len(self._reserved) >= RESERVED_CONNECTIONS:
            next(iter(self._reserved)).abort()
        connection.reserve()
        self._reserved[connection] = None
        return True

    def handle_ending(self, connection: HttpConnection) -> None:
        """Start the drain deadline of a connection that sent its last response."""
        self._leave_states(connection)
        self._ending.begin(connection)

    def handle_closed(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self._leave_states(connection)
        self._ending.end(connection)
        self._connections.discard(connection)
        self._reserved.pop(connection, None)
        if not self._connections:
            self._emptied.set()

    def admit(self, head: HttpHead) -> HttpResponse | None:
        """Refuse a request by its headers, or return None; called before its body is kept."""
        if head.path in self.application.exempt_paths:
            return None
        if self._requests >= self.settings.requests_max:
            return self.application.refuse(503, "overloaded", "not done: too many requests are in flight; retry later")
        if head.length > 0 and self._body_bytes + head.length > self.settings.bodies_bytes_max:
            self._evict_stalled(head.length)
            if self._body_bytes + head.length > self.settings.bodies_bytes_max:
                message = "not done: too many request bytes are in memory; retry later"
                return self.application.refuse(503, "overloaded", message)
        return self.application.admit(head)

    def admit_reserved(self, head: HttpHead) -> HttpResponse | None:
        """Refuse a request on a connection beyond the limit, unless its path is exempt."""
        if head.path in self.application.exempt_paths:
            return None
        message = f"not done: the limit of {self.settings.connections_max} connections is reached; retry later"
        return self.application.refuse(503, "overloaded", message)

    def hold_body(self, size_bytes: int) -> bool:
        """Count body bytes that have arrived; return False at the limit."""
        if self._body_bytes + size_bytes > self.settings.bodies_bytes_max:
            self._evict_stalled(size_bytes)
            if self._body_bytes + size_bytes > self.settings.bodies_bytes_max:
                return False
        self._body_bytes += size_bytes
        return True

    def _evict_stalled(self, size_bytes: int) -> None:
        """Drop bodies that made no progress for a while until `size_bytes` fit, longest without progress first."""
        room_bytes = self.settings.bodies_bytes_max - size_bytes
        for connection in self.progressing.older_than(STALLED_MS):
            if self._body_bytes <= room_bytes:
                return
            if connection.held_bytes:
                self.progressing.end(connection)
                self._timed_out += 1
                message = "not done: the body arrived too slowly, and its room was needed; retry later"
                connection.refuse(HttpRefusal(503, "overloaded", message))

    def release_body(self, size_bytes: int) -> None:
        """Release what `hold_body` counted."""
        self._body_bytes -= size_bytes

    def take_turn(self, connection: HttpConnection, request: HttpRequest) -> HttpResponse | bool:
        """Count a request in; return whether it is answered now, or a refusal; otherwise it waits for its turn."""
        self._requests += 1
        turns = self.turns
        turns.starts += 1
        if turns.starts < TURN_STARTS or turns.may_start() or request.path in self.application.exempt_paths:
            return True
        principal, topic = self.application.flow_of(request)
        waiter = WaitingRequest(connection, request)
        is_long_poll = self.application.is_long_poll(request)
        if turns.wait(waiter, principal=principal, topic=topic, timeout_s=DROPPED_AFTER_S, is_long_poll=is_long_poll):
            return False
        self._refused += 1
        return self._refuse_turn()

    def _refuse_turn(self) -> HttpResponse:
        after_s = str(self.turns.retry_after_s)
        if self._overloaded.headers != (("Retry-After", after_s),):
            self._overloaded = msgspec.structs.replace(self._overloaded, headers=(("Retry-After", after_s),))
        return self._overloaded

    def drop(self, connection: HttpConnection) -> None:
        """Refuse the request of a connection that has waited too long for its turn."""
        self._refused += 1
        connection.refuse_turn(self._refuse_turn())

    def handle_refused(self) -> None:
        """Count a request in that was refused by its headers."""
        self._requests += 1
        self._refused += 1

    def answer(self, request: HttpRequest) -> HttpResponse | asyncio.Future[HttpResponse]:
        """Return the application's answer; never raises."""
        try:
            answer = self.application.handle(request)
        except Exception as error:  # noqa: BLE001 - one request must not end the node
            return self._fail(error)
        if isinstance(answer, HttpResponse | asyncio.Future):
            return answer
        return self._tasks.start(self._guard(answer))

    async def _guard(self, answer: Coroutine[Any, Any, HttpResponse]) -> HttpResponse:
        """Turn any error into a response: an exception would end the task scope and with it all other requests."""
        try:
            return await answer
        except Exception as error:  # noqa: BLE001 - as above
            return self._fail(error)

    def start_stream(self, sending: Coroutine[Any, Any, bool]) -> asyncio.Future[bool]:
        """Send the pieces of a response; the result is whether all of them were sent."""
        return self._tasks.start(self._guard_stream(sending))

    async def _guard_stream(self, sending: Coroutine[Any, Any, bool]) -> bool:
        try:
            return await sending
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return False

    def outcome(self, work: asyncio.Future[HttpResponse]) -> HttpResponse:
        """Return the response of finished work; never raises."""
        if work.cancelled():
            return self.application.refuse(503, "unavailable", "this node is stopping")
        error = work.exception()
        return work.result() if error is None else self._fail(error)

    def handle_answered(self, request: HttpRequest, response: HttpResponse | None, began_at: float) -> None:
        """Count a finished request and log it if the access log is on."""
        self._requests -= 1
        seconds = self.loop.time() - began_at
        self._on_answered(request, response, seconds)
        if self.settings.access_log:
            status = 0 if response is None else response.status
            about = facts(method=request.method, path=request.path, status=status, ms=round(seconds * 1000, 1))
            logger.info("http request", extra=about)

    def date_line(self) -> bytes:
        """Return the Date header; cached for a second."""
        now_s = self._clock.wall_ms() // 1000
        if now_s != self._date_s:
            self._date_s, self._date = now_s, f"Date: {formatdate(now_s, usegmt=True)}\r\n".encode()
        return self._date

    def _fail(self, error: BaseException) -> HttpResponse:
        logger.error("http request failed", exc_info=error)
        return self.application.refuse(500, "internal_error", "internal error; the node's log has the details")

    def _leave_states(self, connection: HttpConnection) -> None:
        for state in (self.idle, self.receiving, self.progressing, self.sending):
            state.end(connection)

    def _schedule_tick(self) -> None:
        self._tick = self.loop.call_later(_TICK_S, self._enforce)

    def _enforce(self) -> None:
        """Close connections whose deadline has passed."""
        self._schedule_tick()
        for connection in self.idle.pop_expired():
            connection.close_when_idle()
        for connection in self.receiving.pop_expired():
            self._timed_out += 1
            connection.refuse(HttpRefusal(408, "too_slow", "not done: the request took too long to arrive"))
        for connection in self.progressing.pop_expired():
            self._timed_out += 1
            connection.refuse(HttpRefusal(408, "too_slow", "not done: the request's body made no progress"))
        for connection in self.sending.pop_expired():
            self._timed_out += 1
            connection.abort()
        for connection in self._ending.pop_expired():
            connection.abort()
        if self.memory is not None:
            self.memory.evict_blocked(self.loop.time())


class WaitingRequest:
    """A request that waits for its turn on its connection."""

    __slots__ = ("_connection", "_request")

    def __init__(self, connection: HttpConnection, request: HttpRequest) -> None:
        self._connection = connection
        self._request = request

    @property
    def is_waiting(self) -> bool:
        """Whether its client is still connected."""
        return self._connection.is_waiting_with(self._request)

    def begin_turn(self, flow: Flow | None) -> None:
        """Answer it."""
        self._connection.begin_turn(flow)

    def drop_turn(self) -> None:
        """Refuse it."""
        self._connection.drop_turn()


C = TypeVar("C", bound=Hashable)


class Deadlines(Generic[C]):
    """Items in one state, each with its deadline.

    All items of a state have the same timeout, so insertion order is deadline order: a dict is enough, and a check
    reads only expired items and the first other. Ten thousand idle connections cost memory but no CPU.
    """

    def __init__(self, clock: Clock, *, timeout_ms: int) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._until_ms: dict[C, int] = {}

    def __len__(self) -> int:
        return len(self._until_ms)

    def __iter__(self) -> Iterator[C]:
        """Iterate over a copy, longest in the state first."""
        return iter(tuple(self._until_ms))

    def __contains__(self, item: object) -> bool:
        return item in self._until_ms

    def begin(self, item: C) -> None:
        """Add an item with a fresh deadline; restarts the deadline of one that is present."""
        self._until_ms.pop(item, None)
        self._until_ms[item] = self._clock.monotonic_ms() + self._timeout_ms

    def end(self, item: C) -> None:
        """Remove an item; no error if it is not present."""
        self._until_ms.pop(item, None)

    def oldest(self) -> C | None:
        """Return the item that has been in the state longest."""
        return next(iter(self._until_ms), None)

    def older_than(self, age_ms: int) -> list[C]:
        """Return the items that have been in the state for at least `age_ms`, longest first."""
        until_ms_max = self._clock.monotonic_ms() + self._timeout_ms - age_ms
        return [item for item, until_ms in self._until_ms.items() if until_ms <= until_ms_max]

    def pop_expired(self) -> list[C]:
        """Remove and return the expired items."""
        now_ms = self._clock.monotonic_ms()
        expired: list[C] = []
        for item, until_ms in self._until_ms.items():
            if until_ms > now_ms:
                break
            expired.append(item)
        for item in expired:
            del self._until_ms[item]
        return expired

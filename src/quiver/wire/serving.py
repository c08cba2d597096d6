"""The server of requests: runs a handler for each, holds all of them to bounds, and ends in good order.

It owns the tasks in which handlers run and the sessions that requests come from. What a request means is the handler's
business. A handler may raise any error of `quiver.errors`; anything else that it raises is a bug, which is logged and
answered with `internal_error`, and does not end the node.

Two bounds, two answers. What one connection has under way is bounded by not reading from it: its owner has to wait.
What all clients have under way is bounded by refusing more with `overloaded` before anything is done, so that they
learn of it while they still have time. Nodes are exempt from the latter: what keeps the cluster alive is never shed.

Invariant: every request that was read is answered exactly once, unless its connection ends first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from quiver.clock import Clock
from quiver.config import WireSettings
from quiver.errors import (
    NotAllowedError,
    OutcomeUnknownError,
    OverloadedError,
    QuiverError,
    UnavailableError,
    invariant,
)
from quiver.logs import facts
from quiver.model import Buffer, NodeId
from quiver.tasks import TaskScope, timeout
from quiver.wire.connection import Connection
from quiver.wire.envelope import ErrorInfo, IncomingRequest, describe_error, encode_failure, encode_response
from quiver.wire.handshake import HandshakeRefusal, RefusalCode, RequesterHello, refuse
from quiver.wire.messages import AnyRequest
from quiver.wire.requests import Response, request_name
from quiver.wire.session import RequestSession
from quiver.wire.status import ServerStatus

logger = logging.getLogger(__name__)

WAIT_SHARE = 0.8
"""Share of a request's remaining time that its handler may spend on waiting."""
EXPIRY_PERIOD_MS = 50
"""Granularity at which calls are ended whose time is over: their callers have timers of their own."""
OVERLOAD_RETRY_AFTER_MS = 100
"""When a client that was refused at a bound may try again."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request, and until when it waits for the answer."""

    name: str
    """What a client calls itself: for people, never to be relied on."""
    address: str
    deadline_ms: int
    """When its time is over, by the monotonic clock of the node that was asked."""
    node: NodeId | None = None
    """The node that asks; None for a client."""

    @property
    def is_node(self) -> bool:
        """Tell whether a node of the cluster asks."""
        return self.node is not None

    def remaining_ms(self, now_ms: int) -> int:
        """Return how much time is left at `now_ms` of the monotonic clock; 0 once it is over."""
        return max(0, self.deadline_ms - now_ms)

    def wait_ms(self, now_ms: int) -> float:
        """Return how long its handler may wait for something; the rest is for the answer to arrive in time."""
        return self.remaining_ms(now_ms) * WAIT_SHARE


Answer = tuple[Response, Sequence[Buffer]]
"""A response and its payload in parts, which must not change any more."""
RequestHandler = Callable[[Caller, Any, memoryview], Awaitable[Answer]]
"""Carry out a request of one type; raises errors of `quiver.errors`."""
Handler = Callable[[Caller, AnyRequest, memoryview], Awaitable[Answer]]
"""Carry out a request, whose payload may be kept and never changes; return the response and its payload in parts.

Parts must not change any more. The handler is cancelled when the caller's time is over, when its connection ends, and
when the server stops; it shields what must not be left half done.
"""


class Call:
    """One request under way."""

    __slots__ = ("asked", "caller", "end_code", "is_begun", "request", "session", "size_bytes", "task")

    def __init__(self, session: RequestSession, asked: IncomingRequest, request: AnyRequest, size_bytes: int) -> None:
        self.session = session
        self.asked = asked
        self.request = request
        self.size_bytes = size_bytes
        self.is_begun = False
        self.end_code = ""
        """Why it is ended before its time; empty if it is not."""
        self.caller: Caller
        self.task: asyncio.Task[None]

    def end(self, code: str) -> None:
        """Stop the handler; one that has not begun never will."""
        self.end_code = self.end_code or code
        # A task that is cancelled before its first step would never answer.
        if self.is_begun:
            self.task.cancel()

    def end_error(self) -> QuiverError:
        """Return what is true of a request that was ended: not done, or perhaps."""
        name = request_name(self.request)
        if not self.is_begun or self.request.is_read:
            return UnavailableError(f"{name} was not done: {self.end_code}", code=self.end_code)
        return OutcomeUnknownError(f"{name} was perhaps done: {self.end_code}", code=self.end_code)


class RequestServer:
    """Answer requests with a handler. Use as ``async with``; give it to a `PeerNetwork`, whose port it shares.

    Until `start` says who handles requests, and again once it closes, they are refused as `not_serving`.
    """

    def __init__(self, *, settings: WireSettings, clock: Clock) -> None:
        self.settings = settings
        self.bytes = 0
        """Of clients' requests under way and unsent responses; sessions keep it true."""
        self._clock = clock
        self._handler: Handler | None = None
        self._is_closed = False
        self._client_sessions: set[RequestSession] = set()
        self._node_sessions: set[RequestSession] = set()
        self._client_requests = 0
        self._begun = 0
        self._refused = 0
        self._failed = 0
        self._loop: asyncio.AbstractEventLoop
        self._tasks = TaskScope(self.close)
        self._calls: set[Call] = set()
        self._expiries: dict[int, set[Call]] = {}
        """The calls under way by the period of `EXPIRY_PERIOD_MS` in which their time is over."""
        self._sweep: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None
        self._crashed: asyncio.Future[None]
        self._watcher: asyncio.Task[None]

    # Life.

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._crashed = self._loop.create_future()
        await self._tasks.__aenter__()
        self._watcher = self._tasks.start(self._watch_crash())
        return self

    def start(self, handler: Handler) -> None:
        """Begin to hand requests to `handler`."""
        invariant(self._handler is None, "a server is started only once")
        self._handler = handler

    async def close(self, grace_ms: int = 0) -> None:
        """Take no more requests, answer those under way for up to `grace_ms`, end the others, end all connections."""
        self._is_closed = True
        self._watcher.cancel()
        with suppress(TimeoutError):
            async with timeout(grace_ms / 1000):
                await self._wait_idle()
        for call in tuple(self._calls):
            call.end("stopping")
        # What a handler does on being cancelled is bounded by nothing but the handler.
        await self._wait_idle()
        if self._sweep is not None:
            self._sweep.cancel()
        sessions = (*self._client_sessions, *self._node_sessions)
        for session in sessions:
            session.close("the node stops")
        await asyncio.gather(*(session.wait_closed() for session in sessions))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    def status(self) -> ServerStatus:
        """Return a snapshot."""
        return ServerStatus(
            client_connections=len(self._client_sessions),
            node_connections=len(self._node_sessions),
            requests=len(self._calls),
            requests_bytes=self.bytes,
            requests_begun=self._begun,
            requests_refused=self._refused,
            handlers_failed=self._failed,
        )

    # Sessions.

    def admit(self, connection: Connection, hello: RequesterHello) -> RequestSession | HandshakeRefusal:
        """Return a session for a connection whose hello was accepted, or why there is none."""
        if self._handler is None or self._is_closed:
            return refuse(RefusalCode.NOT_SERVING, "no requests are taken now")
        sessions, bound = self._client_sessions, self.settings.client_connections_max
        if hello.node is not None:
            sessions, bound = self._node_sessions, self.settings.connections_max
        if len(sessions) >= bound:
            return refuse(RefusalCode.TOO_MANY_CONNECTIONS, f"{len(sessions)} others are connected")
        session = RequestSession(self, connection, hello)
        sessions.add(session)
        return session

    def handle_session_closed(self, session: RequestSession) -> None:
        """Forget a session."""
        self._client_sessions.discard(session)
        self._node_sessions.discard(session)

    # Requests.

    def take(self, session: RequestSession, asked: IncomingRequest, size_bytes: int) -> None:
        """Begin to carry out a request, or refuse it."""
        request = self._check(session, asked)
        if isinstance(request, QuiverError):
            self._refused += 1
            session.answer(encode_failure(asked.correlation_id, describe_error(request)))
            return
        call = Call(session, asked, request, size_bytes)
        call.caller = Caller(
            name=session.caller_name,
            address=session.address,
            deadline_ms=self._clock.monotonic_ms() + asked.timeout_ms,
            node=session.node,
        )
        self._begun += 1
        self._calls.add(call)
        if session.node is None:
            self._client_requests += 1
        session.begin(call)
        self._expiries.setdefault(call.caller.deadline_ms // EXPIRY_PERIOD_MS, set()).add(call)
        if self._sweep is None:
            self._schedule_sweep()
        # A bare task: `_run` reports its own crash, and a group's callback for each request has a measurable cost.
        call.task = self._loop.create_task(self._run(call))

    def _check(self, session: RequestSession, asked: IncomingRequest) -> AnyRequest | QuiverError:
        request = asked.request
        if isinstance(request, QuiverError):
            return request
        if request.is_for_nodes and session.node is None:
            return NotAllowedError(f"{request_name(request)} is for nodes only")
        if self._is_closed:
            return UnavailableError("the node stops", code="stopping")
        if asked.timeout_ms == 0:
            return UnavailableError("the time was over when it arrived", code="timed_out")
        return request if session.node is not None else self._refuse_overload() or request

    def _refuse_overload(self) -> OverloadedError | None:
        if self._client_requests >= self.settings.requests_max:
            sentence = f"{self._client_requests} requests are under way"
        elif self.bytes >= self.settings.requests_bytes_max:
            sentence = f"{self.bytes} bytes of requests and responses are held"
        else:
            return None
        return OverloadedError(sentence, retry_after_ms=OVERLOAD_RETRY_AFTER_MS)

    async def _run(self, call: Call) -> None:
        try:
            try:
                if call.end_code:
                    raise call.end_error()
                call.is_begun = True
                assert self._handler is not None
                response, parts = await self._handler(call.caller, call.request, call.asked.payload)
                answer = encode_response(call.asked.correlation_id, call.request, response, parts)
                if sum(map(len, answer)) > self.settings.frame_bytes_max:
                    raise ValueError("a response that no frame can carry")
            except BaseException as error:  # noqa: BLE001 - what is not an answer is raised again
                answer = self._encode_failure(call, error)
            finally:
                self._finish(call)
            call.session.answer(answer)
        except Exception as error:
            if not self._crashed.done():
                self._crashed.set_exception(error)
            raise

    def _finish(self, call: Call) -> None:
        self._calls.discard(call)
        period = call.caller.deadline_ms // EXPIRY_PERIOD_MS
        expiring = self._expiries.get(period)
        if expiring is not None:
            expiring.discard(call)
            if not expiring:
                del self._expiries[period]
        if call.session.node is None:
            self._client_requests -= 1
        call.session.finish(call)
        if not self._calls and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _encode_failure(self, call: Call, error: BaseException) -> list[Buffer]:
        """Return the answer to a request whose handler raised `error`; raise it again if this server is cancelled."""
        correlation_id = call.asked.correlation_id
        if isinstance(error, QuiverError):
            return encode_failure(correlation_id, describe_error(error))
        if isinstance(error, asyncio.CancelledError):
            if not call.end_code and call.task.cancelling():
                raise error
            # A handler that was not cancelled waited for something that was.
            call.end_code = call.end_code or "cancelled"
            return encode_failure(correlation_id, describe_error(call.end_error()))
        if not isinstance(error, Exception):
            raise error
        self._failed += 1
        extra = facts(request=request_name(call.request))
        logger.error("request handler failed", exc_info=error, extra=extra)
        return encode_failure(correlation_id, _describe_bug(error, call.request))

    # Deadlines: requests have all kinds of timeouts, and a timer for each costs more than the rest of a small request.

    def _schedule_sweep(self) -> None:
        self._sweep = self._loop.call_later(EXPIRY_PERIOD_MS / 1000, self._end_expired)

    def _end_expired(self) -> None:
        """End the calls whose time is over; run periodically while there are calls."""
        period = self._clock.monotonic_ms() // EXPIRY_PERIOD_MS
        for expired in [key for key in self._expiries if key < period]:
            for call in tuple(self._expiries.pop(expired)):
                call.end("timed_out")
        self._sweep = None
        if self._expiries:
            self._schedule_sweep()

    async def _wait_idle(self) -> None:
        """Wait until no call is under way."""
        while self._calls:
            self._idle = self._loop.create_future()
            await self._idle

    async def _watch_crash(self) -> None:
        """Raise the error of a call's task that crashed outside of its handler, which ends this server's owner."""
        await self._crashed


def _describe_bug(error: Exception, request: AnyRequest) -> ErrorInfo:
    """Return what the caller is told of a bug: by its name alone, and that what it asked for may have been done."""
    shown = QuiverError(f"the node failed: {type(error).__name__}", code="internal_error")
    return describe_error(shown, outcome="not_done" if request.is_read else "unknown")

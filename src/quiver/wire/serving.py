"""The request server: runs a handler for each request, enforces limits, and shuts down gracefully.

It owns the tasks in which handlers run, and the sessions that requests arrive on. It does not interpret requests. A
handler may raise any error of `quiver.errors`; any other exception is a bug, which is logged and answered with
`internal_error`, and does not end the node.

There are two limits. Requests in flight on one connection are limited by not reading from it, so that its sender has to
wait. Requests in flight of all clients together are limited by refusing more with `overloaded` before anything is done,
so that clients can retry within their deadline; each principal has its share of the limit.

When more requests arrive than the loop can do, they wait for their turn (`quiver.turns`), by principal and then by
topic. A request whose deadline passes meanwhile, or whose caller cancels or disconnects, is answered *not done* without
having begun. Nodes have no limit and no turns: traffic that keeps the cluster alive is never shed.

Invariant: every request that was read is answered exactly once, unless its connection ends first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from quiver.metrics import CodeCounter
from quiver.model import Buffer, NodeId
from quiver.security import Principal
from quiver.security.identity import ConnectionIdentity
from quiver.tasks import TaskScope, timeout
from quiver.turns import TURN_STARTS, Flow, Turns
from quiver.wire.answer_memory import REQUESTS_FACTOR, AnswerMemory, make_answer_memory
from quiver.wire.connection import Connection
from quiver.wire.envelope import ErrorInfo, IncomingRequest, describe_error, encode_failure, encode_response
from quiver.wire.handshake import HandshakeRefusal, RefusalCode, RequesterHello, refuse
from quiver.wire.messages import AnyRequest
from quiver.wire.requests import ANSWER_BYTES_MIN, Response, request_name
from quiver.wire.security_messages import AUTHENTICATIONS
from quiver.wire.session import RequestSession

logger = logging.getLogger(__name__)

UNLIMITED = (1 << 63) - 1
"""The memory of callers that have no limit."""
WAIT_SHARE = 0.8
"""Share of a request's remaining time that its handler may spend on waiting."""
EXPIRY_PERIOD_MS = 50
"""Interval at which expired calls are ended. It can be coarse: callers have timers of their own."""
OVERLOAD_RETRY_AFTER_MS = 100
"""Time after which a client that was refused as overloaded may retry."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request, and its deadline."""

    name: str
    """The name in the client's hello: for logs, not verified."""
    address: str
    deadline_ms: int
    """The request's deadline, by the receiving node's monotonic clock."""
    node: NodeId | None = None
    """The sending node; None for a client."""
    identity: ConnectionIdentity = msgspec.field(default_factory=ConnectionIdentity)
    """Who the connection speaks for; the same object for all requests of a connection."""
    correlation_id: int = 0
    """The number of the request on its connection; 0 inside the process."""
    memory: Callable[[int], Awaitable[None]] | None = None
    """Waits for the memory of an answer; None: without a limit, as for requests inside the process."""

    @property
    def principal(self) -> Principal:
        """The principal that the connection speaks for."""
        return self.identity.principal

    @property
    def is_node(self) -> bool:
        """Whether the sender is a node of the cluster."""
        return self.node is not None

    async def reserve(self, size_bytes: int) -> int:
        """Reserve memory for the answer before it is read; wait for it until the deadline; return how much it is.

        A larger reservation replaces the one before: what was read for that must have been dropped.
        """
        if self.memory is None:
            return UNLIMITED
        reserved_bytes = max(size_bytes, ANSWER_BYTES_MIN)
        await self.memory(reserved_bytes)
        return reserved_bytes

    def remaining_ms(self, now_ms: int) -> int:
        """Return the time left at `now_ms` of the monotonic clock; 0 after the deadline."""
        return max(0, self.deadline_ms - now_ms)

    def wait_ms(self, now_ms: int) -> float:
        """Return how long the handler may wait; the rest is reserved so that the answer arrives in time."""
        return self.remaining_ms(now_ms) * WAIT_SHARE


Answer = tuple[Response, Sequence[Buffer]]
"""A response and its payload in parts, which must not change any more."""
RequestHandler = Callable[[Caller, Any, memoryview], Awaitable[Answer]]
"""Handle requests of one type; raises errors of `quiver.errors`."""
Handler = Callable[[Caller, AnyRequest, memoryview], Awaitable[Answer]]
"""Handle a request, whose payload may be kept and never changes; return the response and its payload in parts.

Parts must not change any more. The handler is cancelled when the request's deadline passes, when its connection ends,
and when the server stops; it shields work that must not be interrupted.
"""


class ServerCall:
    """One request in flight on the server."""

    __slots__ = (
        "caller",
        "end_code",
        "flow",
        "incoming",
        "is_begun",
        "is_waiting",
        "may_be_late",
        "request",
        "reserved",
        "session",
        "size_bytes",
        "task",
    )

    def __init__(
        self, session: RequestSession, incoming: IncomingRequest, request: AnyRequest, size_bytes: int
    ) -> None:
        self.session = session
        self.incoming = incoming
        self.request = request
        self.size_bytes = size_bytes
        self.reserved = 0
        """Bytes of its answer that are reserved."""
        self.is_begun = False
        self.is_waiting = False
        """Whether it waits for its turn; it has no task then."""
        self.may_be_late = False
        """Whether so much was started before it that its deadline may pass before it begins."""
        self.flow: Flow | None = None
        """What counts it as under way, if it waited for its turn."""
        self.end_code = ""
        """Why it was ended early; empty if it was not."""
        self.caller: Caller
        self.task: asyncio.Task[None]

    async def reserve(self, size_bytes: int) -> None:
        """Wait for the memory of the answer and reserve it, in place of what was reserved before."""
        if size_bytes > self.reserved:
            await self.session.reserve(self, size_bytes)

    def end(self, code: str) -> None:
        """Cancel the handler; one that has not begun never starts."""
        self.end_code = self.end_code or code
        if self.is_waiting:
            self.is_waiting = False
            self.session.server.drop_call(self)
            return
        # A task that is cancelled before its first step would never answer.
        if self.is_begun:
            self.task.cancel()

    def begin_turn(self, flow: Flow | None) -> None:
        """Start the handler after a wait."""
        self.is_waiting = False
        self.flow = flow
        self.session.server.start_call(self)

    def drop_turn(self) -> None:
        """End the call: its deadline passed while it waited for its turn."""
        self.end("timed_out")

    def end_error(self) -> QuiverError:
        """Return the error of a call that was ended: not done, or outcome unknown."""
        name = request_name(self.request)
        if not self.is_begun or self.request.is_read:
            return UnavailableError(f"{name} was not done: {self.end_code}", code=self.end_code)
        return OutcomeUnknownError(f"{name} may have been done: {self.end_code}", code=self.end_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A node's request server; counts are since process start."""

    client_connections: int
    node_connections: int
    requests: int
    """In flight now."""
    requests_bytes: int
    """Bytes of clients' requests in flight, and of responses to them that are reserved or not sent."""
    waiting: int
    """Requests that wait for memory for their response."""
    queued: int
    """Requests that wait for their turn, those of the gateway included."""
    throttled: int
    """Connections that are not read for a while because they were refused, those of the gateway included."""
    requests_begun: int
    requests_refused: int
    """Refused before a handler saw them."""
    handlers_failed: int
    """Ended by an exception outside `quiver.errors`: bugs."""
    errors: Mapping[str, int]
    """Requests answered with an error, by its code."""


class RequestServer:
    """Answer requests with a handler. Use as ``async with``; give it to a `PeerNetwork`, whose port it shares.

    Before `start` and after `close`, requests are refused as `not_serving`.
    """

    def __init__(
        self,
        *,
        settings: WireSettings,
        clock: Clock,
        turns: Turns | None = None,
        memory: AnswerMemory | None = None,
    ) -> None:
        """Prepare to serve; `turns` and `memory` are shared with the node's other servers."""
        self.settings = settings
        self.turns = turns or Turns()
        """Decides when requests of clients are started."""
        self.memory = memory or make_answer_memory(settings)
        """The bytes of clients' requests in flight and of their answers; sessions update it."""
        self._clock = clock
        self._handler: Handler | None = None
        self._is_closed = False
        self._client_sessions: set[RequestSession] = set()
        self._node_sessions: set[RequestSession] = set()
        self._client_requests = 0
        self._begun = 0
        self._refused = 0
        self._failed = 0
        self._errors = CodeCounter()
        self._loop: asyncio.AbstractEventLoop
        self._tasks = TaskScope(self.close)
        self._calls: set[ServerCall] = set()
        self._expiries: dict[int, set[ServerCall]] = {}
        """The calls in flight, by the period of `EXPIRY_PERIOD_MS` that contains their deadline."""
        self._sweep: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None
        self._crashed: asyncio.Future[None]
        self._watcher: asyncio.Task[None]

    # Life.

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.turns.bind(self._loop)
        self._crashed = self._loop.create_future()
        await self._tasks.__aenter__()
        self._watcher = self._tasks.start(self._watch_crash())
        return self

    def start(self, handler: Handler) -> None:
        """Start passing requests to `handler`."""
        invariant(self._handler is None, "a server is started only once")
        self._handler = handler

    async def close(self, grace_ms: int = 0) -> None:
        """Accept no more requests, finish those in flight for up to `grace_ms`, end the rest, close all connections."""
        self._is_closed = True
        self._watcher.cancel()
        with suppress(TimeoutError):
            async with timeout(grace_ms / 1000):
                await self._wait_idle()
        for call in tuple(self._calls):
            call.end("stopping")
        # No timeout: a cancelled handler ends by itself, and what it shields must be finished.
        await self._wait_idle()
        if self._sweep is not None:
            self._sweep.cancel()
        sessions = (*self._client_sessions, *self._node_sessions)
        for session in sessions:
            session.close("the node is stopping")
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
            requests_bytes=self.memory.bytes,
            waiting=self.memory.waiting,
            queued=self.turns.waiting,
            throttled=self.turns.penalized,
            requests_begun=self._begun,
            requests_refused=self._refused,
            handlers_failed=self._failed,
            errors=dict(self._errors.counts),
        )

    # Sessions.

    def admit(self, connection: Connection, hello: RequesterHello) -> RequestSession | HandshakeRefusal:
        """Return a session for a connection whose hello was accepted, or a refusal."""
        if self._handler is None or self._is_closed:
            return refuse(RefusalCode.NOT_SERVING, "this node accepts no requests now; it is starting or stopping")
        sessions, bound = self._client_sessions, self.settings.client_connections_max
        if hello.node is not None:
            sessions, bound = self._node_sessions, self.settings.connections_max
        if len(sessions) >= bound and not (hello.node is None and self._close_idle()):
            return refuse(
                RefusalCode.TOO_MANY_CONNECTIONS, f"{len(sessions)} others are connected, at most {bound} may be"
            )
        session = RequestSession(self, connection, hello)
        sessions.add(session)
        return session

    def _close_idle(self) -> bool:
        """Close the client's connection that has been idle longest, to make room; return whether there was one."""
        idle = min((session for session in self._client_sessions if not session.is_busy), key=_idle_since, default=None)
        if idle is None:
            return False
        self._client_sessions.discard(idle)
        idle.close("it was idle, and others need the connection")
        return True

    def handle_session_closed(self, session: RequestSession) -> None:
        """Remove a session."""
        self._client_sessions.discard(session)
        self._node_sessions.discard(session)

    # Requests.

    def handle_request(self, session: RequestSession, incoming: IncomingRequest, size_bytes: int) -> None:
        """Start the handler of a request, let it wait for its turn, or refuse it."""
        request = self._check(session, incoming)
        if isinstance(request, QuiverError):
            self._refuse(session, incoming, request)
            return
        call = ServerCall(session, incoming, request, size_bytes)
        if session.node is None:
            turns = self.turns
            turns.starts += 1
            if turns.starts >= TURN_STARTS:
                call.may_be_late = True
                if not turns.may_start() and not self._wait_turn(call):
                    self._refuse(session, incoming, self._overloaded(session))
                    session.penalize()
                    return
            self._client_requests += 1
        call.caller = Caller(
            name=session.caller_name,
            address=session.address,
            deadline_ms=self._clock.monotonic_ms() + incoming.timeout_ms,
            node=session.node,
            identity=session.identity,
            correlation_id=incoming.correlation_id,
            memory=call.reserve if session.node is None else None,
        )
        self._begun += 1
        self._calls.add(call)
        session.begin(call)
        self._expiries.setdefault(call.caller.deadline_ms // EXPIRY_PERIOD_MS, set()).add(call)
        if self._sweep is None:
            self._schedule_sweep()
        if not call.is_waiting:
            self.start_call(call)

    def start_call(self, call: ServerCall) -> None:
        """Run the handler of a call."""
        # A bare task: `_run` reports its own crash, and a group's callback for each request has a measurable cost.
        call.task = self._loop.create_task(self._run(call))

    def drop_call(self, call: ServerCall) -> None:
        """Answer a call that has ended while it waited for its turn."""
        self._errors.add(call.end_code)
        self._finish(call)
        call.session.answer(encode_failure(call.incoming.correlation_id, describe_error(call.end_error())))

    def _wait_turn(self, call: ServerCall) -> bool:
        """Let a request wait for its turn; return False if too many of its kind do."""
        principal = call.session.identity.principal
        # Strangers who send much must not keep others from proving who they are.
        name = f"host {call.session.host}" if type(call.request) in AUTHENTICATIONS else str(principal)
        timeout_s = call.incoming.timeout_ms / 1000
        is_long_poll = call.request.is_long_poll
        call.is_waiting = self.turns.wait(
            call, principal=name, topic=_topic_of(call.request), timeout_s=timeout_s, is_long_poll=is_long_poll
        )
        return call.is_waiting

    def _refuse(self, session: RequestSession, incoming: IncomingRequest, error: QuiverError) -> None:
        self._refused += 1
        self._errors.add(error.code)
        session.answer(encode_failure(incoming.correlation_id, describe_error(error)))

    def _check(self, session: RequestSession, incoming: IncomingRequest) -> AnyRequest | QuiverError:
        request = incoming.request
        if isinstance(request, QuiverError):
            return request
        if self._is_closed:
            return UnavailableError("not done: the node is stopping", code="stopping")
        if incoming.timeout_ms == 0:
            return UnavailableError("not done: the request arrived after its deadline", code="timed_out")
        if session.node is not None:
            return request
        if request.is_for_nodes or request.is_forwarded:
            how = "as forwarded " if not request.is_for_nodes else ""
            return NotAllowedError(f"not done: {request_name(request)} is {how}for nodes only")
        settings, account, principal = self.settings, session.account, session.identity.principal
        if account.principal is not principal and account.principal != principal:
            account = session.change_account()
        # What is free shrinks with what all have in flight: nobody can take the last of it.
        if account.requests >= REQUESTS_FACTOR * (
            settings.requests_max - self._client_requests
        ) or account.bytes > REQUESTS_FACTOR * (settings.requests_bytes_max - self.memory.bytes):
            return self._over_limit()
        return request

    def _over_limit(self) -> OverloadedError:
        """Return the refusal of a request at a limit of what is in flight; make room for the next one."""
        settings = self.settings
        self.memory.evict_blocked(self._loop.time())
        return OverloadedError(
            f"not done: clients have {self._client_requests} requests of at most {settings.requests_max} and "
            f"{self.memory.bytes} bytes of at most {settings.requests_bytes_max} in flight, and this one's principal "
            "has its share; retry later",
            retry_after_ms=OVERLOAD_RETRY_AFTER_MS,
        )

    def _overloaded(self, session: RequestSession) -> OverloadedError:
        """Return the refusal of a request that would wait too long for its turn."""
        message = f"not done: more requests of {session.identity.principal} arrive than this node can do; retry later"
        return OverloadedError(message, retry_after_ms=self.turns.retry_after_s * 1000)

    async def _run(self, call: ServerCall) -> None:
        try:
            try:
                if call.may_be_late and self._clock.monotonic_ms() >= call.caller.deadline_ms:
                    call.end("timed_out")
                if call.end_code:
                    raise call.end_error()
                call.is_begun = True
                assert self._handler is not None
                response, parts = await self._handler(call.caller, call.request, call.incoming.payload)
                answer = encode_response(
                    call.incoming.correlation_id, call.request, response, parts, level=call.session.level
                )
                if sum(map(len, answer)) > self.settings.frame_bytes_max:
                    raise ValueError("the response is larger than a frame may be")
            except BaseException as error:  # noqa: BLE001 - `_encode_failure` raises it again if it is no answer
                answer = self._encode_failure(call, error)
            finally:
                self._finish(call)
            call.session.answer(answer)
        except Exception as error:
            if not self._crashed.done():
                self._crashed.set_exception(error)
            raise

    def _finish(self, call: ServerCall) -> None:
        self._calls.discard(call)
        period = call.caller.deadline_ms // EXPIRY_PERIOD_MS
        expiring = self._expiries.get(period)
        if expiring is not None:
            expiring.discard(call)
            if not expiring:
                del self._expiries[period]
        if call.session.node is None:
            self._client_requests -= 1
            if call.flow is not None:
                self.turns.end_work(call.flow)
        call.session.finish(call)
        # The two refer to each other: the payload would stay in memory until the next garbage collection.
        del call.caller
        if not self._calls and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _encode_failure(self, call: ServerCall, error: BaseException) -> list[Buffer]:
        """Return the answer to a request whose handler raised `error`; raise it again if this server is cancelled."""
        correlation_id = call.incoming.correlation_id
        if isinstance(error, QuiverError):
            self._errors.add(error.code)
            return encode_failure(correlation_id, describe_error(error))
        if isinstance(error, asyncio.CancelledError):
            if not call.end_code and call.task.cancelling():
                raise error
            # A handler that was not cancelled waited for something that was.
            call.end_code = call.end_code or "cancelled"
            self._errors.add(call.end_code)
            return encode_failure(correlation_id, describe_error(call.end_error()))
        if not isinstance(error, Exception):
            raise error
        self._failed += 1
        extra = facts(request=request_name(call.request))
        logger.error("request handler failed", exc_info=error, extra=extra)
        return encode_failure(correlation_id, _describe_bug(error, call.request))

    # Deadlines: one periodic sweep, because a timer per request costs more than the rest of a small request.

    def _schedule_sweep(self) -> None:
        self._sweep = self._loop.call_later(EXPIRY_PERIOD_MS / 1000, self._end_expired)

    def _end_expired(self) -> None:
        """End the calls whose deadline has passed; runs periodically while there are calls."""
        period = self._clock.monotonic_ms() // EXPIRY_PERIOD_MS
        for expired in [key for key in self._expiries if key < period]:
            for call in tuple(self._expiries.pop(expired)):
                call.end("timed_out")
        self._sweep = None
        if self._expiries:
            self._schedule_sweep()

    async def _wait_idle(self) -> None:
        """Wait until no call is in flight."""
        while self._calls:
            self._idle = self._loop.create_future()
            await self._idle

    async def _watch_crash(self) -> None:
        """Raise the error of a call's task that crashed outside its handler, which ends this server's owner."""
        await self._crashed


def _topic_of(request: AnyRequest) -> str:
    """Return the topic by which a request waits for its turn: a name, or an id."""
    topic: object = getattr(request, "topic", "")
    return topic if isinstance(topic, str) and topic else f"#{getattr(request, 'topic_id', '')}"


def _idle_since(session: RequestSession) -> float:
    return session.idle_since


def _describe_bug(error: Exception, request: AnyRequest) -> ErrorInfo:
    """Return the error for the caller of a handler that crashed: the exception's name only; the outcome is unknown."""
    shown = QuiverError(f"the node failed: {type(error).__name__}", code="internal_error")
    return describe_error(shown, outcome="not_done" if request.is_read else "unknown")

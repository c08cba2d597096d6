"""One outgoing connection for requests: many in flight concurrently, each answered by its correlation id.

It owns the unanswered requests and the unsent ones. At its limits callers wait; nothing is dropped. A call that ends
without an answer raises an error that states the outcome correctly: *not done* if the request was not completely sent,
*unknown* if it was, except for a read, which can always be repeated.

A request is in flight, and counts towards the limits, until it is answered, even if its caller no longer waits: the
limits bound the work of the other side. The connection has no task of its own: a response sets the future that its
caller awaits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from quiver.config import WireSettings
from quiver.errors import DecodeError, OutcomeUnknownError, QuiverError, TooLargeError, UnavailableError
from quiver.features import LEVEL_MIN
from quiver.model import Buffer
from quiver.tasks import timeout_at
from quiver.wire.connection import Connection
from quiver.wire.envelope import (
    IncomingResponse,
    decode_body,
    decode_response,
    encode_cancel,
    encode_request,
    restore_error,
)
from quiver.wire.frames import Frame, FrameKind
from quiver.wire.handshake import (
    HandshakeRefusal,
    Hello,
    RefusalCode,
    RequesterHello,
    check_server_hello,
    decode_refusal,
    refuse,
)
from quiver.wire.outbox import FLUSH_FRAMES, Outbox
from quiver.wire.proving import DiallingHandshake, NodeSecret
from quiver.wire.requests import Request, Response, request_name

R = TypeVar("R", bound=Response)


class _Pending:
    """An unanswered request, whether or not its caller still waits."""

    __slots__ = ("future", "number", "request", "size_bytes")

    def __init__(
        self, future: asyncio.Future[IncomingResponse], request: Request[Any], number: int, size_bytes: int
    ) -> None:
        self.future = future
        self.request = request
        self.number = number
        """Its number in the outbox."""
        self.size_bytes = size_bytes


class RequestConnection(Connection):
    """The requesting side: sends a hello, waits for the answer, then sends requests; responses come in any order."""

    def __init__(
        self,
        hello: RequesterHello,
        settings: WireSettings,
        connections: set[Connection],
        node_secret: NodeSecret | None = None,
    ) -> None:
        super().__init__(settings, connections)
        self.greeted: asyncio.Future[Hello | None] = self._loop.create_future()
        """Resolved when the handshake is done: the node's hello, or None if the connection ended instead."""
        self.used_at_s = self._loop.time()
        """When its last call ended, by the loop's clock."""
        self._hello = hello
        self._handshake = DiallingHandshake(hello, node_secret)
        self._level = LEVEL_MIN
        self._outbox = Outbox()
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._polls = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._last_id = 0
        self._will_flush = False

    @property
    def is_usable(self) -> bool:
        """Whether requests can be sent."""
        return self._is_open

    @property
    def requests(self) -> int:
        """Return how many requests are in flight."""
        return len(self._pending)

    @property
    def has_poll_room(self) -> bool:
        """Whether long polls take less than half of its room; the rest is for requests that are answered soon."""
        return self._polls < max(1, self.settings.connection_requests_max // 2)

    @property
    def is_idle(self) -> bool:
        """Whether no call is in flight or waits for room."""
        return not self._pending and not self._waiting

    # Calls.

    async def call(self, request: Request[R], payload: Sequence[Buffer], deadline_s: float) -> tuple[R, memoryview]:
        """Send a request and return its response and payload; the deadline is by the loop's clock.

        Raises:
            UnavailableError: it was not done, or it is a read that was not answered.
            OutcomeUnknownError: it was sent and not answered.
            QuiverError: the error that the other side answered with.
        """
        if self._waiting or self._is_full:
            await self._wait_room(deadline_s)
        if not self._is_open:
            raise UnavailableError(f"not done: the connection was lost: {self.end_reason}", code="connection_lost")
        try:
            pending, correlation_id = self._send(request, payload, deadline_s)
        finally:
            self._wake()
        timer = self._loop.call_at(deadline_s, self._expire, correlation_id)
        try:
            answered = await pending.future
        except asyncio.CancelledError:
            self._cancel(correlation_id, pending)
            raise
        finally:
            timer.cancel()
        if answered.failure is not None:
            raise restore_error(answered.failure)
        return _read_body(request, answered.body), answered.payload

    def _send(self, request: Request[R], payload: Sequence[Buffer], deadline_s: float) -> tuple[_Pending, int]:
        timeout_ms = round((deadline_s - self._loop.time()) * 1000)
        if timeout_ms <= 0:
            raise UnavailableError("not done: the deadline passed before the request was sent", code="timed_out")
        self._last_id = correlation_id = self._last_id + 1
        frame = encode_request(correlation_id, timeout_ms, request, payload, level=self._level)
        size_bytes = sum(map(len, frame))
        if size_bytes > self.settings.frame_bytes_max:
            bound = self.settings.frame_bytes_max
            raise TooLargeError(f"not done: the request has {size_bytes} bytes, at most {bound} can be sent")
        pending = _Pending(self._loop.create_future(), request, self._outbox.push(frame), size_bytes)
        self._pending[correlation_id] = pending
        self._pending_bytes += size_bytes
        self._polls += request.is_long_poll
        self._flush_soon()
        return pending, correlation_id

    def _flush_soon(self) -> None:
        # A request that is alone has nothing to share a write with; long polls wait for records.
        if self._outbox.messages >= FLUSH_FRAMES or len(self._pending) - self._polls <= 1:
            self._flush()
        elif not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what one turn of the loop has queued, as far as the socket accepts it."""
        self._will_flush = False
        outbox = self._outbox
        self.write_from(outbox)

    # Calls without a caller: they stay in flight until answered, because the other side still works on them.

    def _cancel(self, correlation_id: int, pending: _Pending) -> None:
        """Withdraw an unsent request; for a sent one, send a cancel."""
        if correlation_id in self._pending and not self._withdraw(correlation_id, pending):
            self._outbox.push(encode_cancel(correlation_id))
            self._flush_soon()
            self._expect_end(correlation_id)

    def _expire(self, correlation_id: int) -> None:
        """Fail a call whose deadline has passed."""
        pending = self._pending.get(correlation_id)
        if pending is None or pending.future.done():
            return
        is_sent = not self._withdraw(correlation_id, pending)
        pending.future.set_exception(_unanswered(pending, "the deadline passed", "timed_out", is_sent=is_sent))
        if is_sent:
            self._expect_end(correlation_id)

    def _withdraw(self, correlation_id: int, pending: _Pending) -> bool:
        """Remove a request from the queue if nothing of it was sent; return whether it was removed."""
        if not self._outbox.withdraw(pending.number):
            return False
        self._forget(correlation_id)
        # A withdrawn frame keeps its position in the queue, so a stalled connection's queue would grow without limit.
        if self._outbox.messages > 2 * self.settings.connection_requests_max:
            self.abort("the other side accepts no requests")
        return True

    def _expect_end(self, correlation_id: int) -> None:
        """Abort the connection if an ended request is still unanswered after `unanswered_timeout_ms`."""
        self._loop.call_later(self.settings.unanswered_timeout_ms / 1000, self._abort_unanswered, correlation_id)

    def _abort_unanswered(self, correlation_id: int) -> None:
        if correlation_id in self._pending:
            self.abort("the other side does not answer")

    def _forget(self, correlation_id: int) -> _Pending | None:
        pending = self._pending.pop(correlation_id, None)
        if pending is not None:
            self._pending_bytes -= pending.size_bytes
            self._polls -= pending.request.is_long_poll
            self.used_at_s = self._loop.time()
            self._wake()
        return pending

    # Room.

    @property
    def _is_full(self) -> bool:
        settings = self.settings
        return (
            len(self._pending) >= settings.connection_requests_max
            or self._pending_bytes >= settings.connection_bytes_max
        )

    async def _wait_room(self, deadline_s: float) -> None:
        try:
            async with timeout_at(deadline_s):
                await self._wait_turn()
                while self._is_full and self._is_open:
                    await self._wait_turn()
        except TimeoutError:
            raise UnavailableError(
                "not done: the deadline passed while the connection was at its limit of requests in flight",
                code="timed_out",
            ) from None

    async def _wait_turn(self) -> None:
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # This waiter was woken but does not send: wake the next one.
            if waiter.done() and not waiter.cancelled():
                self._wake()
            raise

    def _wake(self) -> None:
        """Wake the caller that has waited longest, if there is room; after sending, it wakes the next one."""
        while self._waiting and not self._is_full:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    # Called by the connection.

    def handle_opened(self) -> None:
        """Send the hello."""
        self.write(self._handshake.opening)

    def handle_frame(self, frame: Frame) -> None:
        """Process a response; before the handshake is done, the answer to the hello."""
        if frame.kind is FrameKind.RESPONSE and self.greeted.done():
            self._handle_response(decode_response(frame))
        elif frame.kind is FrameKind.REFUSAL:
            refusal = decode_refusal(frame)
            self.close(f"refused by the other side: {refusal.code}: {refusal.sentence}")
        elif self.greeted.done():
            sentence = f"unexpected {frame.kind.name.lower()} frame to the requesting side"
            self.refuse(refuse(RefusalCode.UNEXPECTED_FRAME, sentence))
        elif (answer := self._handshake.answer(frame, self.endpoint("peername"))) is not None:
            self.write(answer)
        else:
            hello = check_server_hello(frame, self._hello)
            self._handle_hello(hello if isinstance(hello, HandshakeRefusal) else self._handshake.check(hello) or hello)

    def handle_writable(self) -> None:
        """Continue sending."""
        self._flush()

    def handle_closed(self) -> None:
        """Fail every call with the outcome of its request."""
        if not self.greeted.done():
            self.greeted.set_result(None)
        for pending in self._pending.values():
            if not pending.future.done():
                is_sent = not self._outbox.holds(pending.number)
                error = _unanswered(pending, self.end_reason, "connection_lost", is_sent=is_sent)
                pending.future.set_exception(error)
        self._pending.clear()
        self._outbox.clear()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    def _handle_hello(self, answer: Hello | HandshakeRefusal) -> None:
        if isinstance(answer, HandshakeRefusal):
            self.refuse(answer)
            return
        self._level = answer.level_max
        self.finish_handshake()
        self.greeted.set_result(answer)

    def _handle_response(self, answered: IncomingResponse) -> None:
        pending = self._forget(answered.correlation_id)
        if pending is not None and not pending.future.done():
            pending.future.set_result(answered)


def _unanswered(pending: _Pending, reason: str, code: str, *, is_sent: bool) -> QuiverError:
    name = request_name(pending.request)
    if not is_sent:
        return UnavailableError(f"{name} was not sent: {reason}", code=code)
    if pending.request.is_read:
        return UnavailableError(f"{name} was not answered: {reason}", code=code)
    return OutcomeUnknownError(f"{name} was sent and not answered: {reason}", code=code)


def _read_body(request: Request[R], body: Buffer) -> R:
    try:
        return cast("R", decode_body(body, request.response))
    except DecodeError as error:
        if request.is_read:
            raise
        # It was answered without an error, so it may have been done; only a newer version can read the response.
        raise OutcomeUnknownError(error.message, code=error.code) from None

"""One incoming connection for requests: frames to calls, answers to frames, and the limits of both.

It owns the unsent responses and tracks the calls in flight. While they exceed the connection's limit, reading pauses,
so the sender has to wait; nothing is dropped. It also pauses while answers are unsent and the principal holds more than
its share of the node's memory, and for a moment after a request was refused for lack of time. Other connections are
always read, so that cancels arrive.
Responses of one turn of the loop are sent in few writes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.addresses import format_address
from quiver.errors import DecodeError
from quiver.model import Buffer, NodeId
from quiver.security import node_principal
from quiver.security.identity import ConnectionIdentity, certificate_identity
from quiver.wire.answer_memory import Account
from quiver.wire.connection import CLOSE_TIMEOUT_S, Connection
from quiver.wire.envelope import decode_cancel, decode_request
from quiver.wire.frames import HEADER_BYTES, Frame, FrameKind
from quiver.wire.handshake import RefusalCode, RequesterHello, refuse
from quiver.wire.outbox import FLUSH_FRAMES, Outbox

if TYPE_CHECKING:
    from quiver.wire.serving import RequestServer, ServerCall


class RequestSession:
    """Receive requests from a connection and send their answers, in any order."""

    def __init__(self, server: RequestServer, connection: Connection, hello: RequesterHello) -> None:
        self.node = None if hello.node is None else NodeId(hello.node)
        self.caller_name = hello.name
        self.level = hello.level_max
        """The highest feature level that the other side's program knows."""
        self.host = connection.peer_host
        self.address = format_address((connection.peer_host, connection.peer_port))
        self.identity = self._identify(connection)
        """Who the connection speaks for; a client without a certificate is anonymous until it authenticates."""
        self.server = server
        self._memory = server.memory
        self.account = server.memory.open_account(self.identity.principal)
        """What its principal has in flight on this and other connections."""
        self._settings = server.settings
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, ServerCall] = {}
        self._calls_bytes = 0
        self._reserved_bytes = 0
        self.idle_since = self._loop.time()
        """When the last call ended, or the session began."""
        self._outbox = Outbox()
        self._is_open = True
        self._is_held = False
        self._is_penalized = False
        self._is_blocked = False
        self._read_bytes = 0
        """Bytes that were written when the other side was last seen to read."""
        self._is_evicted = False
        """Whether it is closed because it does not read its answers, and has not ended yet."""
        self._will_flush = False
        self._end_reason = ""

    def _identify(self, connection: Connection) -> ConnectionIdentity:
        if self.node is not None:
            return ConnectionIdentity(node_principal(self.node), address=self.address)
        return certificate_identity(connection.certificate, address=self.address)

    @property
    def name(self) -> NodeId | str:
        """Return the other side's node id or name, for logs."""
        return self.caller_name if self.node is None else self.node

    @property
    def is_busy(self) -> bool:
        """Return whether a call is in flight or an answer is not sent."""
        return bool(self._calls) or self._outbox.bytes > 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of its calls, of the answers that are being made, and of those that are not sent."""
        return self._calls_bytes + self._reserved_bytes + self._outbox.bytes

    @property
    def answers_bytes(self) -> int:
        """Return the bytes of the answers that are being made, and of those that are not sent."""
        return self._reserved_bytes + self._outbox.bytes

    @property
    def is_gone(self) -> bool:
        """Return whether the connection has ended."""
        return not self._is_open

    # Called by the connection.

    def handle_frame(self, frame: Frame) -> None:
        """Process a request or a cancel."""
        if frame.kind is FrameKind.REQUEST:
            self._receive_request(frame)
        elif frame.kind is FrameKind.CANCEL:
            call = self._calls.get(decode_cancel(frame))
            if call is not None:
                call.end("cancelled")
        else:
            sentence = f"unexpected {frame.kind.name.lower()} frame on a connection for requests"
            self._connection.refuse(refuse(RefusalCode.UNEXPECTED_FRAME, sentence))

    def _receive_request(self, frame: Frame) -> None:
        incoming = decode_request(frame)
        if incoming.correlation_id in self._calls:
            raise DecodeError(f"correlation id {incoming.correlation_id} is already in flight")
        size_bytes = HEADER_BYTES + len(frame.head) + len(frame.payload)
        self.server.handle_request(self, incoming, size_bytes)
        self._hold_or_resume()

    def handle_writable(self) -> None:
        """Continue sending."""
        self._flush()

    def handle_closed(self) -> None:
        """End all calls: their client is gone."""
        self._is_open = False
        self.identity.is_open = False
        self.account.blocked.pop(self, None)
        self.server.turns.forget_penalty(self)
        self._count(-self._outbox.bytes)
        self._outbox.clear()
        if not self._calls:
            self._memory.close_account(self.account)
        for call in tuple(self._calls.values()):
            call.end("abandoned")
        self.server.handle_session_closed(self)

    # Called by the server.

    def change_account(self) -> Account:
        """Let another principal account for this connection, which has authenticated as it; return the account."""
        before, held_bytes = self.account, self.held_bytes if self.node is None else 0
        before.blocked.pop(self, None)  # recorded again with the next answer that is not read
        self.account = self._memory.open_account(self.identity.principal)
        for account, sign in ((before, -1), (self.account, 1)):
            account.requests += sign * len(self._calls)
            account.bytes += sign * held_bytes
        self._memory.close_account(before)
        return self.account

    def begin(self, call: ServerCall) -> None:
        """Track a call that started."""
        self.account.requests += 1
        self._calls[call.incoming.correlation_id] = call
        self._calls_bytes += call.size_bytes
        if self.node is None:
            self._memory.count_request(self.account, call.size_bytes)

    async def reserve(self, call: ServerCall, size_bytes: int) -> None:
        """Wait for the memory of a call's answer and reserve it until the call is finished."""
        if call.reserved:
            self._release(call)  # or it would wait for itself
        await self._memory.wait_room(self, size_bytes)
        call.reserved = size_bytes
        self._reserved_bytes += size_bytes
        self._count(size_bytes)

    def _release(self, call: ServerCall) -> None:
        self._reserved_bytes -= call.reserved
        self._count(-call.reserved)
        call.reserved = 0

    def finish(self, call: ServerCall) -> None:
        """Stop tracking a call that ended."""
        del self._calls[call.incoming.correlation_id]
        self.account.requests -= 1
        self._calls_bytes -= call.size_bytes
        if self.node is None:
            self._memory.count_request(self.account, -call.size_bytes)
        if call.reserved:
            self._release(call)
        self.idle_since = self._loop.time()
        if not self._is_open and not self._calls:
            self._memory.close_account(self.account)

    def evict(self) -> None:
        """Drop the unsent answers and close: the other side does not read, and others need the memory."""
        self._is_evicted = True
        self._count(-self._outbox.bytes)
        self._outbox.clear()
        self._connection.evict("it does not read its responses, and others need the memory")

    def answer(self, frame: list[Buffer]) -> None:
        """Send an answer, together with others of this turn of the loop."""
        if not self._is_open or self._is_evicted:
            return
        outbox = self._outbox
        before_bytes = outbox.bytes
        outbox.push(frame)
        if not self._calls or outbox.messages >= FLUSH_FRAMES:
            self._write(before_bytes)  # no other call could share this write, or enough frames are queued
            return
        self._count(outbox.bytes - before_bytes)
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def close(self, reason: str) -> None:
        """Close after all answers are sent, or after `CLOSE_TIMEOUT_S`; accept no more requests."""
        self._connection.pause_reading()
        self._end_reason = reason
        self._loop.call_later(CLOSE_TIMEOUT_S, self._connection.abort, reason)
        self._flush()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await self._connection.wait_closed()

    def _flush(self) -> None:
        self._write(self._outbox.bytes)

    def _write(self, counted_bytes: int) -> None:
        """Write what the socket accepts, and count what is left; `counted_bytes` of the outbox are counted so far."""
        self._will_flush = False
        outbox = self._outbox
        self._connection.write_from(outbox)
        if outbox.bytes != counted_bytes:
            self._count(outbox.bytes - counted_bytes)
        if outbox.bytes or self._is_blocked:
            self._handle_blocked()
        if not self._end_reason:
            self._hold_or_resume()
        elif not outbox.bytes:
            self._connection.close(self._end_reason)

    def _handle_blocked(self) -> None:
        """Record whether the other side reads its answers; if not, connections of its principal may have to end."""
        blocked, written_bytes = self.account.blocked, self._connection.written_bytes
        self._is_blocked = self._outbox.bytes > 0
        if not self._is_blocked or self.node is not None or self._is_evicted:
            blocked.pop(self, None)
            return
        now_s = self._loop.time()
        if self not in blocked or self._read_bytes != written_bytes:
            blocked.pop(self, None)
            blocked[self], self._read_bytes = now_s, written_bytes
        self._memory.evict_blocked(now_s)

    def _count(self, change_bytes: int) -> None:
        if self.node is None:
            self._memory.count(self.account, change_bytes)

    def penalize(self) -> None:
        """Stop reading for a while: a request was refused, and refusing more of them takes time as well."""
        if not self._is_penalized:
            self._is_penalized = True
            self.server.turns.penalize(self)
            self._hold_or_resume()

    def end_penalty(self) -> None:
        """Read again, unless something else forbids it."""
        self._is_penalized = False
        if self._is_open and not self._end_reason:
            self._hold_or_resume()

    def _hold_or_resume(self) -> None:
        settings, unsent_bytes = self._settings, self._outbox.bytes
        is_full = (
            len(self._calls) > settings.connection_requests_max
            or self._calls_bytes + unsent_bytes > settings.connection_bytes_max
            or self._is_penalized
            or (unsent_bytes > 0 and self.node is None and self._memory.is_over_share(self.account))
        )
        if is_full is not self._is_held:
            self._is_held = is_full
            if is_full:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()

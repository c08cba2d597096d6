"""One client's connection: requests in, one at a time to the application, responses out in the same order.

Pipelined requests are answered one at a time, so a pipelining client gets the same result as one that waits. The queue
is short: beyond `PIPELINED_MAX` requests or `PIPELINED_BYTES_MAX` of their bodies, or while the client does not read
its responses, nothing more is read from the socket. A refusal is written before the connection closes, and the socket
is then drained for a moment: closing it with unread bytes would send a reset, which can discard the response at the
client.

A response may have a stream for a body: its pieces are sent in chunks, and the next one is asked for once the client
has read enough of those before it. The requests that follow wait until it ends. What a response has in memory counts
until then (`HttpResponse.room`), and what a client does not read of other responses while it does not; one that does
not read may be closed, if others need the memory.

A client that closes its side counts as disconnected: its pending work is cancelled, so that no long poll consumes a
record whose client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from quiver.addresses import format_address
from quiver.gateway.http.messages import (
    HttpRefusal,
    HttpRequest,
    HttpResponse,
    RequestReader,
    ResponseRoom,
    encode_chunk,
    encode_response,
    encode_stream_head,
)
from quiver.security.identity import certificate_identity

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from quiver.gateway.http.server import HttpServer
    from quiver.turns import Flow
    from quiver.wire.answer_memory import Account

PROGRESS_BYTES = 64 * 1024
"""Bytes of a body that count as progress: they restart its deadline."""
PIPELINED_MAX = 16
"""Whole requests that are queued after the one being answered before reading pauses."""
PIPELINED_BYTES_MAX = 64 * 1024
"""Bytes of bodies that are queued likewise: behind a long poll they would take the room of all bodies for its time."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(asyncio.BaseProtocol):
    """Speak HTTP/1.1 with one client; `PlainConnection` and `TlsConnection` receive its bytes."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = server.loop
        self._reader = RequestReader(
            head_bytes_max=server.settings.head_bytes_max,
            body_bytes_max=server.settings.body_bytes_max,
            hold=server.hold_body,
            admit=server.admit,
        )
        self._transport: asyncio.Transport | None = None
        self._request: HttpRequest | None = None
        self._began_at = 0.0
        self._work: asyncio.Future[HttpResponse] | asyncio.Future[bool] | None = None
        """What makes the response, or sends its stream."""
        self._resumed: asyncio.Future[None] | None = None
        """What a stream waits for while the client does not read."""
        self._flow: Flow | None = None
        """What counts the work as under way, if its request waited for its turn."""
        self._room: ResponseRoom | None = None
        """The memory of the stream that is being sent."""
        self._sent_bytes = 0
        """Bytes of the last stream."""
        self._answered: HttpRequest | None = None
        """The request whose response is being written."""
        self._unread: tuple[Account, int] | None = None
        """What is counted of responses that the client does not read, and for whom."""
        self._is_ending = False
        self._is_writing_paused = False
        self._is_reading_paused = False
        self._is_penalized = False
        """Whether it is not read for a while because a request of it was refused."""
        self._closes_when_idle = False
        self._progress_bytes = 0
        """Bytes of the body that had arrived when its progress was last recorded."""
        self.is_reserved = False
        """Whether it was accepted beyond the limit, for one request to an exempt path."""

    @property
    def held_bytes(self) -> int:
        """Bytes held for a body that is arriving."""
        return self._reader.held_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no request is pending or partially received."""
        return self._request is None and not self._reader.requests and not self._reader.is_receiving

    @property
    def _is_queue_full(self) -> bool:
        """Whether nothing more is read until the pending request is answered."""
        if self._request is None:
            return False
        requests = self._reader.requests
        queued_bytes = self._reader.held_bytes + sum(len(request.body) for request in requests)
        return len(requests) > PIPELINED_MAX or queued_bytes > PIPELINED_BYTES_MAX

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the server, which may refuse the connection."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        address = format_address(peer[:2]) if peer else ""
        self._reader.identity = certificate_identity(transport.get_extra_info("peercert"), address=address)
        if self._server.handle_opened(self):
            (self._server.receiving if self.is_reserved else self._server.idle).begin(self)

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse bytes, which may change afterwards, and start answering whole requests."""
        if self._is_ending:
            return
        reader = self._reader
        was_receiving, begun_before = reader.is_receiving, reader.begun
        reader.feed(data)
        if reader.requests or reader.refusal is not None:
            self._advance()
        if self._is_ending:
            return
        if reader.is_receiving:
            self._record_progress(is_new=reader.begun != begun_before)
            if self._is_reading_paused:
                self._end_deadlines()
        elif was_receiving:
            self._end_deadlines()
        if reader.awaits_continue and self._request is None and self._transport is not None:
            reader.awaits_continue = False
            self._transport.write(_CONTINUE)
        if (reader.requests or reader.held_bytes) and self._is_queue_full:
            self._pause_reading()

    def pause_writing(self) -> None:
        """Pause: the client does not read."""
        self._is_writing_paused = True
        self._pause_reading()
        if self._room is None or self not in self._server.sending:
            self._server.sending.begin(self)  # of a stream that takes memory, all must be read in one such time
        self._count_unread()

    def resume_writing(self) -> None:
        """Resume answering."""
        self._is_writing_paused = False
        if self._room is None:
            self._server.sending.end(self)
        self._forget_unread()
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        if not self._is_ending:
            self._advance()

    def eof_received(self) -> None:
        """Begin nothing more: the client has disconnected, and `connection_lost` follows in a later turn of the loop.

        A task that begins in between would be cancelled before its first step, and never give back what it counts.
        """
        self._is_ending = True

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Cancel the pending request and release everything held for this client."""
        self._transport = None
        self._is_ending = True
        self._forget_unread()
        if self._work is not None:
            self._work.cancel()
        held_bytes = self._reader.release() + sum(len(request.body) for request in self._reader.requests)
        self._reader.requests.clear()
        self._reader.close()
        if self._request is not None:
            held_bytes += len(self._request.body)
            self._server.handle_answered(self._request, None, self._began_at)
            self._request = None
        self._server.release_body(held_bytes)
        self._server.turns.forget_penalty(self)
        self._server.handle_closed(self)

    # Called by its server.

    def close_when_idle(self) -> None:
        """Close once every received request is answered."""
        self._closes_when_idle = True
        if self.is_idle:
            self._end()

    def refuse(self, refusal: HttpRefusal) -> None:
        """Write a refusal after the pending responses, and close."""
        if self._request is not None or self._reader.requests:
            self._reader.refusal = self._reader.refusal or refusal
            return
        self._server.release_body(self._reader.release())
        response = refusal.answer or self._server.application.refuse(refusal.status, refusal.code, refusal.message)
        self._write(response, is_persistent=False, is_head=False)
        self._end(lingers=True)

    def abort(self) -> None:
        """Close immediately; unsent bytes are lost."""
        self._is_ending = True
        if self._transport is not None:
            self._transport.abort()

    def evict(self) -> None:
        """Close at once: the client does not read its responses, and others need the memory."""
        if self._room is not None:
            self._room.release()
        self._forget_unread()
        self.abort()

    def reserve(self) -> None:
        """Answer one request to an exempt path and nothing else."""
        self.is_reserved = True
        self._reader.admit = self._server.admit_reserved

    def end_penalty(self) -> None:
        """Read again after a refusal."""
        self._is_penalized = False
        if not self._is_ending and not self._is_writing_paused and not self._is_queue_full:
            self._resume_reading()

    def is_waiting_with(self, request: HttpRequest) -> bool:
        """Return whether a request still waits for its turn here."""
        return self._request is request and not self._is_ending

    def begin_turn(self, flow: Flow | None) -> None:
        """Answer the request that waited for its turn."""
        if self._request is not None:
            self._start(self._request)
        if flow is not None:
            if self._work is None:
                self._server.turns.end_work(flow)
            else:
                self._flow = flow
        self._advance()

    def drop_turn(self) -> None:
        """Let the server refuse the request that waited too long for its turn."""
        self._server.drop(self)

    def refuse_turn(self, response: HttpResponse) -> None:
        """Refuse the request that waited for its turn; nothing was done for it."""
        if self._request is not None:
            self._refuse_request(response)
            self._advance()

    # Answering.

    def _record_progress(self, *, is_new: bool) -> None:
        """Restart the deadlines of a request that is arriving: of all of it, and of the next part of its body."""
        reader, server = self._reader, self._server
        if is_new:
            server.idle.end(self)
            server.receiving.begin(self)
            server.progressing.end(self)
            self._progress_bytes = -PROGRESS_BYTES
        if not reader.is_in_head and reader.received_bytes - self._progress_bytes >= PROGRESS_BYTES:
            self._progress_bytes = reader.received_bytes
            server.progressing.begin(self)

    def _advance(self) -> None:
        """Answer queued requests in order until one has to be waited for."""
        reader = self._reader
        while self._request is None and not self._is_writing_paused and not self._is_ending:
            if reader.requests:
                self._begin(reader.requests.popleft())
            elif reader.refusal is not None:
                self.refuse(reader.refusal)
            else:
                self._rest()
                return

    def _rest(self) -> None:
        """Wait for the next request."""
        if self._closes_when_idle and self.is_idle:
            self._end()
            return
        if self._is_reading_paused:
            self._resume_reading()
        if not self._reader.is_receiving:
            self._server.idle.begin(self)

    def _begin(self, request: HttpRequest) -> None:
        self._server.idle.end(self)
        self._request = request
        self._began_at = self._loop.time()
        if request.answer is not None:
            self._server.handle_refused()
            self._refuse_request(request.answer)
            return
        turn = self._server.take_turn(self, request)
        if turn is True:
            self._start(request)
        elif turn is not False:
            self._refuse_request(turn)

    def _refuse_request(self, response: HttpResponse) -> None:
        """Refuse a request for lack of room, and read the next one a little later."""
        self._finish(response)
        if not self._is_ending and not self._is_penalized:
            self._is_penalized = True
            self._pause_reading()
            self._server.turns.penalize(self)

    def _start(self, request: HttpRequest) -> None:
        answer = self._server.answer(request)
        if isinstance(answer, HttpResponse):
            self._finish(answer)
        else:
            self._work = answer
            answer.add_done_callback(self._handle_done)

    def _handle_done(self, work: asyncio.Future[HttpResponse]) -> None:
        self._work = None
        if self._flow is not None:
            self._server.turns.end_work(self._flow)
            self._flow = None
        if self._request is None:
            return  # the client has disconnected
        self._finish(self._server.outcome(work))
        self._advance()

    def _finish(self, response: HttpResponse) -> None:
        request = self._request
        assert request is not None
        if response.stream is not None and request.method != "HEAD":
            self._begin_stream(request, response, response.stream)
            return
        self._request = None
        if request.body:
            self._server.release_body(len(request.body))
        is_persistent = request.is_persistent and not ((self._closes_when_idle and self.is_idle) or self.is_reserved)
        self._answered = request
        self._write(response, is_persistent=is_persistent, is_head=request.method == "HEAD")
        self._answered = None
        self._server.handle_answered(request, response, self._began_at)
        if not is_persistent:
            self._end()

    # A body in pieces.

    def _begin_stream(self, request: HttpRequest, response: HttpResponse, pieces: AsyncIterator[bytes]) -> None:
        if self._transport is None:
            return
        is_chunked = not request.is_http_10
        is_persistent = request.is_persistent and is_chunked
        date = self._server.date_line()
        head = encode_stream_head(response, date=date, is_persistent=is_persistent, is_chunked=is_chunked)
        self._transport.write(head)
        self._room, self._sent_bytes = response.room, 0
        self._work = work = self._server.start_stream(self._send_pieces(pieces, is_chunked=is_chunked))
        work.add_done_callback(partial(self._handle_streamed, response, is_persistent=is_persistent))

    async def _send_pieces(self, pieces: AsyncIterator[bytes], *, is_chunked: bool) -> bool:
        """Send all pieces; return whether the client is still there."""
        async with aclosing(cast("AsyncGenerator[bytes, None]", pieces)):
            async for piece in pieces:
                while self._is_writing_paused:
                    self._resumed = self._loop.create_future()
                    await self._resumed
                if self._transport is None or self._transport.is_closing():
                    return False
                if piece:
                    self._sent_bytes += len(piece)
                    self._transport.write(encode_chunk(piece) if is_chunked else piece)
        if is_chunked and self._transport is not None:
            self._transport.write(encode_chunk(b""))
        return True

    def _handle_streamed(self, response: HttpResponse, work: asyncio.Future[bool], *, is_persistent: bool) -> None:
        self._work = None
        if self._room is not None:
            self._end_room(self._room)
            response = msgspec.structs.replace(response, stream_bytes=self._sent_bytes)
        request = self._request
        if request is None:
            return  # the client has disconnected
        self._request = None
        self._server.release_body(len(request.body))
        self._server.handle_answered(request, response, self._began_at)
        if work.cancelled() or not work.result():
            self.abort()  # without the last chunk, the client knows that something is missing
        elif is_persistent:
            self._advance()
        else:
            self._end()

    def _end_room(self, room: ResponseRoom) -> None:
        room.release()
        self._room = None
        if not self._is_writing_paused:
            self._server.sending.end(self)

    def _count_unread(self) -> None:
        """Count what the client does not read, for the principal of the response that is being written."""
        memory, request = self._server.memory, self._request or self._answered
        self._forget_unread()
        if memory is None or request is None or self._transport is None:
            return
        account, size_bytes = (
            memory.open_account(self._server.principal_of(request)),
            self._transport.get_write_buffer_size(),
        )
        self._unread = account, size_bytes
        memory.count(account, size_bytes)
        account.blocked[self] = self._loop.time()
        memory.evict_blocked(self._loop.time())

    def _forget_unread(self) -> None:
        memory, unread = self._server.memory, self._unread
        if memory is not None and unread is not None:
            account, size_bytes = unread
            self._unread = None
            account.blocked.pop(self, None)
            memory.count(account, -size_bytes)
            memory.close_account(account)

    def _write(self, response: HttpResponse, *, is_persistent: bool, is_head: bool) -> None:
        if self._transport is not None:
            date = self._server.date_line()
            self._transport.write(encode_response(response, date=date, is_persistent=is_persistent, is_head=is_head))

    def _end(self, *, lingers: bool = False) -> None:
        """Send buffered bytes and close; with `lingers`, drain the socket for a moment first."""
        if self._is_ending or self._transport is None:
            return
        self._is_ending = True
        self._server.handle_ending(self)
        if not lingers or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._resume_reading()
        self._transport.write_eof()

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and self._transport is not None and not self._transport.is_closing():
            self._is_reading_paused = True
            self._transport.pause_reading()
            self._end_deadlines()  # what is not read cannot be late

    def _end_deadlines(self) -> None:
        """End the deadlines of a request that is arriving."""
        self._server.receiving.end(self)
        self._server.progressing.end(self)

    def _resume_reading(self) -> None:
        is_held = self._is_penalized and not self._is_ending
        if self._is_reading_paused and not is_held and self._transport is not None and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()
            if self._reader.is_receiving and not self._is_ending:
                self._server.receiving.begin(self)
                if not self._reader.is_in_head:
                    self._server.progressing.begin(self)


class PlainConnection(HttpConnection, asyncio.Protocol):
    """A connection without TLS."""


class TlsConnection(HttpConnection, asyncio.BufferedProtocol):
    """A connection with TLS, received into a buffer of the server.

    Without a buffer, the event loop lets `ssl` allocate and shrink 256 KiB for each read, which costs three times what
    the decryption of a small request does. A read and its parsing are one step of the loop, so one buffer is enough.
    """

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer to receive into."""
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was received."""
        self.data_received(self._server.read_buffer[:nbytes])

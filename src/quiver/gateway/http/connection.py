"""One client's connection: requests in, one at a time to the application, responses out in the same order.

Pipelined requests are answered one at a time, so a pipelining client gets the same result as one that waits. The queue
is short: beyond `PIPELINED_MAX` requests, or while the client does not read its responses, nothing more is read from
the socket. A refusal is written before the connection closes, and the socket is then drained for a moment: closing it
with unread bytes would send a reset, which can discard the response at the client.

A client that closes its side counts as disconnected: its pending work is cancelled, so that no long poll consumes a
record whose client is gone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from quiver.gateway.http.messages import HttpRefusal, HttpRequest, HttpResponse, RequestReader, encode_response

if TYPE_CHECKING:
    from quiver.gateway.http.server import HttpServer

PIPELINED_MAX = 16
"""Whole requests that are queued after the one being answered before reading pauses."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(asyncio.Protocol):
    """Speak HTTP/1.1 with one client."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = server.loop
        self._reader = RequestReader(
            head_bytes_max=server.settings.head_bytes_max,
            body_bytes_max=server.settings.body_bytes_max,
            admit=server.admit_body,
        )
        self._transport: asyncio.Transport | None = None
        self._request: HttpRequest | None = None
        self._began_at = 0.0
        self._work: asyncio.Future[HttpResponse] | None = None
        self._is_ending = False
        self._is_writing_paused = False
        self._is_reading_paused = False
        self._closes_when_idle = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is pending or partially received."""
        return self._request is None and not self._reader.requests and not self._reader.is_receiving

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the server, which may refuse the connection."""
        self._transport = cast("asyncio.Transport", transport)
        if self._server.handle_opened(self):
            self._server.idle.begin(self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes and start answering whole requests."""
        if self._is_ending:
            return
        reader = self._reader
        was_receiving, begun_before = reader.is_receiving, reader.begun
        reader.feed(data)
        if reader.requests or reader.refusal is not None:
            self._advance()
        if self._is_ending:
            return
        if reader.is_receiving and reader.begun != begun_before:
            self._server.idle.end(self)
            self._server.receiving.begin(self)
        elif was_receiving and not reader.is_receiving:
            self._server.receiving.end(self)
        if reader.awaits_continue and self._request is None and self._transport is not None:
            reader.awaits_continue = False
            self._transport.write(_CONTINUE)
        if len(reader.requests) > PIPELINED_MAX:
            self._pause_reading()

    def pause_writing(self) -> None:
        """Pause: the client does not read."""
        self._is_writing_paused = True
        self._pause_reading()
        self._server.sending.begin(self)

    def resume_writing(self) -> None:
        """Resume answering."""
        self._is_writing_paused = False
        self._server.sending.end(self)
        if not self._is_ending:
            self._advance()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Cancel the pending request and release everything held for this client."""
        self._transport = None
        self._is_ending = True
        if self._work is not None:
            self._work.cancel()
        held_bytes = self._reader.held_bytes + sum(len(request.body) for request in self._reader.requests)
        self._reader.requests.clear()
        if self._request is not None:
            held_bytes += len(self._request.body)
            self._server.handle_answered(self._request, None, self._began_at)
            self._request = None
        self._server.release_body(held_bytes)
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
        response = self._server.application.refuse(refusal.status, refusal.code, refusal.message)
        self._write(response, is_persistent=False, is_head=False)
        self._end(lingers=True)

    def abort(self) -> None:
        """Close immediately; unsent bytes are lost."""
        self._is_ending = True
        if self._transport is not None:
            self._transport.abort()

    # Answering.

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
        self._resume_reading()
        if not self._reader.is_receiving:
            self._server.idle.begin(self)

    def _begin(self, request: HttpRequest) -> None:
        self._server.idle.end(self)
        self._request = request
        self._began_at = self._loop.time()
        answer = self._server.answer(request)
        if isinstance(answer, HttpResponse):
            self._finish(answer)
        else:
            self._work = answer
            answer.add_done_callback(self._handle_done)

    def _handle_done(self, work: asyncio.Future[HttpResponse]) -> None:
        self._work = None
        if self._request is None:
            return  # the client has disconnected
        self._finish(self._server.outcome(work))
        self._advance()

    def _finish(self, response: HttpResponse) -> None:
        request = self._request
        assert request is not None
        self._request = None
        self._server.release_body(len(request.body))
        is_persistent = request.is_persistent and not (self._closes_when_idle and self.is_idle)
        self._write(response, is_persistent=is_persistent, is_head=request.method == "HEAD")
        self._server.handle_answered(request, response, self._began_at)
        if not is_persistent:
            self._end()

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

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self._transport is not None and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()

"""One TCP connection as both sides see it: bytes in, frames to a hook, frames out, and its end.

It owns the transport, the reader and one deadline (for the handshake, later for closing). What frames mean is its
subclasses' business: `IncomingConnection` in `listener`, `OutgoingConnection` in `link`, `RequestConnection` in
`requesting`.

Invariants: hooks are called in this order: `handle_opened`, `handle_frame` any number of times, `handle_closed` once;
no frame is handed on after the connection began to close; a stream that is not made of valid frames is refused.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

from quiver.config import WireSettings
from quiver.errors import DecodeError
from quiver.wire.frames import Frame, FrameReader
from quiver.wire.handshake import HANDSHAKE_BYTES_MAX, HandshakeRefusal, RefusalCode, encode_refusal, refuse

CLOSE_TIMEOUT_S = 1.0
"""How long a closing connection may take to send what it still holds."""


class Connection(asyncio.BufferedProtocol, ABC):
    """Read frames from a socket and write to it; until the handshake is done, frames are held to a small bound.

    As long as it is open it is in its owner's `connections`, so that they can all be ended.
    """

    def __init__(self, settings: WireSettings, connections: set[Connection]) -> None:
        self.settings = settings
        self.reader = FrameReader(HANDSHAKE_BYTES_MAX)
        self.peer_host, self.peer_port = "", 0
        self.is_paused = False
        self.end_reason = ""
        self.refusal: HandshakeRefusal | None = None
        self._connections = connections
        self._is_open = False
        self._is_held = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._closed = self._loop.create_future()

    # What a subclass says.

    @abstractmethod
    def handle_opened(self) -> None:
        """Begin: the socket is connected."""

    @abstractmethod
    def handle_frame(self, frame: Frame) -> None:
        """Take one frame; may end the connection."""

    @abstractmethod
    def handle_closed(self) -> None:
        """Take note that the connection ended; `end_reason` says why."""

    def handle_writable(self) -> None:
        """Take note that the socket takes bytes again."""

    # What its owner does with it.

    @property
    def backlog_bytes(self) -> int:
        """Return how much was written but not yet taken by the socket."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def can_write(self) -> bool:
        """Tell whether the socket takes bytes now."""
        # A failed write closes the transport before `connection_lost` is called.
        return not self.is_paused and self._transport is not None and not self._transport.is_closing()

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """Return what is known of the verified certificate that the other side has shown; None if it has shown none."""
        return self._transport.get_extra_info("peercert") or None if self._transport is not None else None

    @property
    def _is_plain(self) -> bool:
        return self._transport is None or self._transport.get_extra_info("sslcontext") is None

    def prove(self) -> None:
        """End the handshake: from now on frames may have their full size."""
        self._cancel_deadline()
        self.reader.frame_bytes_max = self.settings.frame_bytes_max

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes; what the socket does not take now is kept, and `can_write` is false until it did."""
        if self._transport is not None:
            self._transport.write(data)

    def hold_reading(self) -> None:
        """Read no more, and hand on no more of what was read, until `resume_reading`: the other side has to wait."""
        if not self._is_held and self._transport is not None:
            self._is_held = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on where `hold_reading` stopped, in the loop's next turn."""
        if self._is_held:
            self._is_held = False
            self._loop.call_soon(self._go_on)

    def refuse(self, refusal: HandshakeRefusal) -> None:
        """Tell the other side why, then close."""
        if not self._is_open:
            return
        self.refusal = refusal
        self.write(encode_refusal(refusal))
        self.close(f"refused by this side: {refusal.code}: {refusal.sentence}")

    def close(self, reason: str) -> None:
        """Close once all that was written is sent, or after a second without it; no frame is handed on any more."""
        if not self._is_open or self._transport is None:
            return
        self._is_open = False
        self.end_reason = reason
        self._transport.close()
        self._set_deadline(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close at once, and lose what was not sent; no frame is handed on any more."""
        self._is_open = False
        self.end_reason = self.end_reason or reason
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.shield(self._closed)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake and its deadline."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_open = True
        self._connections.add(self)
        # Any byte that the socket did not take pauses the writer: what waits, waits in one place, uncopied. With TLS
        # reaching the bound pauses, without it only what is beyond.
        self._transport.set_write_buffer_limits(high=0 if self._is_plain else 1)
        _tune(transport.get_extra_info("socket"), self.settings.unanswered_timeout_ms)
        name = transport.get_extra_info("peername")
        self.peer_host, self.peer_port = name[:2] if name else ("", 0)
        self._set_deadline(self.settings.handshake_timeout_ms / 1000, self._refuse_late)
        self.handle_opened()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return where to receive."""
        return self.reader.writable()

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on every frame that is complete now."""
        self.reader.received(nbytes)
        self._hand_on()

    def pause_writing(self) -> None:
        """Remember that the socket is full."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self.is_paused = False
        self.handle_writable()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end, once."""
        self._cancel_deadline()
        self.end_reason = self.end_reason or (str(error) if error else "closed by the other side")
        self._transport, self._is_open = None, False
        self._connections.discard(self)
        if not self._closed.done():
            self._closed.set_result(None)
        self.handle_closed()

    def _hand_on(self) -> None:
        try:
            while self._is_open and not self._is_held and (frame := self.reader.next_frame()) is not None:
                self.handle_frame(frame)
        except DecodeError as error:
            self.refuse(refuse(RefusalCode.BAD_FRAME, error.message))

    def _go_on(self) -> None:
        # Whole frames that were read before the pause come first; they may be enough for the next one.
        self._hand_on()
        if not self._is_held and self._transport is not None:
            self._transport.resume_reading()

    def _refuse_late(self) -> None:
        sentence = f"no hello within {self.settings.handshake_timeout_ms} ms"
        self.refuse(refuse(RefusalCode.HELLO_LATE, sentence))

    def _set_deadline(self, delay_s: float, action: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self._loop.call_later(delay_s, action)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _tune(sock: socket.socket, unanswered_timeout_ms: int) -> None:
    """Send small frames at once, and let the system give up a machine that went silent.

    Without the latter, a connection that outlived a long cut of the network sends again only when TCP's own
    doubling wait is over, many seconds after the network is back.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        idle_s = max(1, unanswered_timeout_ms // 2000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered_timeout_ms)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)

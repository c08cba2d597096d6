"""One TCP connection, and the context that all connections of a node share.

`Connection` owns the transport, the frame reader and one deadline (first of the handshake, later of closing). Its
subclasses give frames their meaning: `IncomingConnection` in `listener`, `OutgoingConnection` in `link`,
`RequestConnection` in `requesting`.

Invariants: hooks are called in this order: `handle_opened`, `handle_frame` any number of times, `handle_closed` once;
no frame is delivered after the connection began to close; a stream that is not made of valid frames is refused.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from quiver.addresses import format_address
from quiver.clock import Clock, Rng
from quiver.config import TlsSettings, WireSettings
from quiver.errors import DecodeError
from quiver.model import NodeId
from quiver.wire.frames import Frame, FrameReader
from quiver.wire.handshake import (
    HANDSHAKE_BYTES_MAX,
    HandshakeRefusal,
    Hello,
    IdentityOf,
    RefusalCode,
    encode_refusal,
    refuse,
)

if TYPE_CHECKING:
    from quiver.wire.outbox import Outbox
    from quiver.wire.proving import NodeSecret
    from quiver.wire.serving import RequestServer

CLOSE_TIMEOUT_S = 1.0
"""Time in which a closing connection may still send its buffered bytes; then it is aborted."""


@dataclass(slots=True)
class PeerTraffic:
    """A node's incarnation and the traffic received from it, over all its connections."""

    incarnation: int
    messages_in: int = 0
    bytes_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkContext:
    """The identity, settings and callbacks that links, listener and connections of one node share."""

    hello: Hello
    settings: WireSettings
    clock: Clock
    rng: Rng
    connections: set[Connection]
    """Every open connection; each connection adds and removes itself."""
    identity_of: IdentityOf
    node_secret: NodeSecret | None
    """By which nodes prove themselves; None if TLS does that, or nothing."""
    tls: TlsSettings
    client_context: ssl.SSLContext | None
    """TLS context for dialling peers; None: without TLS."""
    server: RequestServer | None
    """Handles requests; None on a node that accepts none."""
    on_greeted: Callable[[Hello], PeerTraffic]
    """Called when a handshake is done, in either direction; returns the counters to use."""
    on_message: Callable[[NodeId, memoryview], None]
    on_lost: Callable[[NodeId], None]
    """Called when a connection whose handshake was done has ended, in either direction."""


class Connection(asyncio.BufferedProtocol, ABC):
    """Read frames from a socket and write to it; until the handshake is done, frames have a small size limit.

    An open connection is in its owner's `connections`, so that the owner can close all of them.
    """

    def __init__(self, settings: WireSettings, connections: set[Connection]) -> None:
        self.settings = settings
        self.reader = FrameReader(HANDSHAKE_BYTES_MAX)
        self.peer_host, self.peer_port = "", 0
        self.is_paused = False
        self.end_reason = ""
        self.refusal: HandshakeRefusal | None = None
        self.written_bytes = 0
        """Bytes of frames that the socket has accepted or buffers."""
        self._connections = connections
        self._is_open = False
        self._is_reading_paused = False
        self._large_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._closed = self._loop.create_future()

    # Hooks of subclasses.

    @abstractmethod
    def handle_opened(self) -> None:
        """Start: the socket is connected."""

    @abstractmethod
    def handle_frame(self, frame: Frame) -> None:
        """Process one frame; may end the connection."""

    @abstractmethod
    def handle_closed(self) -> None:
        """React to the end of the connection; `end_reason` says why."""

    def handle_writable(self) -> None:
        """React to the socket accepting bytes again."""

    def handle_large(self, size_bytes: int) -> None:
        """React to a change of how much has arrived of a large frame; 0 once it is whole."""

    # For its owner.

    @property
    def backlog_bytes(self) -> int:
        """Return how many written bytes the socket has not accepted yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def is_reading_paused(self) -> bool:
        """Return whether this side has stopped reading."""
        return self._is_reading_paused

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """Return the other side's verified certificate; None if it presented none."""
        return self._transport.get_extra_info("peercert") or None if self._transport is not None else None

    def endpoint(self, side: Literal["sockname", "peername"]) -> str:
        """Return the address of this side (`sockname`) or of the other (`peername`), as the socket knows it."""
        name = self._transport.get_extra_info(side) if self._transport is not None else None
        return format_address(name[:2]) if name else ""

    @property
    def _is_plain(self) -> bool:
        return self._transport is None or self._transport.get_extra_info("sslcontext") is None

    def finish_handshake(self) -> None:
        """Cancel the handshake's deadline and raise the frame size limit to the configured one."""
        self._cancel_deadline()
        self.reader.frame_bytes_max = self.settings.frame_bytes_max

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes; `is_paused` is true until the socket has accepted all of them; the rest is buffered."""
        if self._transport is not None:
            self._transport.write(data)

    def write_from(self, outbox: Outbox) -> None:
        """Write frames of an outbox as far as the socket accepts them now."""
        transport = self._transport
        # A failed write closes the transport before `connection_lost` is called.
        while outbox.bytes and not self.is_paused and transport is not None and not transport.is_closing():
            chunk = outbox.next_chunk()
            self.written_bytes += len(chunk)
            transport.write(chunk)

    def pause_reading(self) -> None:
        """Stop reading and delivering frames until `resume_reading`; TCP flow control then slows the sender."""
        if not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue where `pause_reading` stopped, in the loop's next turn."""
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._loop.call_soon(self._resume_delivery)

    def refuse(self, refusal: HandshakeRefusal) -> None:
        """Send the other side the reason, then close."""
        if not self._is_open:
            return
        self.refusal = refusal
        self.write(encode_refusal(refusal))
        self.close(f"refused by this side: {refusal.code}: {refusal.sentence}")

    def close(self, reason: str) -> None:
        """Close after the buffered bytes are sent, or after `CLOSE_TIMEOUT_S`; deliver no more frames."""
        if not self._is_open or self._transport is None:
            return
        self._is_open = False
        self.end_reason = reason
        self._transport.close()
        self._set_deadline(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close immediately and drop unsent bytes; deliver no more frames."""
        self._is_open = False
        self.end_reason = self.end_reason or reason
        if self._transport is not None:
            self._transport.abort()

    def evict(self, reason: str) -> None:
        """Close it immediately because others need what it holds."""
        self.abort(reason)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.shield(self._closed)

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake and its deadline."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_open = True
        self._connections.add(self)
        # Any byte that the socket did not accept pauses the writer, so that pending data is queued in one place (the
        # outbox), uncopied. With TLS a buffer at the limit pauses; without TLS only one beyond it, hence 1 and 0.
        self._transport.set_write_buffer_limits(high=0 if self._is_plain else 1)
        _tune(transport.get_extra_info("socket"), self.settings.unanswered_timeout_ms)
        name = transport.get_extra_info("peername")
        self.peer_host, self.peer_port = name[:2] if name else ("", 0)
        self._set_deadline(self.settings.handshake_timeout_ms / 1000, self._refuse_late)
        self.handle_opened()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer to receive into."""
        return self.reader.writable()

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver every frame that is complete now."""
        self.reader.received(nbytes)
        self._deliver_frames()

    def pause_writing(self) -> None:
        """Note that the socket's buffer is full."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """Let the owner write again."""
        self.is_paused = False
        self.handle_writable()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end of the connection, once."""
        self._cancel_deadline()
        self.end_reason = self.end_reason or (str(error) if error else "closed by the other side")
        self._transport, self._is_open = None, False
        self.reader.close()
        self._connections.discard(self)
        if not self._closed.done():
            self._closed.set_result(None)
        self.handle_closed()

    def _deliver_frames(self) -> None:
        reader = self.reader
        try:
            while self._is_open and not self._is_reading_paused and (frame := reader.next_frame()) is not None:
                self.handle_frame(frame)
                if reader.is_drained:
                    break
        except DecodeError as error:
            self.refuse(refuse(RefusalCode.BAD_FRAME, error.message))
        if reader.large_bytes != self._large_bytes and self._is_open:
            self._large_bytes = reader.large_bytes
            self.handle_large(reader.large_bytes)

    def _resume_delivery(self) -> None:
        # Frames read before the pause come first; delivering them may pause reading again.
        self._deliver_frames()
        if not self._is_reading_paused and self._transport is not None:
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
    """Disable Nagle's algorithm, and let the kernel drop a connection whose other side is silent.

    Without the latter, a connection that survives a long network outage sends again only after TCP's exponential
    backoff, many seconds after the network is back.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        idle_s = max(1, unanswered_timeout_ms // 2000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered_timeout_ms)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)

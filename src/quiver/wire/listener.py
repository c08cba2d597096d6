"""The way in: accepts connections, makes each say who it is, and delivers what they send.

It owns all incoming connections until they have proven themselves, and then those of peers, at most one for each node;
connections for requests it hands to the server. Nothing is delivered from a connection before its handshake is done. A
peer that connects again replaces its former connection, since that one is broken even if no packet has said so.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Protocol

from quiver.addresses import Address, format_address
from quiver.errors import ConfigError
from quiver.logs import RateLimitedLogger
from quiver.model import NodeId
from quiver.wire.connection import CLOSE_TIMEOUT_S, Connection, NetworkContext, PeerTraffic
from quiver.wire.frames import HEADER_BYTES, Frame, FrameKind
from quiver.wire.handshake import (
    HandshakeRefusal,
    Hello,
    RefusalCode,
    RequesterHello,
    check_hello,
    encode_hello,
    refuse,
)
from quiver.wire.tls import check_certificate

logger = logging.getLogger(__name__)


class Listener:
    """Accept connections from other nodes."""

    def __init__(self, context: NetworkContext, server_context: ssl.SSLContext | None) -> None:
        self.context = context
        self._server_context = server_context
        self.warnings = RateLimitedLogger(logger, context.clock)
        self.refused = 0
        self.strangers: set[IncomingConnection] = set()
        self.proven: dict[NodeId, IncomingConnection] = {}
        self._server: asyncio.Server | None = None

    async def bind(self, host: str, port: int) -> Address:
        """Take the address, without accepting yet; return it, with the port that was chosen if 0 was asked for.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        handshake_timeout_s = self.context.settings.handshake_timeout_ms / 1000
        try:
            self._server = await loop.create_server(
                lambda: IncomingConnection(self),
                host,
                port,
                start_serving=False,
                ssl=self._server_context,
                ssl_handshake_timeout=handshake_timeout_s if self._server_context else None,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S if self._server_context else None,
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
        bound_host, bound_port = self._server.sockets[0].getsockname()[:2]
        return bound_host, bound_port

    async def serve(self) -> None:
        """Begin to accept."""
        if self._server is not None:
            await self._server.start_serving()

    def close(self) -> None:
        """Accept no more; what is connected stays so until its owner ends it."""
        if self._server is not None:
            self._server.close()
            self._server = None

    # What its connections report.

    def handle_opened(self, connection: IncomingConnection) -> None:
        """Let a stranger in, if there is room."""
        if self._server is None:
            connection.abort("closed by this side")
            return
        if len(self.strangers) >= self.context.settings.handshakes_max:
            sentence = f"{len(self.strangers)} other connections have not said hello yet"
            connection.refuse(refuse(RefusalCode.TOO_MANY_CONNECTIONS, sentence))
            return
        self.strangers.add(connection)

    def handle_hello(self, connection: IncomingConnection, frame: Frame) -> None:
        """Decide on a connection's first frame."""
        answer = check_hello(frame, self.context.hello, self.context.identity_of)
        if not isinstance(answer, HandshakeRefusal):
            answer = check_certificate(connection.certificate, self.context.tls, answer.node) or answer
        match answer:
            case HandshakeRefusal():
                connection.refuse(answer)
            case Hello():
                self._admit_peer(connection, answer)
            case RequesterHello():
                self._admit_requester(connection, answer)

    def _admit_peer(self, connection: IncomingConnection, hello: Hello) -> None:
        node = NodeId(hello.node)
        former = self.proven.get(node)
        if former is None and len(self.proven) >= self.context.settings.connections_max:
            sentence = f"{len(self.proven)} other nodes are connected"
            connection.refuse(refuse(RefusalCode.TOO_MANY_CONNECTIONS, sentence))
            return
        self.strangers.discard(connection)
        self.proven[node] = connection
        connection.write(encode_hello(self.context.hello))
        connection.accept(PeerSession(self, connection, node, self.context.on_greeted(hello)))
        if former is not None:
            former.abort("replaced by a new connection")

    def _admit_requester(self, connection: IncomingConnection, hello: RequesterHello) -> None:
        server = self.context.server
        if server is None:
            connection.refuse(refuse(RefusalCode.NOT_SERVING, "no requests are taken here"))
            return
        session = server.admit(connection, hello)
        if isinstance(session, HandshakeRefusal):
            connection.refuse(session)
            return
        self.strangers.discard(connection)
        connection.write(encode_hello(self.context.hello))
        connection.accept(session)

    def handle_closed(self, connection: IncomingConnection) -> None:
        """Forget a connection."""
        self.strangers.discard(connection)
        if connection.refusal is not None:
            self._note_refusal(connection, connection.refusal)

    def handle_peer_closed(self, connection: IncomingConnection, peer: NodeId) -> None:
        """Forget a node's connection, unless another has replaced it, and report it."""
        if self.proven.get(peer) is connection:
            del self.proven[peer]
        self.context.on_lost(peer)

    def _note_refusal(self, connection: IncomingConnection, refusal: HandshakeRefusal) -> None:
        self.refused += 1
        self.warnings.warn(
            connection.peer_host,
            "connection refused",
            address=format_address((connection.peer_host, connection.peer_port)),
            peer=connection.session.name if connection.session else None,
            code=refusal.code,
            sentence=refusal.sentence,
        )


class Session(Protocol):
    """What a connection carries once its handshake is done."""

    @property
    def name(self) -> NodeId | str:
        """Return who is at the other end, for people."""
        ...

    def handle_frame(self, frame: Frame) -> None:
        """Take one frame; may end the connection."""
        ...

    def handle_writable(self) -> None:
        """Take note that the socket takes bytes again."""
        ...

    def handle_closed(self) -> None:
        """Take note that the connection has ended."""
        ...


class IncomingConnection(Connection):
    """The side that was dialled: waits for a hello, then hands everything to the session that it asks for."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.context.settings, listener.context.connections)
        self.session: Session | None = None
        self._listener = listener

    def accept(self, session: Session) -> None:
        """End the handshake."""
        self.session = session
        self.finish_handshake()

    def handle_opened(self) -> None:
        """Ask for admission."""
        self._listener.handle_opened(self)

    def handle_frame(self, frame: Frame) -> None:
        """Hand a frame to the session; before the handshake is done, take the hello."""
        if self.session is None:
            self._listener.handle_hello(self, frame)
        else:
            self.session.handle_frame(frame)

    def handle_writable(self) -> None:
        """Let the session send on."""
        if self.session is not None:
            self.session.handle_writable()

    def handle_closed(self) -> None:
        """Let listener and session know."""
        self._listener.handle_closed(self)
        if self.session is not None:
            self.session.handle_closed()


class PeerSession:
    """A node's Raft messages: only received, counted and delivered."""

    def __init__(self, listener: Listener, connection: IncomingConnection, peer: NodeId, heard: PeerTraffic) -> None:
        self._listener = listener
        self._connection = connection
        self._peer = peer
        self._heard = heard
        self._on_message = listener.context.on_message

    @property
    def name(self) -> NodeId:
        """Return the node's id."""
        return self._peer

    def handle_frame(self, frame: Frame) -> None:
        """Deliver a message."""
        if frame.kind is FrameKind.MESSAGE:
            self._heard.messages_in += 1
            self._heard.bytes_in += HEADER_BYTES + len(frame.payload)
            self._on_message(self._peer, frame.payload)
        else:
            name = frame.kind.name.lower()
            self._connection.refuse(refuse(RefusalCode.UNEXPECTED_FRAME, f"a {name} after the handshake"))

    def handle_writable(self) -> None:
        """Send nothing: this side only answered a hello."""

    def handle_closed(self) -> None:
        """Let the listener know."""
        self._listener.handle_peer_closed(self._connection, self._peer)

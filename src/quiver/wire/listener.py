"""The incoming side: accepts connections, runs their handshakes, and delivers the messages of peers.

It owns all incoming connections until their handshake is done, and then those of peers, at most one per node; the
request server owns connections for requests. Nothing is delivered from a connection before its handshake is done. A
peer that connects again replaces its previous connection, which is broken even if TCP has not noticed yet.

Large frames of clients that have not arrived completely may take `requests_bytes_max` together, in addition to whole
ones: beyond it, the connection that has sent nothing for the longest time is closed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from typing import Protocol

from quiver.addresses import Address, format_address
from quiver.errors import ConfigError
from quiver.logs import RateLimitedLogger
from quiver.model import NodeId
from quiver.tasks import TaskScope
from quiver.tls_acceptor import TlsAcceptor
from quiver.wire.connection import CLOSE_TIMEOUT_S, Connection, NetworkContext, PeerTraffic
from quiver.wire.frames import HEADER_BYTES, Frame, FrameKind
from quiver.wire.handshake import (
    HandshakeRefusal,
    Hello,
    RefusalCode,
    RequesterHello,
    check_claims,
    encode_hello,
    hide_node,
    read_hello,
    refuse,
)
from quiver.wire.patience import Patience, check_interval_s
from quiver.wire.proving import NodeChallenge, refuse_unproven
from quiver.wire.tls import check_certificate

logger = logging.getLogger(__name__)


class Listener:
    """Accept connections from other nodes."""

    def __init__(self, context: NetworkContext, server_context: ssl.SSLContext | None, tasks: TaskScope) -> None:
        """`tasks`: what TLS handshakes run in."""
        self.context = context
        self._tasks = tasks
        self._server_context = server_context
        self.warnings = RateLimitedLogger(logger, context.clock)
        self.refused = 0
        # In the order in which they connected.
        self.handshaking: dict[IncomingConnection, None] = {}
        self._incoming: dict[str, dict[IncomingConnection, None]] = {}
        # What has arrived of the large frames of clients, in the order in which they last grew.
        self._partial: dict[IncomingConnection, int] = {}
        self._partial_bytes = 0
        self._check: asyncio.TimerHandle | None = None
        self.evicted = 0
        self.peers: dict[NodeId, IncomingConnection] = {}
        self._server: asyncio.Server | TlsAcceptor | None = None

    async def bind(self, host: str, port: int) -> Address:
        """Bind the address, without accepting yet; return it, with the actual port if 0 was given.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        try:
            self._server = await self._bind(host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
        bound_host, bound_port = self._server.sockets[0].getsockname()[:2]
        return bound_host, bound_port

    async def _bind(self, host: str, port: int) -> asyncio.Server | TlsAcceptor:
        if self._server_context is None:
            loop = asyncio.get_running_loop()
            return await loop.create_server(lambda: IncomingConnection(self), host, port, start_serving=False)
        acceptor = TlsAcceptor(
            lambda: IncomingConnection(self),
            self._server_context,
            tasks=self._tasks,
            clock=self.context.clock,
            timeout_s=self.context.settings.handshake_timeout_ms / 1000,
            shutdown_timeout_s=CLOSE_TIMEOUT_S,
        )
        await acceptor.bind(host, port)
        return acceptor

    async def serve(self) -> None:
        """Start accepting."""
        if self._server is not None:
            await self._server.start_serving()
            self._schedule_check()

    def close(self) -> None:
        """Stop accepting; open connections stay open until their owner closes them."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._check is not None:
            self._check.cancel()

    # Connections that keep this node waiting.

    def _schedule_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(check_interval_s(self.context.settings), self._end_late)

    def _end_late(self) -> None:
        """Close connections that send half a frame, do not read their answers, or are silent; runs periodically."""
        now_s = asyncio.get_running_loop().time()
        for connections in tuple(self._incoming.values()):
            for connection in tuple(connections):
                reason = connection.check_patience(now_s)
                if reason:
                    connection.evict(reason)
        self._schedule_check()

    def note_evicted(self, connection: IncomingConnection, reason: str) -> None:
        """Count and log a connection that is closed because it is late, or others need what it holds."""
        self.evicted += 1
        self.warnings.warn(
            f"late {connection.peer_host}",
            "connection closed",
            address=format_address((connection.peer_host, connection.peer_port)),
            reason=reason,
        )

    def _evict_idle(self, candidates: Iterable[IncomingConnection]) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        idle = min((each for each in candidates if each.is_idle), key=_idle_since, default=None)
        if idle is None:
            return False
        self.evicted += 1
        self.handshaking.pop(idle, None)
        idle.refuse(refuse(RefusalCode.TOO_MANY_CONNECTIONS, "it was idle, and others need the connection"))
        return True

    # Called by its connections.

    def handle_opened(self, connection: IncomingConnection) -> None:
        """Admit a connection to the handshake, or refuse it at the limit."""
        if self._server is None:
            connection.abort("closed by this side")
            return
        settings, host = self.context.settings, connection.peer_host
        same_host = self._incoming.setdefault(host, {})
        if len(same_host) >= settings.address_connections_max and not self._evict_idle(same_host):
            sentence = f"{len(same_host)} connections of this address are in use, and no more may be"
            connection.refuse(refuse(RefusalCode.TOO_MANY_CONNECTIONS, sentence))
            return
        if len(self.handshaking) >= settings.handshakes_max:
            # The newcomer goes first: a handshake takes milliseconds, so the oldest is one that keeps silent.
            self._evict_idle(self.handshaking)
        same_host[connection] = None
        self.handshaking[connection] = None

    def handle_partial(self, connection: IncomingConnection, size_bytes: int) -> None:
        """Count what has arrived of a client's large frame, 0 once it is whole; make room if all take too much."""
        self._partial_bytes += size_bytes - self._partial.pop(connection, 0)
        if not size_bytes:
            return
        self._partial[connection] = size_bytes
        while self._partial_bytes > self.context.settings.requests_bytes_max and len(self._partial) > 1:
            slowest = next(iter(self._partial))
            self.handle_partial(slowest, 0)
            slowest.evict("its frame was not complete, and others needed the memory")

    def handle_hello(self, connection: IncomingConnection, frame: Frame) -> None:
        """Check a connection's first frame and admit or refuse it."""
        hello = read_hello(frame, self.context.hello)
        if isinstance(hello, HandshakeRefusal):
            connection.refuse(hello)
            return
        refusal = check_certificate(connection.certificate, self.context.tls, hello.node)
        secret = self.context.node_secret
        if refusal is None and secret is not None and hello.node is not None:
            if hello.nonce:
                connection.challenge = NodeChallenge(secret, hello, bytes(frame.head), connection.endpoint("sockname"))
                connection.write(connection.challenge.frame)
                return
            refusal = None if secret.accepts_unproven() else refuse_unproven(hello.node)
        self._admit(connection, refusal or hello)

    def handle_proof(self, connection: IncomingConnection, challenge: NodeChallenge, frame: Frame) -> None:
        """Check a node's answer to its challenge and admit or refuse it."""
        self._admit(connection, challenge.check(frame) or challenge.hello)

    def _admit(self, connection: IncomingConnection, said: Hello | RequesterHello | HandshakeRefusal) -> None:
        answer = check_claims(said, self.context.hello, self.context.identity_of)
        match answer:
            case HandshakeRefusal():
                connection.refuse(answer)
            case Hello():
                self._admit_peer(connection, answer)
            case RequesterHello():
                self._admit_requester(connection, answer)

    def _admit_peer(self, connection: IncomingConnection, hello: Hello) -> None:
        node = NodeId(hello.node)
        former = self.peers.get(node)
        if former is None and len(self.peers) >= self.context.settings.connections_max:
            sentence = f"{len(self.peers)} other nodes are connected"
            connection.refuse(refuse(RefusalCode.TOO_MANY_CONNECTIONS, sentence))
            return
        self.handshaking.pop(connection, None)
        self.peers[node] = connection
        connection.write(encode_hello(self._own_hello(connection)))
        connection.accept(PeerSession(self, connection, node, self.context.on_greeted(hello)))
        if former is not None:
            former.abort("replaced by a new connection")

    def _admit_requester(self, connection: IncomingConnection, hello: RequesterHello) -> None:
        server = self.context.server
        if server is None:
            connection.refuse(refuse(RefusalCode.NOT_SERVING, "this node accepts no requests"))
            return
        session = server.admit(connection, hello)
        if isinstance(session, HandshakeRefusal):
            connection.refuse(session)
            return
        self.handshaking.pop(connection, None)
        own = hide_node(self.context.hello) if hello.node is None else self._own_hello(connection)
        connection.write(encode_hello(own))
        connection.accept(session)

    def _own_hello(self, connection: IncomingConnection) -> Hello:
        own, challenge = self.context.hello, connection.challenge
        return own if challenge is None else challenge.prove(own)

    def handle_closed(self, connection: IncomingConnection) -> None:
        """Remove a closed connection."""
        self.handshaking.pop(connection, None)
        self.handle_partial(connection, 0)
        same_host = self._incoming.get(connection.peer_host, {})
        same_host.pop(connection, None)
        if not same_host:
            self._incoming.pop(connection.peer_host, None)
        if connection.refusal is not None:
            self._note_refusal(connection, connection.refusal)

    def handle_peer_closed(self, connection: IncomingConnection, peer: NodeId) -> None:
        """Remove a peer's connection, unless it was replaced, and report the loss."""
        if self.peers.get(peer) is connection:
            del self.peers[peer]
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


def _idle_since(connection: IncomingConnection) -> float:
    return connection.idle_since


class Session(Protocol):
    """Handles the frames of a connection after its handshake."""

    @property
    def name(self) -> NodeId | str:
        """Return the other side's node id or name, for logs."""
        ...

    def handle_frame(self, frame: Frame) -> None:
        """Process one frame; may end the connection."""
        ...

    @property
    def is_busy(self) -> bool:
        """Return whether the other side waits for something."""
        ...

    @property
    def idle_since(self) -> float:
        """Return when it last did, or when it connected, by the loop's clock."""
        ...

    def handle_writable(self) -> None:
        """React to the socket accepting bytes again."""
        ...

    def handle_closed(self) -> None:
        """React to the end of the connection."""
        ...


class IncomingConnection(Connection):
    """The accepting side: waits for a hello, then delivers all frames to the session that the hello asks for."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.context.settings, listener.context.connections)
        self.session: Session | None = None
        self.challenge: NodeChallenge | None = None
        """What the node on the other side has to answer, or has answered."""
        self._listener = listener
        self._opened_s = self._loop.time()
        self._patience = Patience(self._opened_s)

    @property
    def _is_client(self) -> bool:
        return self.session is not None and isinstance(self.session.name, str)

    @property
    def idle_since(self) -> float:
        """Return when the other side last had something in flight, or connected."""
        return self._opened_s if self.session is None else self.session.idle_since

    @property
    def is_idle(self) -> bool:
        """Return whether closing it makes room: it is open and silent, and no known node of the cluster uses it."""
        return self._is_open and (self.session is None or (self._is_client and not self.session.is_busy))

    def check_patience(self, now_s: float) -> str:
        """Return why this side must close the connection; empty if it may stay."""
        if self.session is None:
            return ""  # the handshake has its own deadline
        return self._patience.check(self, now_s, is_busy=self.session.is_busy)

    def evict(self, reason: str) -> None:
        """Close it immediately, and count and log that."""
        self._listener.note_evicted(self, reason)
        super().evict(reason)

    def accept(self, session: Session) -> None:
        """Finish the handshake."""
        self.session = session
        self.finish_handshake()

    def handle_large(self, size_bytes: int) -> None:
        """Count what has arrived of a client's large frame."""
        if self._is_client:
            self._listener.handle_partial(self, size_bytes)

    def handle_opened(self) -> None:
        """Ask for admission."""
        self._listener.handle_opened(self)

    def handle_frame(self, frame: Frame) -> None:
        """Deliver a frame to the session; before the handshake is done, process the hello."""
        if self.session is not None:
            self.session.handle_frame(frame)
        elif self.challenge is not None:
            self._listener.handle_proof(self, self.challenge, frame)
        else:
            self._listener.handle_hello(self, frame)

    def handle_writable(self) -> None:
        """Let the session continue sending."""
        if self.session is not None:
            self.session.handle_writable()

    def handle_closed(self) -> None:
        """Report to listener and session."""
        self._listener.handle_closed(self)
        if self.session is not None:
            self.session.handle_closed()


class PeerSession:
    """Receive, count and deliver a node's Raft messages."""

    def __init__(self, listener: Listener, connection: IncomingConnection, peer: NodeId, traffic: PeerTraffic) -> None:
        self._listener = listener
        self._connection = connection
        self._peer = peer
        self._traffic = traffic
        self._on_message = listener.context.on_message

    @property
    def name(self) -> NodeId:
        """Return the node's id."""
        return self._peer

    @property
    def is_busy(self) -> bool:
        """Return true: nodes that share no group are silent, and the kernel notices one that is gone."""
        return True

    @property
    def idle_since(self) -> float:
        """Return 0: a node's connection is not closed to make room."""
        return 0.0

    def handle_frame(self, frame: Frame) -> None:
        """Deliver a message."""
        if frame.kind is FrameKind.MESSAGE:
            self._traffic.messages_in += 1
            self._traffic.bytes_in += HEADER_BYTES + len(frame.body)
            self._on_message(self._peer, frame.body)
        else:
            name = frame.kind.name.lower()
            self._connection.refuse(refuse(RefusalCode.UNEXPECTED_FRAME, f"a {name} after the handshake"))

    def handle_writable(self) -> None:
        """Do nothing: this side only answers the hello."""

    def handle_closed(self) -> None:
        """Report to the listener."""
        self._listener.handle_peer_closed(self._connection, self._peer)

"""The way in: accepts connections, makes each say who it is, and delivers what they send.

It owns all incoming connections: those that have not proven themselves, and at most one for each node that has.
Nothing is delivered from a connection before its handshake is done. A node that connects again replaces its former
connection, since that one is broken even if no packet has said so.
"""

from __future__ import annotations

import asyncio
import logging

from quiver.errors import ConfigError
from quiver.model import NodeId
from quiver.wire.connection import Connection
from quiver.wire.context import Address, Context, Heard
from quiver.wire.frames import HEADER_BYTES, Frame, Kind
from quiver.wire.handshake import Hello, Refusal, RefusalCode, encode_hello, judge_hello, refuse
from quiver.wire.quietlog import QuietLog

logger = logging.getLogger(__name__)


class Listener:
    """Accept connections from other nodes."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.quiet_log = QuietLog(logger, context.clock)
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
        try:
            self._server = await loop.create_server(lambda: IncomingConnection(self), host, port, start_serving=False)
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
        answer = judge_hello(frame, self.context.hello, dialled=None)
        if isinstance(answer, Hello) and self._is_full(NodeId(answer.node)):
            answer = refuse(RefusalCode.TOO_MANY_CONNECTIONS, f"{len(self.proven)} other nodes are connected")
        if isinstance(answer, Refusal):
            connection.refuse(answer)
            return
        self._admit(connection, answer)

    def _admit(self, connection: IncomingConnection, hello: Hello) -> None:
        node = NodeId(hello.node)
        self.strangers.discard(connection)
        former = self.proven.get(node)
        self.proven[node] = connection
        connection.write(encode_hello(self.context.hello))
        connection.accept(node, self.context.on_greeted(hello))
        if former is not None:
            former.abort("replaced by a new connection")

    def handle_closed(self, connection: IncomingConnection) -> None:
        """Forget a connection; report it if it had proven itself."""
        self.strangers.discard(connection)
        if connection.refusal is not None:
            self._note_refusal(connection, connection.refusal)
        if connection.peer is None:
            return
        if self.proven.get(connection.peer) is connection:
            del self.proven[connection.peer]
        self.context.on_lost(connection.peer)

    def _is_full(self, node: NodeId) -> bool:
        return len(self.proven) >= self.context.settings.connections_max and node not in self.proven

    def _note_refusal(self, connection: IncomingConnection, refusal: Refusal) -> None:
        self.refused += 1
        self.quiet_log.tell(
            connection.peer_host,
            "connection refused",
            address=f"{connection.peer_host}:{connection.peer_port}",
            peer=connection.peer,
            code=refusal.code,
            sentence=refusal.sentence,
        )


class IncomingConnection(Connection):
    """The side that was dialled: waits for a hello, then only receives."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.context)
        self.peer: NodeId | None = None
        self._heard: Heard | None = None
        self._listener = listener
        self._on_message = listener.context.on_message

    def accept(self, peer: NodeId, heard: Heard) -> None:
        """End the handshake with a node, whose messages are counted in `heard`."""
        self.peer, self._heard = peer, heard
        self.prove()

    def handle_opened(self) -> None:
        """Ask for admission."""
        self._listener.handle_opened(self)

    def handle_frame(self, frame: Frame) -> None:
        """Deliver a message; before the handshake is done, take the hello."""
        peer, heard = self.peer, self._heard
        if peer is None or heard is None:
            self._listener.handle_hello(self, frame)
        elif frame.kind is Kind.MESSAGE:
            heard.messages_in += 1
            heard.bytes_in += HEADER_BYTES + len(frame.payload)
            self._on_message(peer, frame.payload)
        else:
            name = frame.kind.name.lower()
            self.refuse(refuse(RefusalCode.UNEXPECTED_FRAME, f"a {name} after the handshake"))

    def handle_closed(self) -> None:
        """Let the listener know."""
        self._listener.handle_closed(self)

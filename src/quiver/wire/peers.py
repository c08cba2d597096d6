"""One node's network: a link out to every peer, a listener for what comes in. The real side of the `Network` seam.

It promises what that seam does: a message arrives unchanged or not at all; it may be lost. Between two nodes messages
do not overtake each other as long as one connection lasts. It decides nothing about what messages mean.

Life: `async with` takes the address; `start` says who gets the messages, and only then is anything accepted or
dialled; leaving the `async with`, or `close`, ends all connections. A handler that raises is a bug of this program:
the exception leaves the `async with` and nothing more is delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from quiver.addresses import Address, format_address
from quiver.clock import Clock, Rng
from quiver.config import TlsSettings, WireSettings
from quiver.errors import invariant
from quiver.model import Buffer, NodeId
from quiver.tasks import TaskScope
from quiver.wire.connection import NetworkContext, PeerTraffic
from quiver.wire.handshake import Hello, IdentityOf, make_hello
from quiver.wire.link import Link
from quiver.wire.listener import Listener
from quiver.wire.serving import RequestServer
from quiver.wire.status import ConnectionStatus, NetworkStatus
from quiver.wire.tls import make_client_context, make_server_context

MessageHandler = Callable[[NodeId, memoryview], None]
LostHandler = Callable[[NodeId], None]


def _know_nobody(node: NodeId) -> str | None:
    """Take every node for what it says it is."""


class PeerNetwork:
    """Carry messages between this node and its peers over TCP, and requests to `server`, which has its own life.

    `incarnation` must differ at every start of the process, `identity` at every new disk; a node that `identity_of`
    knows by another identity than it says is refused. Use as ``async with``.

    Raises:
        ConfigError: `tls` names files that cannot be used.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        cluster_id: str,
        incarnation: int,
        listen: Address,
        peers: Mapping[NodeId, Address],
        settings: WireSettings,
        clock: Clock,
        rng: Rng,
        identity: str = "",
        identity_of: IdentityOf = _know_nobody,
        server: RequestServer | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        self.address = listen
        """Where others reach this node; with the port that was chosen, if 0 was asked for, once entered."""
        self._node = node
        tls = tls or TlsSettings()
        self._context = NetworkContext(
            hello=make_hello(cluster_id=cluster_id, node=node, incarnation=incarnation, identity=identity),
            settings=settings,
            clock=clock,
            rng=rng,
            connections=set(),
            identity_of=identity_of,
            server=server,
            tls=tls,
            client_context=make_client_context(tls),
            on_greeted=self._handle_greeted,
            on_message=self._handle_message,
            on_lost=self._handle_lost,
        )
        self._listener = Listener(self._context, make_server_context(tls))
        self._links = {peer: Link(peer, address, self._context) for peer, address in peers.items()}
        self._heard: dict[NodeId, PeerTraffic] = {}
        self._messages_to_unknown = 0
        self._handler: MessageHandler = _ignore_message
        self._on_lost: LostHandler = _ignore_loss
        self._started = asyncio.Event()
        self._accepting = asyncio.Event()
        self._is_running = False
        self._is_closed = False
        self._tasks = TaskScope(self.close)
        self._supervisor: asyncio.Task[None] | None = None
        self._runs: dict[NodeId, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    # Life.

    async def __aenter__(self) -> Self:
        self.address = await self._listener.bind(*self.address)
        await self._tasks.__aenter__()
        self._supervisor = self._tasks.start(self._run())
        return self

    def start(self, handler: MessageHandler, on_lost: LostHandler) -> None:
        """Begin to accept and to dial; deliver incoming messages to `handler`, report broken connections to `on_lost`.

        Both are called in the event loop. A message that is handed over may be kept and never changes.
        """
        invariant(not self._started.is_set(), "a network is started only once", node=self._node)
        self._handler, self._on_lost = handler, on_lost
        self._started.set()

    async def wait_accepting(self) -> None:
        """Wait until others can connect, which is soon after `start`."""
        await self._accepting.wait()

    async def close(self) -> None:
        """End all connections; what the sockets do not take within a second is lost. Nothing is delivered any more."""
        self._is_closed = True
        self._listener.close()
        for task in (self._supervisor, *self._runs.values()):
            if task is not None:
                task.cancel()
        for link in self._links.values():
            link.close()
        for connection in tuple(self._context.connections):
            connection.close("closed by this side")
        await asyncio.gather(*(connection.wait_closed() for connection in self._context.connections))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def _run(self) -> None:
        await self._started.wait()
        await self._listener.serve()
        self._accepting.set()
        self._is_running = True
        for link in self._links.values():
            self._launch(link)
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _launch(self, link: Link) -> None:
        self._runs[link.peer] = self._tasks.start(link.run())

    # Peers.

    def add_peer(self, node: NodeId, address: Address) -> None:
        """Begin to dial a node; a node that is known is dialled at its new address."""
        known = self._links.get(node)
        if node == self._node or (known is not None and known.address == address):
            return
        self.remove_peer(node)
        self._links[node] = link = Link(node, address, self._context)
        if self._is_running and not self._is_closed:
            self._launch(link)

    def remove_peer(self, node: NodeId) -> None:
        """End the connection to a node and send to it no more; what it sends is still delivered."""
        link = self._links.pop(node, None)
        run = self._runs.pop(node, None)
        if run is not None:
            run.cancel()
        if link is not None:
            link.close()
            self._forget_stranger(node)

    def peer_incarnation(self, node: NodeId) -> int | None:
        """Return the incarnation that a node gave in its last handshake, or None if there was none."""
        heard = self._heard.get(node)
        return None if heard is None else heard.incarnation

    # Messages.

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        """Queue one message, given in parts that must not change any more; drop it if its node cannot be reached.

        Raises:
            RequestError: the message is larger than `frame_bytes_max` allows.
        """
        link = self._links.get(to)
        if link is None:
            self._messages_to_unknown += 1
            return
        link.send(parts)

    def backlog_bytes(self, to: NodeId) -> int:
        """Return how many queued bytes the socket to this node has not taken yet."""
        link = self._links.get(to)
        return 0 if link is None else link.backlog_bytes

    def status(self) -> NetworkStatus:
        """Return a snapshot."""
        nodes = sorted({*self._links, *self._listener.proven})
        return NetworkStatus(
            node=self._node,
            address=format_address(self.address),
            peers=tuple(self._peer_status(node) for node in nodes),
            handshakes=len(self._listener.strangers),
            refused=self._listener.refused,
            messages_to_unknown=self._messages_to_unknown,
        )

    def _peer_status(self, node: NodeId) -> ConnectionStatus:
        link, heard = self._links.get(node), self._heard.get(node)
        return ConnectionStatus(
            node=node,
            address=format_address(link.address) if link else "",
            is_connected=link is not None and link.is_connected,
            is_heard=node in self._listener.proven,
            incarnation=heard.incarnation if heard else None,
            messages_out=link.messages_out if link else 0,
            bytes_out=link.bytes_out if link else 0,
            messages_in=heard.messages_in if heard else 0,
            bytes_in=heard.bytes_in if heard else 0,
            messages_dropped=link.messages_dropped if link else 0,
            backlog_bytes=link.backlog_bytes if link else 0,
            reconnects=max(0, link.connects - 1) if link else 0,
            last_error=link.last_error if link else "",
        )

    # What links and listener report.

    def _handle_greeted(self, hello: Hello) -> PeerTraffic:
        node = NodeId(hello.node)
        heard = self._heard.setdefault(node, PeerTraffic(hello.incarnation))
        heard.incarnation = hello.incarnation
        if node in self._links:
            self._links[node].hurry(hello.incarnation)
        return heard

    def _handle_message(self, node: NodeId, message: memoryview) -> None:
        try:
            self._handler(node, message)
        except Exception as error:  # noqa: BLE001 - asyncio would log it and go on; `_run` raises it again
            self._fail(error)

    def _handle_lost(self, node: NodeId) -> None:
        self._forget_stranger(node)
        if self._is_closed:
            return
        try:
            self._on_lost(node)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _forget_stranger(self, node: NodeId) -> None:
        """Keep nothing of a node that is neither a peer nor connected: such nodes have no bound."""
        if node not in self._links and node not in self._listener.proven:
            self._heard.pop(node, None)

    def _fail(self, error: Exception) -> None:
        self._handler, self._on_lost = _ignore_message, _ignore_loss
        self._failure = self._failure or error
        self._failed.set()


def _ignore_message(node: NodeId, message: memoryview) -> None:
    """Take messages after a handler has failed."""


def _ignore_loss(node: NodeId) -> None:
    """Take reports after a handler has failed."""

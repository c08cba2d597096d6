"""One node's network: a link to every peer and a listener. The real implementation of the `Network` seam.

It guarantees what that seam does: a message arrives unchanged or not at all. Between two nodes, messages stay in order
as long as one connection lasts. It does not interpret messages.

Life: `async with` binds the address; `start` sets the handlers, and only then does it accept and dial; leaving the
`async with`, or `close`, ends all connections. A handler that raises is a bug of this program: the exception leaves the
`async with` and nothing more is delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from quiver.wire.proving import NodeSecret
from quiver.wire.serving import RequestServer
from quiver.wire.tls import make_client_context, make_server_context

MessageHandler = Callable[[NodeId, memoryview], None]
LostHandler = Callable[[NodeId], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatus:
    """The connections with one peer, or with another node that has connected; counts are since process start."""

    node: NodeId
    address: str
    """The address that is dialled; empty for a node that is not a peer."""
    is_connected: bool
    """Whether the outgoing connection is up."""
    is_heard: bool
    """Whether the incoming connection is up."""
    incarnation: int | None
    messages_out: int
    bytes_out: int
    messages_in: int
    bytes_in: int
    messages_dropped: int
    backlog_bytes: int
    reconnects: int
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStatus:
    """One node's network."""

    node: NodeId
    address: str
    peers: tuple[ConnectionStatus, ...]
    handshakes: int
    """Incoming connections whose handshake is not done."""
    refused: int
    """Incoming connections that were refused."""
    evicted: int
    """Incoming connections that were closed because they were silent, slow, or idle while others needed them."""
    messages_to_unknown: int
    """Messages dropped because their target is not a peer."""


def _no_identities(node: NodeId) -> str | None:
    """Know no identity, so that every node is accepted as the one it claims to be."""


class PeerNetwork:
    """Carry messages between this node and its peers over TCP, and requests to `server`, whose life is separate.

    `incarnation` must differ at every start of the process, `identity` for every new disk; a node whose hello has
    another identity than `identity_of` returns is refused. With `node_secret`, peers prove themselves by it. Use as
    ``async with``.

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
        identity_of: IdentityOf = _no_identities,
        server: RequestServer | None = None,
        tls: TlsSettings | None = None,
        node_secret: NodeSecret | None = None,
    ) -> None:
        self.address = listen
        """This node's address; once entered, with the actual port if 0 was given."""
        self._node = node
        tls = tls or TlsSettings()
        self._context = NetworkContext(
            hello=make_hello(cluster_id=cluster_id, node=node, incarnation=incarnation, identity=identity),
            settings=settings,
            clock=clock,
            rng=rng,
            connections=set(),
            identity_of=identity_of,
            node_secret=node_secret,
            server=server,
            tls=tls,
            client_context=make_client_context(tls),
            on_greeted=self._handle_greeted,
            on_message=self._handle_message,
            on_lost=self._handle_lost,
        )
        server_context = make_server_context(tls)
        self.tls_contexts = (self._context.client_context, server_context)
        """The TLS contexts for dialling and accepting; None: without TLS."""
        self._tasks = TaskScope(self.close)
        self._listener = Listener(self._context, server_context, self._tasks)
        self._links = {peer: Link(peer, address, self._context) for peer, address in peers.items()}
        self._traffic: dict[NodeId, PeerTraffic] = {}
        self._messages_to_unknown = 0
        self._handler: MessageHandler = _ignore_message
        self._on_lost: LostHandler = _ignore_loss
        self._started = asyncio.Event()
        self._accepting = asyncio.Event()
        self._is_running = False
        self._is_closed = False
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
        """Start accepting and dialling; deliver messages to `handler`, report broken connections to `on_lost`.

        Both are called in the event loop. A delivered message may be kept and never changes.
        """
        invariant(not self._started.is_set(), "a network is started only once", node=self._node)
        self._handler, self._on_lost = handler, on_lost
        self._started.set()

    async def wait_accepting(self) -> None:
        """Wait until others can connect, soon after `start`."""
        await self._accepting.wait()

    async def close(self) -> None:
        """Close all connections; what the sockets do not accept within a second is lost. Deliver nothing more."""
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
        """Start dialling a node; a known node is dialled at its new address."""
        known = self._links.get(node)
        if node == self._node or (known is not None and known.address == address):
            return
        self.remove_peer(node)
        self._links[node] = link = Link(node, address, self._context)
        if self._is_running and not self._is_closed:
            self._launch(link)

    def remove_peer(self, node: NodeId) -> None:
        """Close the link to a node and stop sending to it; messages from it are still delivered."""
        link = self._links.pop(node, None)
        run = self._runs.pop(node, None)
        if run is not None:
            run.cancel()
        if link is not None:
            link.close()
            self._forget_unknown(node)

    # Messages.

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        """Queue one message, in parts that must not change any more; drop it if its node is unreachable.

        Raises:
            RequestError: the message is larger than `frame_bytes_max` allows.
        """
        link = self._links.get(to)
        if link is None:
            self._messages_to_unknown += 1
            return
        link.send(parts)

    def status(self) -> NetworkStatus:
        """Return a snapshot."""
        nodes = sorted({*self._links, *self._listener.peers})
        return NetworkStatus(
            node=self._node,
            address=format_address(self.address),
            peers=tuple(self._peer_status(node) for node in nodes),
            handshakes=len(self._listener.handshaking),
            refused=self._listener.refused,
            evicted=self._listener.evicted,
            messages_to_unknown=self._messages_to_unknown,
        )

    def _peer_status(self, node: NodeId) -> ConnectionStatus:
        link, traffic = self._links.get(node), self._traffic.get(node)
        return ConnectionStatus(
            node=node,
            address=format_address(link.address) if link else "",
            is_connected=link is not None and link.is_connected,
            is_heard=node in self._listener.peers,
            incarnation=traffic.incarnation if traffic else None,
            messages_out=link.messages_out if link else 0,
            bytes_out=link.bytes_out if link else 0,
            messages_in=traffic.messages_in if traffic else 0,
            bytes_in=traffic.bytes_in if traffic else 0,
            messages_dropped=link.messages_dropped if link else 0,
            backlog_bytes=link.backlog_bytes if link else 0,
            reconnects=max(0, link.connects - 1) if link else 0,
            last_error=link.last_error if link else "",
        )

    # Called by links and listener.

    def _handle_greeted(self, hello: Hello) -> PeerTraffic:
        node = NodeId(hello.node)
        traffic = self._traffic.setdefault(node, PeerTraffic(hello.incarnation))
        traffic.incarnation = hello.incarnation
        if node in self._links:
            self._links[node].redial_now(hello.incarnation)
        return traffic

    def _handle_message(self, node: NodeId, message: memoryview) -> None:
        try:
            self._handler(node, message)
        except Exception as error:  # noqa: BLE001 - asyncio would log it and continue; `_run` raises it again
            self._fail(error)

    def _handle_lost(self, node: NodeId) -> None:
        self._forget_unknown(node)
        if self._is_closed:
            return
        try:
            self._on_lost(node)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _forget_unknown(self, node: NodeId) -> None:
        """Drop the counters of a node that is neither a peer nor connected: the number of such nodes is unbounded."""
        if node not in self._links and node not in self._listener.peers:
            self._traffic.pop(node, None)

    def _fail(self, error: Exception) -> None:
        self._handler, self._on_lost = _ignore_message, _ignore_loss
        self._failure = self._failure or error
        self._failed.set()


def _ignore_message(node: NodeId, message: memoryview) -> None:
    """Drop a message: there is no handler yet, or it has failed."""


def _ignore_loss(node: NodeId) -> None:
    """Ignore a lost connection: there is no handler yet, or it has failed."""

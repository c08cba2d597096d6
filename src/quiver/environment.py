"""The environment of a node: clock, randomness, disk, threads, network and database.

A node uses nothing else outside its process. `SystemEnvironment` is the real one: the machine's clock and files, TCP,
SQLite or PostgreSQL. `quiver.testing` has the simulated one.
"""

from __future__ import annotations

import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from quiver.addresses import Address, format_address, parse_address
from quiver.clock import Clock, Rng, SystemClock
from quiver.config import EncryptionSettings, NodeProof, SecurityMode, Settings, decide_mode, decide_proof
from quiver.features import LEVEL_MAX
from quiver.loop_watchdog import LoopWatchdog
from quiver.metadata import Database, open_database, sqlite_url
from quiver.metrics import MetricFamily, gauge
from quiver.model import NodeId
from quiver.process import describe_process, measure_gc
from quiver.replication.interfaces import Network
from quiver.routing.transport import Transport
from quiver.security.node_proof import load_node_secret
from quiver.security.tokens import Token, new_token
from quiver.storage import Disk, Executor, NodeIdentity, SystemDisk, ThreadExecutor
from quiver.storage.data_directory import metadata_database
from quiver.storage.descriptors import SPARES, SpareDescriptors
from quiver.storage.metrics import describe_lanes
from quiver.tasks import TaskScope
from quiver.turns import Turns
from quiver.wire import Handler, PeerNetwork, RequestPool, RequestServer
from quiver.wire.answer_memory import AnswerMemory, make_answer_memory
from quiver.wire.certificate_reload import CertificateReloader
from quiver.wire.handshake import IdentityOf
from quiver.wire.metrics import describe_network, describe_pool, describe_server
from quiver.wire.proving import NodeSecret
from quiver.wire.tls import make_http_context

if TYPE_CHECKING:
    from quiver.security.key_ring import KeyRing


class NodeNetwork(Network, Protocol):
    """A node's network, for Raft's messages and for requests."""

    @property
    def wire_address(self) -> str:
        """Return the address at which this node is reached, as host:port."""
        ...

    @property
    def transport(self) -> Transport:
        """Return the transport for requests to other nodes."""
        ...

    def serve(self, handler: Handler) -> None:
        """Start handling requests."""
        ...

    async def stop_serving(self, grace_ms: int) -> None:
        """Accept no more requests, and finish those in flight for up to `grace_ms`."""
        ...

    def add_peer(self, node: NodeId, address: Address) -> None:
        """Start sending to a node, or use its new address from now on."""
        ...

    def remove_peer(self, node: NodeId) -> None:
        """Stop sending to a node."""
        ...

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of connections and requests."""
        ...


class Environment(Protocol):
    """The environment of one node; created for each start of the node."""

    clock: Clock
    rng: Rng
    disk: Disk
    executor: Executor
    turns: Turns
    """Orders the requests of clients, over HTTP and the wire, when there are too many."""
    answers: AnswerMemory
    """The memory of answers to clients, over HTTP and the wire."""
    database: Database
    incarnation: int
    """A number that differs from those of all earlier starts of the node."""
    fresh_identity: str
    """The identity that the node gets if its data directory is new."""
    level_max: int
    """The highest feature level that the program knows."""
    mode: SecurityMode
    """How the node is protected."""
    keys: KeyRing | None
    """The keys that open encrypted logs; None: the node has none."""

    @property
    def certificate_problem(self) -> str:
        """Why other nodes and clients refuse the node's certificate; empty if they do not, or without TLS."""
        ...

    def open_network(
        self,
        identity: NodeIdentity,
        *,
        peers: Mapping[NodeId, str],
        identity_of: IdentityOf,
        accepts_unproven: Callable[[], bool],
    ) -> AbstractAsyncContextManager[NodeNetwork]:
        """Bind the node's address; nothing is accepted or dialled before the network is started.

        `accepts_unproven` says whether nodes of programs that cannot prove themselves are accepted now.
        """
        ...

    def make_http_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for accepting HTTP connections; None: without TLS."""
        ...

    def make_token(self) -> Token:
        """Return a new token, which nobody can guess."""
        ...

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of the process and of the machine."""
        ...


def _load_keys(settings: EncryptionSettings) -> KeyRing | None:
    if not settings.has_keys:
        return None
    from quiver.security.key_ring import load_key_ring

    return load_key_ring(file=settings.key_file, command=settings.key_command)


def schema_name(node: NodeId) -> str:
    """Return the name of a node's schema in PostgreSQL."""
    return f"quiver_node_{node}"


class SystemEnvironment:
    """The machine that this process runs on. Use as ``async with``."""

    def __init__(self, settings: Settings) -> None:
        node = settings.node
        self.clock: Clock = SystemClock()
        self.rng: Rng = random.Random()  # noqa: S311 - jitter, not secrets
        self._descriptors = SpareDescriptors(SPARES)
        self.disk: Disk = SystemDisk(self._descriptors)
        self._threads = ThreadExecutor(settings.executor)
        self.executor: Executor = self._threads
        self.turns = Turns()
        self.answers = make_answer_memory(settings.wire)
        url = node.metadata_db or sqlite_url(metadata_database(node.data))
        self.database = open_database(url, schema=schema_name(NodeId(node.id)))
        self.incarnation = time.time_ns()
        self.fresh_identity = secrets.token_hex(16)
        self.level_max = LEVEL_MAX
        self.mode = decide_mode(settings)
        self.keys = _load_keys(settings.encryption)
        host = node.advertise or parse_address(node.wire)[0]
        self.certificates = CertificateReloader(settings.tls, self.clock, node=NodeId(node.id), host=host)
        self._settings = settings
        self._watchdog = LoopWatchdog(alarm_ms=node.loop_lag_alarm_ms)
        measure_gc()

    async def __aenter__(self) -> Self:
        self._watchdog.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.stop()
        self._threads.close()
        self._descriptors.close()

    @property
    def certificate_problem(self) -> str:
        """Return why other nodes and clients refuse the node's certificate; empty if they do not."""
        return self.certificates.problem

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of this process and of its executor."""
        spare = gauge("quiver_spare_fds", "File descriptors held in reserve for the log.", self._descriptors.left)
        return (*describe_process(), spare, *describe_lanes(self._threads.status()), *self._watchdog.metrics())

    @asynccontextmanager
    async def open_network(
        self,
        identity: NodeIdentity,
        *,
        peers: Mapping[NodeId, str],
        identity_of: IdentityOf,
        accepts_unproven: Callable[[], bool],
    ) -> AsyncIterator[NodeNetwork]:
        """Listen on the wire address; one port for peers and for requests."""
        settings = self._settings.wire
        node_secret = None
        if decide_proof(self._settings) is NodeProof.SECRET:
            node_secret = NodeSecret(load_node_secret(self._settings.security.node_secret_file), accepts_unproven)
        server = RequestServer(settings=settings, clock=self.clock, turns=self.turns, memory=self.answers)
        pool = RequestPool(
            name=f"node-{identity.node}",
            cluster_id=identity.cluster,
            node=identity.node,
            identity=identity.identity,
            settings=settings,
            tls=self._settings.tls,
            node_secret=node_secret,
        )
        network = _SystemNetwork(
            node=identity.node,
            cluster_id=identity.cluster,
            incarnation=self.incarnation,
            listen=parse_address(self._settings.node.wire),
            peers={node: parse_address(address) for node, address in peers.items()},
            settings=settings,
            clock=self.clock,
            rng=self.rng,
            identity=identity.identity,
            identity_of=identity_of,
            server=server,
            tls=self._settings.tls,
            node_secret=node_secret,
        )
        network.server, network.transport, network.advertise = server, pool, self._settings.node.advertise
        self.certificates.track(pool.tls_context, *network.tls_contexts)
        async with pool, server, network, TaskScope() as tasks:
            tasks.start(self.certificates.run())
            yield network

    def make_token(self) -> Token:
        """Return a new token from the system's source of secrets."""
        return new_token()

    def make_http_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for accepting HTTP connections, which is kept up to date with its files."""
        context = make_http_context(self._settings.tls, self._settings.gateway)
        self.certificates.track(context)
        return context


class _SystemNetwork(PeerNetwork):
    """`NodeNetwork` over TCP, with Raft's messages and requests on one port."""

    server: RequestServer
    transport: RequestPool
    advertise: str

    @property
    def wire_address(self) -> str:
        host, port = self.address
        return format_address((self.advertise or host, port))

    def serve(self, handler: Handler) -> None:
        self.server.start(handler)

    async def stop_serving(self, grace_ms: int) -> None:
        await self.server.close(grace_ms)

    def metrics(self) -> Iterable[MetricFamily]:
        return (
            *describe_server(self.server.status()),
            *describe_pool(self.transport.status()),
            *describe_network(self.status()),
        )

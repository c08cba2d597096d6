"""The simulated world around one node: the twin of `quiver.environment.SystemEnvironment`.

Raft's messages go through the simulated network, requests through the simulated transport. As on the wire, a node
sends to those only whose address it knows, and takes nothing from one that has the id of another (R22).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from quiver.addresses import Address
from quiver.clock import Clock, Rng
from quiver.environment import NodeNetwork
from quiver.errors import StorageError
from quiver.metadata import Database, open_database
from quiver.metadata.database import Transaction
from quiver.model import Buffer, NodeId
from quiver.replication.interfaces import LostHandler, MessageHandler
from quiver.routing.transport import Transport
from quiver.storage import Disk, Executor, NodeIdentity
from quiver.testing.network import SimulatedNetwork
from quiver.testing.transport import SimulatedTransport
from quiver.wire import Handler
from quiver.wire.handshake import IdentityOf


@dataclass(slots=True)
class Medium:
    """What connects the nodes of a simulation."""

    network: SimulatedNetwork
    transport: SimulatedTransport
    identities: dict[NodeId, str] = field(default_factory=dict)
    """The identity that uses each id at present."""

    def disconnect(self, node: NodeId) -> None:
        """Break all connections of a killed node."""
        self.network.disconnect(node)
        self.transport.disconnect(node)


@dataclass(slots=True)
class SimulatedEnvironment:
    """The world around one life of one node."""

    clock: Clock
    rng: Rng
    disk: Disk
    executor: Executor
    database: Database
    incarnation: int
    fresh_identity: str
    address: str
    medium: Medium

    @asynccontextmanager
    async def open_network(
        self, identity: NodeIdentity, *, peers: Mapping[NodeId, str], identity_of: IdentityOf
    ) -> AsyncIterator[NodeNetwork]:
        """Take the node's address."""
        self.medium.identities[identity.node] = identity.identity
        yield _SimulatedNodeNetwork(self, identity.node, peers, identity_of)


class _SimulatedNodeNetwork:
    """What `NodeNetwork` asks for, from the simulated network and transport."""

    def __init__(
        self, world: SimulatedEnvironment, node: NodeId, peers: Mapping[NodeId, str], identity_of: IdentityOf
    ) -> None:
        self._world = world
        self._node = node
        self._peers = set(peers)
        self._identity_of = identity_of
        self._port = world.medium.network.port(node)
        self._requester = world.medium.transport.port(node, name=f"node-{node}")

    @property
    def wire_address(self) -> str:
        return self._world.address

    @property
    def transport(self) -> Transport:
        return self._requester

    def start(self, handler: MessageHandler, on_lost: LostHandler) -> None:
        def deliver(sender: NodeId, message: memoryview) -> None:
            known = self._identity_of(sender)
            if known is None or known == self._world.medium.identities.get(sender):
                handler(sender, message)

        self._port.start(deliver, on_lost)

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        if to in self._peers:
            self._port.send(to, parts)

    def serve(self, handler: Handler) -> None:
        self._world.medium.transport.serve(self._world.address, self._node, handler, clock=self._world.clock)

    async def stop_serving(self, grace_ms: int) -> None:
        await self._world.medium.transport.stop_serving(self._node, grace_ms)

    def add_peer(self, node: NodeId, address: Address) -> None:
        del address  # a simulated node is found by its id
        self._peers.add(node)

    def remove_peer(self, node: NodeId) -> None:
        self._peers.discard(node)


UNSYNCED_MAX = 20
"""How many transactions a power loss may take: SQLite syncs its write-ahead log from time to time."""


class SimulatedDatabase(Database):
    """One node's database through many lives; `faults` counts what it suffered by kind."""

    def __init__(self) -> None:
        super().__init__(open_database("sqlite://")._engine, schema=None)
        self.faults: Counter[str] = Counter()
        self._durable = b""
        """The file as the platter has it; empty: there is none."""
        self._unsynced: list[Transaction] = []
        self._is_failing = False

    # -- what the node does ----------------------------------------------------------------------

    def prepare(self) -> int:
        """Make or migrate the tables, which is durable immediately."""
        version = super().prepare()
        self._sync()
        return version

    def write(self, transaction: Transaction) -> None:
        """Commit a transaction, unless it is to fail."""
        if self._is_failing:
            self._is_failing = False
            self.faults["error"] += 1
            raise StorageError("not done: the metadata's database failed: disk I/O error")
        super().write(transaction)
        self._unsynced.append(transaction)
        if len(self._unsynced) > UNSYNCED_MAX:
            self._sync()

    def close(self) -> None:
        """Do nothing: the file outlives the process."""

    def dispose(self) -> None:
        """Free the memory, at the end of the simulation."""
        super().close()

    # -- what happens to it ----------------------------------------------------------------------

    def fail_next(self) -> None:
        """Let the next transaction fail."""
        self._is_failing = True

    def crash(self, rng: Rng) -> None:
        """Become the database after a power loss: a seeded number of the newest transactions are gone."""
        kept = self._unsynced[: rng.randrange(len(self._unsynced) + 1)]
        if len(kept) == len(self._unsynced):
            return
        self.faults["transactions_lost"] += len(self._unsynced) - len(kept)
        self._replace(self._durable)
        for transaction in kept:
            super().write(transaction)
        self._unsynced = kept

    def lose(self) -> None:
        """Become an empty database: the file is gone."""
        self.faults["lost"] += 1
        self._durable, self._unsynced = b"", []
        self._replace(b"")

    def _sync(self) -> None:
        self._durable, self._unsynced = bytes(self._driver().serialize()), []

    def _replace(self, content: bytes) -> None:
        self._engine.dispose()  # what was in memory goes with its connection
        if content:
            self._driver().deserialize(content)

    def _driver(self) -> Any:
        """Return sqlite3's own connection, the only one there is."""
        return self._engine.raw_connection().driver_connection

"""One simulated machine that runs the real `Node`, one process after the other, in a simulated environment.

The database outlives the processes, as the disk does. A node that exits is restarted; a machine whose files stay
damaged is replaced.

`SimulatedEnvironment` is the twin of `quiver.environment.SystemEnvironment`. Raft's messages go through the simulated
network, requests through the simulated transport. As on the wire, a node sends only to nodes whose address it knows,
and accepts nothing from a node that uses the id of another (R22).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from quiver.addresses import Address
from quiver.clock import Clock, Rng
from quiver.config import SecurityMode
from quiver.environment import NodeNetwork
from quiver.errors import DamageError, StorageError
from quiver.features import LEVEL_MAX, LEVEL_MIN
from quiver.metadata import Database, open_database
from quiver.metadata.database import DatabaseLostError, Transaction
from quiver.metrics import MetricFamily
from quiver.model import Buffer, NodeId
from quiver.node import Node
from quiver.replication.interfaces import LostHandler, MessageHandler
from quiver.routing.transport import Transport
from quiver.security.key_ring import KeyRing
from quiver.security.tokens import ID_BYTES, SECRET_BYTES, Token, join_token
from quiver.storage import Disk, Executor, NodeIdentity, is_out_of_space
from quiver.testing.clusters.versions import is_too_old
from quiver.testing.network import SimulatedNetwork
from quiver.testing.simulator.machine import SimulatedMachine
from quiver.testing.simulator.report import describe, require, violated
from quiver.testing.transport import SimulatedTransport
from quiver.turns import Turns
from quiver.wire import Handler, WireSettings
from quiver.wire.answer_memory import AnswerMemory, make_answer_memory
from quiver.wire.handshake import IdentityOf

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

UNSYNCED_MAX = 20
"""How many transactions a power loss may take: SQLite syncs its write-ahead log from time to time."""
TRIES = 3
"""How often a node with damaged files is restarted before its machine is replaced."""
STOP_MS_MAX = 60_000
"""How long a node may take to end after SIGTERM or a storage failure."""


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
    turns: Turns = field(default_factory=Turns)
    answers: AnswerMemory = field(default_factory=partial(make_answer_memory, WireSettings()))
    level_max: int = LEVEL_MAX
    mode: SecurityMode = SecurityMode.DEVELOPMENT
    keys: KeyRing | None = None
    certificate_problem: str = ""

    @asynccontextmanager
    async def open_network(
        self,
        identity: NodeIdentity,
        *,
        peers: Mapping[NodeId, str],
        identity_of: IdentityOf,
        accepts_unproven: Callable[[], bool],  # noqa: ARG002 - there are no connections, and so no proofs
    ) -> AsyncIterator[NodeNetwork]:
        """Take the node's address."""
        self.medium.identities[identity.node] = identity.identity
        yield _SimulatedNodeNetwork(self, identity.node, peers, identity_of)

    def make_token(self) -> Token:
        """Return a token that the seed determines."""
        digits = f"{self.rng.randrange(1 << 64):016x}"
        return join_token(digits[: 2 * ID_BYTES].rjust(2 * ID_BYTES, "0"), digits.rjust(2 * SECRET_BYTES, "0"))

    def make_http_context(self) -> None:
        """Return nothing: there is no HTTP and no TLS."""

    def metrics(self) -> Iterable[MetricFamily]:
        """Return nothing: a simulated process uses no memory or descriptors of its own."""
        return ()


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

    def metrics(self) -> Iterable[MetricFamily]:
        return ()

    def add_peer(self, node: NodeId, address: Address) -> None:
        del address  # a simulated node is found by its id
        self._peers.add(node)

    def remove_peer(self, node: NodeId) -> None:
        self._peers.discard(node)


class SimulatedDatabase(Database):
    """One node's database through many lives; `faults` counts what it suffered by kind."""

    def __init__(self) -> None:
        super().__init__(open_database("sqlite://")._engine, schema=None)
        self.faults: Counter[str] = Counter()
        self._durable = b""
        """The file as the platter has it; empty: there is none."""
        self._unsynced: list[Transaction] = []
        self._is_failing = False
        self._is_away = False

    # -- what the node does ----------------------------------------------------------------------

    def prepare(self) -> int:
        """Make or migrate the tables, which is durable immediately."""
        self._require_reachable()
        version = super().prepare()
        self._sync()
        return version

    def write(self, transaction: Transaction) -> None:
        """Commit a transaction, unless it is to fail."""
        self._require_reachable()
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

    def set_away(self, *, is_away: bool) -> None:
        """Be unreachable, as a database server that is stopped, or be reachable again."""
        self._is_away = is_away

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

    def _require_reachable(self) -> None:
        if self._is_away:
            self.faults["unreachable"] += 1
            raise DatabaseLostError("the metadata database is unreachable: connection refused")

    def _sync(self) -> None:
        self._durable, self._unsynced = bytes(self._driver().serialize()), []

    def _replace(self, content: bytes) -> None:
        self._engine.dispose()  # what was in memory goes with its connection
        if content:
            self._driver().deserialize(content)

    def _driver(self) -> Any:
        """Return sqlite3's own connection, the only one there is."""
        return self._engine.raw_connection().driver_connection


class SimulatedHost(SimulatedMachine):
    """One machine with a real `Node` on it."""

    def __init__(self, world: ClusterWorld, node: NodeId, *, is_manager: bool) -> None:
        super().__init__(world, node)
        self.world = world
        self.is_manager = is_manager
        self.address = f"node{node}:9002"
        self.database = SimulatedDatabase()
        self.node: Node | None = None
        """The running node, once it has started."""
        self.has_served = False
        """Whether the present process has started completely: one that finds a full disk at its start may end."""
        self.stops_injected = 0
        """How often the present process was made to stop a partition."""
        self.level_max = LEVEL_MIN if world.knobs.mixes_versions else LEVEL_MAX
        """The highest feature level that the installed program knows: the next process runs it."""
        self.running_level = self.level_max
        """The highest feature level that the program of the present or last process knows."""
        self._damages_in_a_row = 0
        self._keys = KeyRing({"simulated": bytes(32)}, random_bytes=world.streams.stream(f"keys-{node}").randbytes)
        self._stop = asyncio.Event()

    @property
    def keys(self) -> KeyRing | None:
        """Return the keys of encrypted topics; None if the cluster has none."""
        return self._keys if self.world.knobs.encrypts else None

    @property
    def is_running(self) -> bool:
        """Return whether the node's code runs and serves requests."""
        return super().is_running and self.node is not None

    def stop(self) -> None:
        """Tell the process to end in good order, as SIGTERM does."""
        if self.is_up:
            self._stop.set()
            self.world.spawn(self._require_end(self.lives))

    def wipe(self) -> None:
        """Lose the disk and the database but keep the id, which R22 forbids."""
        super().wipe()
        self.database.lose()

    def heal(self) -> None:
        """End the faults of the machine and of its database."""
        super().heal()
        self.database.set_away(is_away=False)

    # -- one process -----------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run the node as `quiver node` does, until it is stopped or fails."""
        self._stop = asyncio.Event()
        self.stops_injected = 0
        self.has_served = False
        self.running_level = self.level_max
        error: BaseException | None = None
        try:
            node = Node(self.world.settings_of(self), self._environment())
            self.world.loop.set_node_exception_handler(self.id, node.handle_escaped)
            async with node as self.node:
                self.has_served = True
                error = await self._serve(node)
        except Exception as failure:  # whatever ends a process ends it
            if self.world.loop.is_closed():
                raise  # only now are the blocks of the dead run through
            error = failure
        self._handle_exit(error)

    async def _serve(self, node: Node) -> StorageError | None:
        """Serve until the node is stopped or fails; a fault is raised, as `quiver node` does."""
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(node.wait_failed())
            stopping = tasks.create_task(self._stop.wait())
            await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
            failure = failing.result() if failing.done() else None
            failing.cancel()
            stopping.cancel()
        if failure is None:
            return None
        if not isinstance(failure, StorageError):
            raise failure
        self.world.trace.record("storage_failed", self.world.now_ms, self.id, str(failure))
        self.world.spawn(self._require_end(self.lives))
        return failure

    def _environment(self) -> SimulatedEnvironment:
        world = self.world
        return SimulatedEnvironment(
            clock=self.clock,
            rng=self._rng,
            disk=self.disk,
            executor=self._make_executor(),
            database=self.database,
            incarnation=world.next_incarnation(),
            fresh_identity=f"identity-{self.id}-{self.lives}",
            address=self.address,
            medium=world.medium,
            level_max=self.running_level,
            keys=self.keys,
        )

    def _drop_process(self) -> None:
        self.node = None
        self.world.transport.disconnect(self.id)

    def _crash(self) -> None:
        super()._crash()
        self.database.crash(self._crash_rng)

    def _handle_exit(self, error: BaseException | None) -> None:
        """Do what a supervisor does with a process that ended: start it again, or call the operator."""
        causes = list(_leaves(error))
        self.world.trace.record("exit", self.world.now_ms, self.id, *map(repr, causes))
        if any(is_too_old(cause) for cause in causes):
            self.world.too_old.append((self.id, self.running_level))
            self.level_max = LEVEL_MAX  # the operator does what the message says
        for cause in causes:
            if not isinstance(cause, StorageError | OSError) and not is_too_old(cause):
                violated("F3", f"a node crashed: {describe(cause)}", node=self.id)
        require(
            not (self.has_served and any(map(is_out_of_space, causes))),
            "F3",
            f"a node ended because its disk is full: {error}",
            node=self.id,
        )
        is_damage = any(isinstance(cause, DamageError) for cause in causes)
        require(
            self.is_damaged or not is_damage,
            "F1",
            f"a disk is damaged although no fault damaged it: {error}",
            node=self.id,
        )
        self._damages_in_a_row = self._damages_in_a_row + 1 if is_damage else 0
        self._end_process()
        self.disk.restart()
        if self._damages_in_a_row > TRIES:
            self.world.replace(self)
        else:
            self.world.restart_later(self)

    async def _require_end(self, life: int) -> None:
        """Fail the run if a process does not end in time."""
        await asyncio.sleep(STOP_MS_MAX / 1000)
        if self.is_up and self.lives == life and not self.is_paused:
            violated("F3", "a node does not end", node=self.id, life=life)


def _leaves(error: BaseException | None) -> list[BaseException]:
    """Return the errors that a process ended with, also those that tasks raised together, and what they came from."""
    if error is None:
        return []
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error, *_leaves(error.__cause__ if isinstance(error, StorageError) else None)]

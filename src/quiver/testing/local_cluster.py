"""A cluster inside this process, for tests: real sockets, real files, and faults on demand.

Each node runs on a thread and an event loop of its own, so that one can be paused or killed while the others continue.
To its clients and to the other nodes it is what a process would be; all nodes share one interpreter, so it is not for
measuring.

    with LocalCluster(nodes=3) as cluster, cluster.connect() as client:
        client.create_topic("logs")
        cluster.kill(1)
"""

from __future__ import annotations

import asyncio
import random
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

import quiver
from quiver.addresses import Address, format_address
from quiver.config import Settings, load_settings
from quiver.environment import NodeNetwork, SystemEnvironment
from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.metrics import MetricFamily
from quiver.model import Buffer, NodeId
from quiver.node import Node
from quiver.replication.interfaces import LostHandler, MessageHandler
from quiver.routing.transport import Transport
from quiver.storage import NodeIdentity
from quiver.tasks import new_event_loop
from quiver.wire import Handler
from quiver.wire.handshake import IdentityOf
from quiver.wire.requests import Request

READY_TIMEOUT_S = 30
STOP_TIMEOUT_S = 30
_PORTS = range(10_000, 32_768)
"""Below those that Linux takes for connections."""
_RANDOM = random.SystemRandom()


class LocalCluster:
    """Nodes 1 to `nodes` on free ports of this machine, all managers, brokers and gateways. Use as ``with``.

    `settings` are given to every node, by key: ``{"log.durability": "none"}``; ``{node}`` in a value is the
    node's id. The data is removed at the end, unless `directory` says where to keep it.
    """

    def __init__(
        self, nodes: int = 3, *, directory: str | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="quiver-", ignore_cleanup_errors=True)
            directory = self._temporary.name
        self._cuts = _Cuts()
        ports = _free_ports(2 * nodes)
        self._settings = _settings_of(nodes, directory, ports, settings or {})
        self._threads: dict[int, _NodeThread] = {}

    def __enter__(self) -> Self:
        """Start every node; return when all are ready."""
        try:
            for node in self._settings:
                self.start(node, wait=False)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop every node."""
        self.close()

    def close(self) -> None:
        """Stop every node that runs and remove the data; idempotent."""
        self.heal()
        threads = list(self._threads.values())
        self._threads.clear()
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join()
        if self._temporary is not None:
            self._temporary.cleanup()

    # -- questions -------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[int]:
        """Return the ids of all nodes, running or not."""
        return list(self._settings)

    @property
    def urls(self) -> list[str]:
        """Return where each node speaks HTTP."""
        return [
            f"{'https' if settings.tls.is_enabled else 'http'}://{settings.node.http}"
            for settings in self._settings.values()
        ]

    @property
    def addresses(self) -> list[str]:
        """Return where each node speaks the wire protocol."""
        return [settings.node.wire for settings in self._settings.values()]

    def connect(self, **options: Any) -> quiver.Cluster:
        """Return an SDK connection to the cluster."""
        return quiver.connect(*self.addresses, **options)

    def is_running(self, node: int) -> bool:
        """Return whether a node was started and not stopped or killed since."""
        return node in self._threads

    # -- nodes -----------------------------------------------------------------------------------

    def start(self, node: int, *, wait: bool = True) -> None:
        """Start a node that does not run, on the data that it has."""
        if node in self._threads:
            raise RequestError(f"node {node} runs already")
        self._threads[node] = _NodeThread(self._settings[node], self._cuts)
        if wait:
            self.wait_ready([node])

    def stop(self, node: int) -> None:
        """Stop a node in good order: it hands leadership over first."""
        thread = self._threads.pop(node)
        thread.stop()
        thread.join()

    def kill(self, node: int) -> None:
        """Kill a node immediately: its connections break, and it sends nothing more."""
        thread = self._threads.pop(node)
        self._cuts.silence(node)
        thread.kill()
        thread.join()
        self._cuts.revive(node)

    def pause(self, node: int) -> None:
        """Let a node stand still, as a stopped process does; its connections stay."""
        self._threads[node].pause()

    def resume(self, node: int) -> None:
        """Resume a paused node."""
        self._threads[node].resume()

    def wait_ready(self, nodes: Iterable[int] | None = None) -> None:
        """Wait until nodes, by default all that run, serve."""
        for node in list(self._threads) if nodes is None else nodes:
            self._threads[node].wait_ready()

    # -- network ---------------------------------------------------------------------------------

    def cut(self, first: int, second: int) -> None:
        """Lose everything between two nodes; clients still reach both."""
        self._cuts.cut(first, second)

    def heal(self) -> None:
        """Undo all cuts and pauses."""
        self._cuts.heal()
        for thread in self._threads.values():
            thread.resume()


class _Cuts:
    """The pairs of nodes without a connection; shared by all threads, each operation on it is atomic."""

    def __init__(self) -> None:
        self._pairs: frozenset[frozenset[int]] = frozenset()
        self._silent: frozenset[int] = frozenset()

    def cut(self, first: int, second: int) -> None:
        self._pairs |= {frozenset((first, second))}

    def heal(self) -> None:
        self._pairs = frozenset()

    def silence(self, node: int) -> None:
        self._silent |= {node}

    def revive(self, node: int) -> None:
        self._silent -= {node}

    def part(self, first: int, second: int) -> bool:
        return first in self._silent or second in self._silent or frozenset((first, second)) in self._pairs


class _KilledError(Exception):
    """Ends a node's main task without a farewell."""


class _NodeThread:
    """One node on a thread of its own."""

    def __init__(self, settings: Settings, cuts: _Cuts) -> None:
        self._settings = settings
        self._cuts = cuts
        self._loop = new_event_loop()
        self._ready = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._end: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"quiver-node-{settings.node.id}", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        if not self._ready.wait(READY_TIMEOUT_S) or self._failure is not None:
            raise UnavailableError(f"node {self._settings.node.id} did not become ready: {self._failure}")

    def stop(self) -> None:
        self.resume()
        self._call(self._finish)

    def kill(self) -> None:
        self.resume()
        self._call(self._finish, _KilledError())

    def join(self) -> None:
        self._thread.join(STOP_TIMEOUT_S)

    def pause(self) -> None:
        self._running.clear()
        self._call(self._running.wait)  # blocks the node's loop, and with it all that the node does

    def resume(self) -> None:
        self._running.set()

    def _call(self, *work: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(*work)

    def _finish(self, error: BaseException | None = None) -> None:
        if self._end is None or self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(_KilledError):
                runner.run(self._run())
        except BaseException as error:  # noqa: BLE001 - `wait_ready` reports it
            self._failure = error
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self._end = self._loop.create_future()
        async with AsyncExitStack() as stack:
            environment = await stack.enter_async_context(_LocalEnvironment(self._settings, self._cuts))
            node = await stack.enter_async_context(Node(self._settings, environment))
            waiting = asyncio.ensure_future(node.wait_ready())
            await asyncio.wait((waiting, self._end), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self._ready.set()
            await self._end


class _LocalEnvironment(SystemEnvironment):
    """This machine, with a network that can be cut."""

    def __init__(self, settings: Settings, cuts: _Cuts) -> None:
        super().__init__(settings)
        self._cuts = cuts

    @asynccontextmanager
    async def open_network(
        self,
        identity: NodeIdentity,
        *,
        peers: Mapping[NodeId, str],
        identity_of: IdentityOf,
        accepts_unproven: Callable[[], bool],
    ) -> AsyncIterator[NodeNetwork]:
        """Listen, and let every way out and in pass by the cuts."""
        async with super().open_network(
            identity, peers=peers, identity_of=identity_of, accepts_unproven=accepts_unproven
        ) as network:
            yield _CuttableNetwork(identity.node, network, self._cuts)


class _CuttableNetwork:
    """A network that loses what goes between nodes that are cut apart."""

    def __init__(self, node: NodeId, network: NodeNetwork, cuts: _Cuts) -> None:
        self._node = node
        self._network = network
        self._cuts = cuts
        self._transport = _CuttableTransport(node, network.transport, cuts)

    @property
    def wire_address(self) -> str:
        return self._network.wire_address

    @property
    def transport(self) -> Transport:
        return self._transport

    def start(self, handler: MessageHandler, on_lost: LostHandler) -> None:
        def deliver(sender: NodeId, message: memoryview) -> None:
            if not self._cuts.part(sender, self._node):
                handler(sender, message)

        self._network.start(deliver, on_lost)

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        if not self._cuts.part(self._node, to):
            self._network.send(to, parts)

    def serve(self, handler: Handler) -> None:
        self._network.serve(handler)

    async def stop_serving(self, grace_ms: int) -> None:
        await self._network.stop_serving(grace_ms)

    def metrics(self) -> Iterable[MetricFamily]:
        return self._network.metrics()

    def add_peer(self, node: NodeId, address: Address) -> None:
        self._transport.nodes[format_address(address)] = node
        self._network.add_peer(node, address)

    def remove_peer(self, node: NodeId) -> None:
        self._network.remove_peer(node)


class _CuttableTransport:
    """Requests that do not reach, or whose answers do not come back from, nodes that are cut off."""

    def __init__(self, node: NodeId, transport: Transport, cuts: _Cuts) -> None:
        self.nodes: dict[str, NodeId] = {}
        self._node = node
        self._transport = transport
        self._cuts = cuts

    async def call(
        self, address: str, request: Request[Any], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[Any, memoryview]:
        other = self.nodes.get(address, NodeId(0))
        if self._cuts.part(self._node, other):
            raise UnavailableError(f"not done: {address} was not reached")
        answer = await self._transport.call(address, request, payload, timeout_ms=timeout_ms)
        if self._cuts.part(self._node, other):
            raise OutcomeUnknownError(f"may have been done: the answer of {address} was lost")
        return answer


def _settings_of(nodes: int, directory: str, ports: Sequence[int], given: Mapping[str, str]) -> dict[int, Settings]:
    join = ",".join(f"{at + 1}@127.0.0.1:{ports[at]}" for at in range(nodes))
    return {
        at + 1: load_settings(
            flags={
                "node.id": str(at + 1),
                "node.data": f"{directory}/node-{at + 1}",
                "node.wire": f"127.0.0.1:{ports[at]}",
                "node.http": f"127.0.0.1:{ports[nodes + at]}",
                "node.join": join,
                **{key: value.replace("{node}", str(at + 1)) for key, value in given.items()},
            }
        )
        for at in range(nodes)
    }


def _free_ports(count: int) -> list[int]:
    """Return free ports that the system takes for no connection, so that they stay free until the nodes start.

    All are bound until the last is found, so that none comes twice.
    """
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port, probe = _RANDOM.choice(_PORTS), held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    return ports

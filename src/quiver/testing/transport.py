"""Requests between nodes in memory, with delays and loss: the twin of `quiver.wire`'s server and pool.

It implements the `Transport` seam of `quiver.routing.transport` and keeps its promise of truth: a caller gets *not
done* only of a request that no handler has seen, or that its handler refused; whatever may have been done is *unknown*.
What cuts the simulated network cuts requests, too. Requests, responses and errors cross as bytes, so that no two nodes
ever share an object.

A request or an answer in flight belongs to no node. A handler runs inside its node's scope and dies with it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quiver.clock import Clock, Rng
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import Buffer, NodeId
from quiver.security import ANONYMOUS, node_principal
from quiver.security.identity import ConnectionIdentity
from quiver.tasks import timeout
from quiver.testing.loop import SimulatedLoop
from quiver.testing.network import LAN_LATENCY, SimulatedNetwork
from quiver.testing.randomness import Latency
from quiver.wire.envelope import ErrorInfo, describe_error, restore_error
from quiver.wire.messages import AnyRequest
from quiver.wire.requests import Request, Response, request_name
from quiver.wire.security_messages import Authenticate
from quiver.wire.serving import Caller, Handler

R = TypeVar("R", bound=Response)

CONNECT_TIMEOUT_MS = 2_000
"""Connect timeout: how long a caller without a connection waits for an unreachable node."""

_POLL_S = 0.005
"""How often a node that stops looks whether requests are still under way."""

_request_decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)


@dataclass(slots=True)
class TransportFaults:
    """Give each seeded fault its probability per request; a simulation may change them as it runs."""

    latency: Latency = LAN_LATENCY
    p_break_before: float = 0.0
    """That the connection breaks when the request is on its way: it is never handled."""
    p_break_after: float = 0.0
    """That it breaks when the answer is on its way: it was handled."""


@dataclass(slots=True, eq=False)
class _Server:
    """One life of one node that answers requests."""

    node: NodeId
    handler: Handler
    clock: Clock
    context: contextvars.Context
    identities: dict[str, ConnectionIdentity] = field(default_factory=dict)
    """Who the connections with a token speak for, by the names of their clients; they end with this life."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request under way."""

    source: NodeId | None
    name: str
    request: bytes
    payload: bytes
    timeout_ms: int
    done: asyncio.Future[tuple[bytes, bytes] | ErrorInfo]
    is_read: bool
    token: str = ""
    target: NodeId | None = None

    def end(self, answer: tuple[bytes, bytes] | ErrorInfo) -> None:
        """Answer the caller, which may be gone."""
        if not self.done.done():
            self.done.set_result(answer)

    def end_unknown(self) -> None:
        """Answer that the connection broke after the request was sent."""
        error: QuiverError = OutcomeUnknownError("the connection broke")
        if self.is_read:
            error = UnavailableError("the connection broke; nothing was to be done")
        self.end(describe_error(error))


@dataclass(slots=True)
class SimulatedTransport:
    """Carry requests to the handlers of a simulation's nodes; `faults` counts what went wrong by kind."""

    loop: SimulatedLoop
    network: SimulatedNetwork
    rng: Rng
    rates: TransportFaults = field(default_factory=TransportFaults)
    faults: Counter[str] = field(default_factory=Counter)
    _servers: dict[str, _Server] = field(default_factory=dict)
    _under_way: dict[_Exchange, None] = field(default_factory=dict)
    _no_scope: contextvars.Context = field(default_factory=contextvars.Context)

    def serve(self, address: str, node: NodeId, handler: Handler, *, clock: Clock) -> None:
        """Let a node answer at an address, in the node scope that this is called from."""
        self._servers[address] = _Server(node, handler, clock, contextvars.copy_context())

    def port(self, node: NodeId | None = None, *, name: str = "client", token: str = "") -> SimulatedRequester:
        """Return a node's way to ask others, or, without a node, a client's, which may authenticate with a token."""
        return SimulatedRequester(self, node, name, token)

    def disconnect(self, node: NodeId) -> None:
        """Break the connections of a killed node."""
        self._servers = {address: server for address, server in self._servers.items() if server.node != node}
        for exchange in list(self._under_way):
            if exchange.target == node:
                self._later(exchange.end_unknown)

    async def stop_serving(self, node: NodeId, grace_ms: int) -> None:
        """Let a node take no more requests; those under way are broken off unless answered within `grace_ms`."""
        self._servers = {address: server for address, server in self._servers.items() if server.node != node}
        end_ns = self.loop.now_ns + grace_ms * 1_000_000
        while self.loop.now_ns < end_ns and any(  # noqa: ASYNC110 - a caller may die without an event
            exchange.target == node for exchange in self._under_way
        ):
            await asyncio.sleep(_POLL_S)
        self.disconnect(node)

    def send(self, exchange: _Exchange, address: str) -> None:
        """Take a request; ports call this."""
        self._under_way[exchange] = None
        exchange.done.add_done_callback(lambda _: self._under_way.pop(exchange, None))
        server = self._servers.get(address)
        if server is not None:
            exchange.target = server.node
        if server is not None and not self._reaches(exchange.source, server.node):
            self.faults["cut"] += 1
            if self.rng.random() < 0.5:  # there was no connection yet; else the caller waits for its time to be over
                error = UnavailableError(f"not done: {address} was not reached")
                self._later(exchange.end, describe_error(error), delay_ms=min(CONNECT_TIMEOUT_MS, exchange.timeout_ms))
        elif self._draw("break_before", self.rates.p_break_before):
            self._later(exchange.end_unknown)
        else:
            self._later(self._arrive, exchange, address)

    def _arrive(self, exchange: _Exchange, address: str) -> None:
        server = self._servers.get(address)
        if server is None:
            self.faults["refused"] += 1
            self._later(exchange.end, describe_error(UnavailableError(f"not done: connection refused by {address}")))
            return
        if not self._reaches(exchange.source, server.node):
            self.faults["cut"] += 1  # meanwhile: the caller waits for its time to be over
            return
        exchange.target = server.node
        self.loop.call_soon(self._begin, exchange, server, context=server.context)

    def _begin(self, exchange: _Exchange, server: _Server) -> None:
        """Run the handler, inside its node's scope."""
        self.loop.create_task(self._handle(exchange, server))

    async def _handle(self, exchange: _Exchange, server: _Server) -> None:
        identity = ConnectionIdentity(ANONYMOUS if exchange.source is None else node_principal(exchange.source))
        if exchange.token:
            identity = server.identities.setdefault(exchange.name, identity)
        caller = Caller(
            name=exchange.name,
            address=exchange.name if exchange.token else "",
            deadline_ms=server.clock.monotonic_ms() + exchange.timeout_ms,
            node=exchange.source,
            identity=identity,
        )
        try:
            async with timeout(exchange.timeout_ms / 1000):
                if exchange.token and identity.credential is None:  # the first request of a connection
                    await server.handler(caller, Authenticate(token=exchange.token), memoryview(b""))
                request = _request_decoder.decode(exchange.request)
                response, parts = await server.handler(caller, request, memoryview(exchange.payload))
        except TimeoutError:
            return  # the caller's own time is over at the same moment
        except QuiverError as error:
            self._answer(exchange, server, describe_error(error))
        else:
            self._answer(exchange, server, (msgspec.msgpack.encode(response), b"".join(parts)))

    def _answer(self, exchange: _Exchange, server: _Server, answer: tuple[bytes, bytes] | ErrorInfo) -> None:
        if not self._reaches(server.node, exchange.source):
            self.faults["cut"] += 1  # the caller waits for its time to be over
        elif self._draw("break_after", self.rates.p_break_after):
            self._later(exchange.end_unknown)
        else:
            self._later(exchange.end, answer)

    def _reaches(self, source: NodeId | None, target: NodeId | None) -> bool:
        """Return whether nothing is cut between two nodes; clients are outside and reach every node."""
        return source is None or target is None or self.network.is_connected(source, target)

    def _draw(self, kind: str, probability: float) -> bool:
        if probability > 0.0 and self.rng.random() < probability:
            self.faults[kind] += 1
            return True
        return False

    def _later(self, callback: Callable[..., object], *arguments: object, delay_ms: int = 0) -> None:
        delay_ns = delay_ms * 1_000_000 + self.rates.latency.draw_ns(self.rng)
        self.loop.call_later_ns(delay_ns, callback, *arguments, context=self._no_scope)


class SimulatedRequester:
    """One node's, or one client's, way to ask nodes; it implements the `Transport` seam."""

    def __init__(self, transport: SimulatedTransport, node: NodeId | None, name: str, token: str = "") -> None:
        self._token = token
        self._transport = transport
        self._node = node
        self._name = name

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Send a request and return what came back; see `Transport.call`."""
        exchange = _Exchange(
            source=self._node,
            name=self._name,
            request=msgspec.msgpack.encode(request),
            payload=b"".join(payload),
            timeout_ms=timeout_ms,
            done=asyncio.get_running_loop().create_future(),
            is_read=request.is_read,
            token=self._token,
        )
        self._transport.send(exchange, address)
        try:
            async with timeout(timeout_ms / 1000):
                answer = await exchange.done
        except TimeoutError:
            raise _too_late(request, is_read=exchange.is_read) from None
        if isinstance(answer, ErrorInfo):
            raise restore_error(answer)
        body, answered = answer
        response: Any = msgspec.msgpack.decode(body, type=request.response)
        return response, memoryview(answered)


def _too_late(request: Request[Any], *, is_read: bool) -> QuiverError:
    message = f"{request_name(request)} was not answered in time"
    return UnavailableError(message) if is_read else OutcomeUnknownError(message)

"""Connections for requests, by address, dialled on demand. The real implementation of the `Transport` seam.

An address has one connection. Long polls stay in flight for long: they take at most half of its room, so that other
requests never wait for them, and further ones get further connections, up to `CONNECTIONS_MAX`.

It owns its connections and the tasks that dial them. Concurrent callers of one address wait for the same attempt, and a
caller that is cancelled does not end the attempt for the others. A failed attempt is reported to all its waiters
immediately; the next call dials again, so callers decide about retries and backoff. A connection that is not used for
`idle_timeout_ms` is closed.

With a token or password, each connection is authenticated before its first request. It is loaded for each connection,
so that a rotated one is used; a connection whose credential is no longer accepted is replaced once, by one with the
current credential, and then the refusal is the caller's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from quiver.addresses import parse_address
from quiver.config import TlsSettings, WireSettings
from quiver.errors import NotAllowedError, OverloadedError, QuiverError, RequestError, UnavailableError
from quiver.model import Buffer, NodeId
from quiver.security.secrets import CredentialSource
from quiver.tasks import TaskScope, timeout, timeout_at
from quiver.wire.authenticating import UNAUTHENTICATED, ClientAuthentication
from quiver.wire.connection import Connection
from quiver.wire.handshake import make_requester_hello
from quiver.wire.proving import NodeSecret
from quiver.wire.requesting import RequestConnection
from quiver.wire.requests import Request, Response
from quiver.wire.tls import explain_distrust, make_client_context

R = TypeVar("R", bound=Response)
_Dial = asyncio.Task[RequestConnection | RequestError | OverloadedError | str]

_Key = tuple[str, int]
"""An address, and which of its connections; 0 is the one for everything."""

ADDRESSES_MAX = 4096
"""Largest number of connections and attempts to dial."""
CONNECTIONS_MAX = 8
"""Most connections to one address; more than one only for long polls that the others have no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The connections on which this program sends requests."""

    connections: int
    dialling: int
    requests: int
    """Queued or sent, and not answered yet."""


class RequestPool:
    """Send requests to nodes by their addresses. Use as ``async with``, in one event loop.

    `name` appears in logs; a client may leave `cluster_id` empty. A node passes its id and its identity, by which
    other nodes recognize it, and `node_secret` if it has no certificate. With TLS, the other side's certificate must
    name the host of its address. A client may pass the token or password that authenticates it.

    Raises:
        ConfigError: `tls` names files that cannot be used, or a value does not fit into a hello.
    """

    def __init__(
        self,
        *,
        name: str,
        settings: WireSettings | None = None,
        cluster_id: str = "",
        node: NodeId | None = None,
        identity: str = "",
        tls: TlsSettings | None = None,
        credentials: CredentialSource | None = None,
        node_secret: NodeSecret | None = None,
    ) -> None:
        self._settings = settings or WireSettings()
        self._authentication = None if credentials is None else ClientAuthentication(credentials)
        self.tls_context = make_client_context(tls or TlsSettings())
        """The TLS context for dialling; None: without TLS."""
        self._hello = make_requester_hello(name=name, cluster_id=cluster_id, node=node, identity=identity)
        self._node_secret = node_secret
        self._usable: dict[_Key, RequestConnection] = {}
        self._dials: dict[_Key, _Dial] = {}
        self._connections: set[Connection] = set()
        self._tasks = TaskScope(self.close)
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False

    # Life.

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._sweeper = self._tasks.start(self._close_idle())
        return self

    async def close(self) -> None:
        """Close all connections; calls in flight fail with an error that states their outcome."""
        self._is_closed = True
        for task in (self._sweeper, *self._dials.values()):
            if task is not None:
                task.cancel()
        for connection in tuple(self._connections):
            connection.close("closed by this side")
        await asyncio.gather(*(connection.wait_closed() for connection in tuple(self._connections)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    def status(self) -> PoolStatus:
        """Return a snapshot."""
        usable = [connection for connection in self._usable.values() if connection.is_usable]
        return PoolStatus(
            connections=len(usable),
            dialling=len(self._dials),
            requests=sum(connection.requests for connection in usable),
        )

    # Calls.

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Send a request to a node and return its response and payload; parts of the payload must not change any more.

        `timeout_ms` bounds the whole call: connecting, waiting for room, and the response.

        Raises:
            RequestError: the address is not valid, or the request is too large; nothing was sent.
            NotAllowedError: the node does not accept the credential, or it would be sent in plain text to another
                machine.
            UnavailableError: it was not done; or it is a read, and was not answered.
            OutcomeUnknownError: it was sent, but the connection broke or the deadline passed before it was answered.
            QuiverError: the error that the other side answered with.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
        connection = self._usable.get((address, 0))
        if connection is None or not connection.is_usable or (request.is_long_poll and not connection.has_poll_room):
            connection = await self._find(address, request, deadline_s)
        try:
            return await connection.call(request, payload, deadline_s)
        except NotAllowedError as error:
            if self._authentication is None or error.code != UNAUTHENTICATED:
                raise
        self._retire(address, connection)
        connection = await self._find(address, request, deadline_s)
        return await connection.call(request, payload, deadline_s)

    def _retire(self, address: str, connection: RequestConnection) -> None:
        """Use a connection no longer, nor others to its address: its credential was revoked or has expired."""
        retired = [connection]
        keys = [key for key in self._usable if key[0] == address]
        if any(self._usable[key] is connection for key in keys):  # else another caller has replaced them
            retired += [self._usable.pop(key) for key in keys]
        for one in retired:
            if one.is_idle:
                one.close("no longer authenticated")

    async def _find(self, address: str, request: Request[R], deadline_s: float) -> RequestConnection:
        """Return the connection for a request: the address's first; for a long poll one that has room for it."""
        first = await self._connected((address, 0), deadline_s)
        if not request.is_long_poll or first.has_poll_room:
            return first
        for number in range(1, CONNECTIONS_MAX):
            try:
                connection = await self._connected((address, number), deadline_s)
            except UnavailableError:
                break  # the node accepts no more: wait for room
            if connection.has_poll_room:
                return connection
        return first

    async def _connected(self, key: _Key, deadline_s: float) -> RequestConnection:
        connection = self._usable.get(key)
        if connection is None or not connection.is_usable:
            connection = await self._connect(key, deadline_s)
        return connection

    async def _connect(self, key: _Key, deadline_s: float) -> RequestConnection:
        if self._is_closed:
            raise UnavailableError("not done: this client is closed", code="closed")
        address, _ = key
        dial = self._dials.get(key)
        if dial is None:
            dial = self._start_dial(key)
        try:
            async with timeout_at(deadline_s):
                # Not `await dial`: a cancelled caller must not cancel the attempt that others wait for.
                await asyncio.wait((dial,))
        except TimeoutError:
            raise UnavailableError(f"not done: {address} was not reached in time", code="timed_out") from None
        outcome = "closed by this side" if dial.cancelled() else dial.result()
        if isinstance(outcome, QuiverError):
            raise copy(outcome)  # each waiter gets its own: it grows a traceback
        if isinstance(outcome, str):
            raise UnavailableError(f"not done: {address} was not reached: {outcome}", code="not_reached")
        return outcome

    def _start_dial(self, key: _Key) -> _Dial:
        host, port = parse_address(key[0])
        if len(self._usable) + len(self._dials) >= ADDRESSES_MAX:
            raise OverloadedError(f"not done: {ADDRESSES_MAX} other connections are open")
        dial = self._dials[key] = self._tasks.start(self._dial(host, port))
        dial.add_done_callback(lambda _: self._finish_dial(key, dial))
        return dial

    async def _dial(self, host: str, port: int) -> RequestConnection | RequestError | OverloadedError | str:
        """Dial once; return a connection that is ready for requests, or the reason for the failure."""
        connection = RequestConnection(self._hello, self._settings, self._connections, self._node_secret)
        loop = asyncio.get_running_loop()
        is_done = False
        try:
            if self._authentication is not None:
                self._authentication.check_channel(host, is_encrypted=self.tls_context is not None)
            async with timeout(self._settings.connect_timeout_ms / 1000):
                await loop.create_connection(lambda: connection, host, port, ssl=self.tls_context)
            is_greeted = await connection.greeted is not None
            if is_greeted and self._authentication is not None:
                await self._authentication.run(connection, self._settings.connect_timeout_ms / 1000)
            is_done = is_greeted
        except ssl.SSLCertVerificationError as error:
            return explain_distrust(error, host)
        except (OSError, UnicodeError) as error:
            return str(error) or f"not connected within {self._settings.connect_timeout_ms} ms"
        except (RequestError, OverloadedError) as error:
            return error
        except QuiverError as error:
            return error.message
        finally:
            if not is_done:
                connection.abort("connecting failed")
        return connection if is_done else connection.end_reason

    def _finish_dial(self, key: _Key, dial: _Dial) -> None:
        del self._dials[key]
        outcome = "" if dial.cancelled() else dial.result()
        if isinstance(outcome, RequestConnection):
            self._usable[key] = outcome

    async def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        idle_timeout_s = self._settings.idle_timeout_ms / 1000
        while True:
            await asyncio.sleep(idle_timeout_s / 2)
            used_before_s = loop.time() - idle_timeout_s
            for key, connection in tuple(self._usable.items()):
                if not connection.is_usable:
                    del self._usable[key]
                elif connection.is_idle and connection.used_at_s <= used_before_s:
                    del self._usable[key]
                    connection.close("idle")

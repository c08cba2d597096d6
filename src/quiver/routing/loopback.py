"""A transport that passes requests for the local node to its handler instead of a socket.

Deadlines and outcomes are those of a real connection: a handler that runs past its deadline is cancelled, and the
caller gets `UnavailableError` for a read and `OutcomeUnknownError` for anything else. The caller is the node itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quiver.clock import Clock
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import Buffer, NodeId
from quiver.routing.transport import Transport
from quiver.security import node_principal
from quiver.security.identity import ConnectionIdentity
from quiver.tasks import timeout
from quiver.wire import Caller, Handler
from quiver.wire.requests import Request, Response, request_name

R = TypeVar("R", bound=Response)

CALLER_NAME = "gateway"
"""The name by which a node logs its own gateway."""


class LoopbackTransport:
    """Send requests for `address` to `handler`, all others through `transport`."""

    def __init__(
        self, transport: Transport, *, node: NodeId, address: Callable[[], str], handler: Handler, clock: Clock
    ) -> None:
        self._transport = transport
        self._address = address
        self._own_address = ""
        self._handler = handler
        self._clock = clock
        self._identity = ConnectionIdentity(node_principal(node))

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Send a request to a node; see `Transport`."""
        if not self._own_address:
            self._own_address = self._address()  # known once the node listens, and fixed from then on
        if address != self._own_address:
            return await self._transport.call(address, request, payload, timeout_ms=timeout_ms)
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        caller = Caller(name=CALLER_NAME, address=address, deadline_ms=deadline_ms, identity=self._identity)
        asked: Any = request  # any request that a client may send; the handler answers with its response type
        response: Any
        try:
            async with timeout(timeout_ms / 1000):
                given = _join(payload) if payload else _NOTHING
                response, parts = await self._handler(caller, asked, given)
        except TimeoutError:
            raise _late(request, timeout_ms) from None
        return response, _join(parts) if parts else _NOTHING


def _late(request: Request[R], timeout_ms: int) -> QuiverError:
    name = request_name(request)
    if request.is_read:
        return UnavailableError(f"{name} was not answered within {timeout_ms} ms", code="timed_out")
    return OutcomeUnknownError(f"{name} may have been done: no answer within {timeout_ms} ms", code="timed_out")


def _join(parts: Sequence[Buffer]) -> memoryview:
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


_NOTHING = memoryview(b"")

"""The way to nodes, with a short cut to the one that this gateway is part of.

What is asked of this node's own address goes to its handler without a socket. It is held to its time all the same, and
the truth about what became of it is told in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from quiver.client.transport import Transport
from quiver.clock import Clock
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import Buffer
from quiver.tasks import timeout
from quiver.wire import Caller, Handler
from quiver.wire.exchange import Request, Response, request_name
from quiver.wire.messages import AnyRequest
from quiver.wire.traits import READS

R = TypeVar("R", bound=Response)

CALLER_NAME = "gateway"
"""What a node sees its own gateway as."""


class LoopbackTransport:
    """Ask other nodes through `transport`, and this one, at `address`, through its handler."""

    def __init__(self, transport: Transport, *, address: Callable[[], str], handler: Handler, clock: Clock) -> None:
        self._transport = transport
        self._address = address
        self._handler = handler
        self._clock = clock

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Send a request to a node; see `Transport`."""
        if address != self._address():
            return await self._transport.call(address, request, payload, timeout_ms=timeout_ms)
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        caller = Caller(name=CALLER_NAME, address=address, deadline_ms=deadline_ms)
        try:
            async with timeout(timeout_ms / 1000):
                response, parts = await self._handler(caller, cast("AnyRequest", request), _join(payload))
        except TimeoutError:
            raise _late(request, timeout_ms) from None
        return cast("R", response), _join(parts)


def _late(request: Request[R], timeout_ms: int) -> QuiverError:
    name = request_name(request)
    if type(request) in READS:
        return UnavailableError(f"{name} was not answered in {timeout_ms} ms", code="timed_out")
    return OutcomeUnknownError(f"{name} was perhaps done: not answered in {timeout_ms} ms", code="timed_out")


def _join(parts: Sequence[Buffer]) -> memoryview:
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

"""The entry of every request into a node, whether it came over the wire or through the node's own gateway.

A request is passed to the handler of its type. One that carries a metadata index (`known_index`) first waits until this
node has applied that much, so that handlers judge it by metadata that is no older than its sender's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from quiver.clock import Clock
from quiver.errors import RequestError
from quiver.metadata import MetadataStore
from quiver.wire.messages import AnyRequest
from quiver.wire.requests import Request, request_name
from quiver.wire.serving import Answer, Caller, RequestHandler


class RequestDispatcher:
    """Pass each request to the handler of its type."""

    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._handlers: dict[type[Request[Any]], RequestHandler] = {}

    def add(self, handlers: Mapping[type[Request[Any]], RequestHandler]) -> None:
        """Serve these types of requests from now on."""
        self._handlers.update(handlers)

    def handle(self, caller: Caller, request: AnyRequest, payload: memoryview) -> Awaitable[Answer]:
        """Return the answer to a request, to be awaited; awaiting it raises errors of `quiver.errors`."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise RequestError(f"this node does not serve {request_name(request)}", code="unknown_request")
        if request.waits_for_index and request.known_index > self._store.applied_index:
            return self._handle_later(handler, caller, request, payload)
        return handler(caller, request, payload)

    async def _handle_later(
        self, handler: RequestHandler, caller: Caller, request: AnyRequest, payload: memoryview
    ) -> Answer:
        await self._store.wait_known(request.known_index, caller.wait_ms(self._clock.monotonic_ms()))
        return await handler(caller, request, payload)

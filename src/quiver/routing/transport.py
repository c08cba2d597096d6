"""The seam through which clients and nodes send requests to nodes.

`quiver.wire.RequestPool` implements it over TCP, `quiver.testing` in a simulation. It makes one attempt and reports its
outcome truthfully: done, not done, or unknown. Choosing the node and retrying are its users' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from quiver.model import Buffer
from quiver.wire.requests import Request, Response

R = TypeVar("R", bound=Response)


class Transport(Protocol):
    """Sends requests to nodes by address."""

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Send a request to the node at an address and return its response and the response's payload.

        The payload must not change after this call. The result may be kept and never changes. Cancelling the call
        frees everything, but the request may have been done.

        Raises:
            UnavailableError: the request was not done; or it is a read, and was not answered.
            OutcomeUnknownError: it was sent, but the connection broke or the time ran out before it was answered.
            QuiverError: the error that the node answered with.
        """
        ...

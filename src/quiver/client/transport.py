"""The seam through which requests are sent to nodes, by clients and by nodes alike.

Its real side is `quiver.wire.RequestPool`. What it promises is the truth about every request: done, not done, or
unknown. It tries once: to look for the right node, and to try again, is its users' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from quiver.model import Buffer
from quiver.wire.exchange import Request, Response

R = TypeVar("R", bound=Response)


class Transport(Protocol):
    """A way to ask nodes."""

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        """Send a request to the node at an address and return its response and what came behind it.

        The payload must not change any more; what is returned may be kept and never changes. A call that is cancelled
        leaves nothing behind, but its request may have been done.

        Raises:
            UnavailableError: the request was not done; or it is a read, and was not answered.
            OutcomeUnknownError: it was sent, but the connection broke or the time ran out before it was answered.
            QuiverError: what the other side said.
        """
        ...

"""The seam between the replication driver and the network.

A network carries whole messages between nodes. It promises little: a message arrives unchanged or
not at all, but it may be lost, doubled, delayed or overtaken. Its real side is
`quiver.wire`; `quiver.testing.SimulatedNetwork` is the in-memory twin with faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quiver.model import Buffer, NodeId

MessageHandler = Callable[[NodeId, memoryview], None]
"""Called with the sending node and one whole message, in the owner's event loop."""

LostHandler = Callable[[NodeId], None]
"""Called with a node to which a connection broke: what was queued or under way to it may be lost."""


class Network(Protocol):
    """One node's way to the others."""

    def start(self, handler: MessageHandler, on_lost: LostHandler) -> None:
        """Begin to deliver incoming messages to `handler`, and to call `on_lost` when the way to a node breaks.

        The second is a hint that spares waiting for a timeout: it may come late, falsely or never.
        """
        ...

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        """Queue one message, given in parts, for a node; never blocks, never raises for an unreachable node."""
        ...

    def backlog_bytes(self, to: NodeId) -> int:
        """Return how many queued bytes have not left for this node yet."""
        ...

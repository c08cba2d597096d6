"""One direction between two nodes of a simulated network, and the messages on it.

State only: the network decides what happens to a message, a link remembers where it is. A message
is in exactly one place: flying (its arrival is scheduled), held (the link was clogged when it
arrived) or gone. `backlog_bytes` counts the first two.
"""

from __future__ import annotations

from quiver.model import NodeId


class Message:
    """One message on its way; compared by identity, because a doubled one is two."""

    __slots__ = ("data", "is_lost", "number")

    def __init__(self, data: bytes, number: int) -> None:
        self.data = data
        self.number = number
        self.is_lost = False


class Link:
    """Hold what is on its way from one node to another."""

    __slots__ = (
        "arrival_ns",
        "arrived_number",
        "backlog_bytes",
        "flying",
        "held",
        "is_clogged",
        "is_cut",
        "source",
        "target",
    )

    def __init__(self, source: NodeId, target: NodeId) -> None:
        self.source = source
        self.target = target
        self.is_cut = False
        self.is_clogged = False
        self.backlog_bytes = 0
        self.arrival_ns = 0
        self.arrived_number = 0
        self.flying: dict[Message, None] = {}
        self.held: list[Message] = []

    def add(self, message: Message) -> None:
        """Take a message on its way."""
        self.flying[message] = None
        self.backlog_bytes += len(message.data)

    def oldest(self) -> Message:
        """Return the message that has been flying longest."""
        return next(iter(self.flying))

    def hold(self, message: Message) -> None:
        """Keep a message that arrived at a clogged link."""
        del self.flying[message]
        self.held.append(message)

    def release(self) -> list[Message]:
        """Let the held messages fly again, ahead of those sent later, and return them."""
        released, self.held = self.held, []
        self.flying = dict.fromkeys((*released, *self.flying))
        return released

    def take(self, message: Message) -> None:
        """Let a message leave the link, delivered or dropped."""
        del self.flying[message]
        self.backlog_bytes -= len(message.data)

    def on_the_way(self) -> list[Message]:
        """Return every message that has not arrived, oldest first."""
        return [*self.held, *self.flying]

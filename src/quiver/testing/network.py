"""A network in memory that loses, doubles, delays, reorders and cuts: the twin of `quiver.wire`.

It implements the `Network` seam of `quiver.replication.interfaces` and breaks none of its promises: a
message arrives unchanged or not at all. Everything else may happen to it, by seeded probabilities
that a simulation may change at any time and by cuts and clogs that it sets. What happened is
counted by kind in `faults`.

A message in flight belongs to no node: it survives the death of its sender (perhaps) and waits for
a paused receiver. It is handed over inside the receiver's scope on the loop.
"""

from __future__ import annotations

import contextvars
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quiver.clock import Rng
from quiver.model import Buffer, NodeId
from quiver.replication.interfaces import LostHandler, MessageHandler
from quiver.testing.loop import SimulatedLoop
from quiver.testing.randomness import Latency
from quiver.testing.trace import Trace

LAN_LATENCY = Latency(minimum_ms=0.1, spread_ms=1.0)
"""Machines in one building."""


@dataclass(slots=True)
class NetworkFaults:
    """Give each seeded fault its probability per message; a simulation may change them as it runs."""

    latency: Latency = LAN_LATENCY
    p_loss: float = 0.0
    p_double: float = 0.0


class SimulatedNetwork:
    """Carry messages between nodes on a simulated loop.

    Each message takes a latency of its own, so that later ones overtake earlier ones, unless
    `keep_order` makes every link first come, first served, as one TCP connection is. `classify` names
    a message's kind for the `messages` counter.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        rng: Rng,
        rates: NetworkFaults | None = None,
        *,
        keep_order: bool = False,
        classify: Callable[[bytes], str] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.rates = rates or NetworkFaults()
        self.faults: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.bytes_sent = 0
        self.delivered_count = 0
        self._loop = loop
        self._rng = rng
        self._keeps_order = keep_order
        self._classify = classify
        self._trace = trace
        self._message_count = 0
        self._ports: dict[NodeId, SimulatedPort] = {}
        self._links: dict[tuple[NodeId, NodeId], SimulatedLink] = {}
        self._isolated: set[NodeId] = set()
        self._clogged: set[NodeId] = set()
        self._heals = 0
        self._no_scope = contextvars.Context()

    def port(self, node: NodeId) -> SimulatedPort:
        """Return a node's way to the others for a new life; the one of its former life is closed."""
        self.disconnect(node)
        self._ports[node] = port = SimulatedPort(self, node)
        return port

    def disconnect(self, node: NodeId) -> None:
        """Take a killed node off the network; what it sent may still arrive, or not."""
        port = self._ports.pop(node, None)
        if port is None:
            return
        port.close()
        for link in self._links.values():
            if link.source == node:
                self._lose_some(link.on_the_way())
        for other in self._ports.values():
            if other.on_lost is not None:
                delay_ns = self.rates.latency.draw_ns(self._rng)
                self._loop.call_later_ns(delay_ns, other.on_lost, node, context=other.context)

    # Cuts and clogs.

    def cut(self, source: NodeId, target: NodeId, *, both: bool = True) -> None:
        """Lose everything from `source` to `target`, also what is on its way; `both`: in both directions."""
        for link in self._links_between(source, target, both=both):
            link.is_cut = True

    def mend(self, source: NodeId, target: NodeId, *, both: bool = True) -> None:
        """Undo `cut`."""
        for link in self._links_between(source, target, both=both):
            link.is_cut = False

    def isolate(self, node: NodeId) -> None:
        """Cut a node off from all others, until `rejoin` or `heal`."""
        self._isolated.add(node)

    def rejoin(self, node: NodeId) -> None:
        """Undo `isolate`."""
        self._isolated.discard(node)

    def clog(self, source: NodeId, target: NodeId, *, both: bool = True) -> None:
        """Hold what arrives on a link until `unclog`."""
        for link in self._links_between(source, target, both=both):
            link.is_clogged = True

    def unclog(self, source: NodeId, target: NodeId, *, both: bool = True) -> None:
        """Release what a link holds, with new latencies."""
        links = self._links_between(source, target, both=both)
        for link in links:
            link.is_clogged = False
        self._release(links)

    def swizzle(self, nodes: Sequence[NodeId], *, duration_ms: int) -> None:
        """Clog nodes one by one during the first half of a while, unclog them in another order in the second."""
        half_ns = duration_ms * 500_000
        for node in nodes:
            self._later(self._rng.randrange(half_ns), self._clog_node, node, self._heals)
            self._later(half_ns + self._rng.randrange(half_ns), self._unclog_node, node)

    def heal(self) -> None:
        """Undo every cut, isolation and clog, also planned ones; release held messages link by link in seeded order."""
        self._heals += 1
        self._isolated.clear()
        self._clogged.clear()
        for link in self._links.values():
            link.is_cut = link.is_clogged = False
        self._release(self._links.values())

    def is_connected(self, source: NodeId, target: NodeId) -> bool:
        """Return whether nothing is cut from one node to another; a node always reaches itself."""
        return source == target or not self._is_cut(self._link(source, target))

    def backlog_bytes(self, source: NodeId, target: NodeId) -> int:
        """Return how many bytes are on their way from one node to another."""
        return self._link(source, target).backlog_bytes

    # The way of a message.

    def send(self, source: NodeId, target: NodeId, parts: Sequence[Buffer]) -> None:
        """Take one message; ports call this."""
        data = b"".join(parts)
        self.bytes_sent += len(data)
        self.messages[self._classify(data) if self._classify is not None else "message"] += 1
        link = self._link(source, target)
        if self._loses(link):
            return
        self._fly(link, self._number(data))
        if self._draw(self.rates.p_double):
            self.faults["doubled"] += 1
            self._fly(link, self._number(data))

    def _number(self, data: bytes) -> SimulatedMessage:
        self._message_count += 1
        return SimulatedMessage(data, self._message_count)

    def _fly(self, link: SimulatedLink, message: SimulatedMessage) -> None:
        link.add(message)
        self._schedule_arrival(link, message)

    def _schedule_arrival(self, link: SimulatedLink, message: SimulatedMessage) -> None:
        delay_ns = self.rates.latency.draw_ns(self._rng)
        if self._keeps_order:
            link.arrival_ns = max(link.arrival_ns, self._loop.now_ns + delay_ns)
            delay_ns = link.arrival_ns - self._loop.now_ns
        self._later(delay_ns, self._arrive, link, message)

    def _arrive(self, link: SimulatedLink, message: SimulatedMessage) -> None:
        if self._keeps_order:
            # Arrivals at the same instant run in any order: each takes the oldest message.
            message = link.oldest()
        if self._is_clogged(link):
            self.faults["clogged"] += 1
            link.hold(message)
            return
        link.take(message)
        port = self._ports.get(link.target)
        if message.is_lost:
            return
        if self._is_cut(link):
            self.faults["cut"] += 1
        elif port is None or port.context is None:
            self.faults["no_receiver"] += 1
        else:
            port.inbox(link.source).append(message)
            self._loop.run_as(port.context, self._hand_over, link, message, port)

    def _hand_over(self, link: SimulatedLink, message: SimulatedMessage, port: SimulatedPort) -> None:
        """Give a message to its receiver, in the receiver's scope."""
        arrived = port.inbox(link.source).popleft()
        if self._keeps_order:
            message = arrived
        if port.handler is None:
            self.faults["no_receiver"] += 1
            return
        if message.number < link.arrived_number:
            self.faults["reordered"] += 1
        link.arrived_number = message.number
        self.delivered_count += 1
        if self._trace is not None:
            self._trace.record("deliver", self._loop.now_ns, link.source, link.target, len(message.data))
        port.handler(link.source, memoryview(message.data))

    # Chance and lookups.

    def _loses(self, link: SimulatedLink) -> bool:
        kind = "cut" if self._is_cut(link) else "lost" if self._draw(self.rates.p_loss) else None
        if kind is None:
            return False
        self.faults[kind] += 1
        return True

    def _lose_some(self, messages: list[SimulatedMessage]) -> None:
        """Lose a seeded part of what a dead node had sent: the end of it if order is kept, else any."""
        kept = self._rng.randrange(len(messages) + 1)
        for place, message in enumerate(messages):
            is_lost = place >= kept if self._keeps_order else self._rng.random() < 0.5
            if is_lost and not message.is_lost:
                message.is_lost = True
                self.faults["disconnected"] += 1

    def _release(self, links: Iterable[SimulatedLink]) -> None:
        """Release links that are no longer clogged, in a seeded order."""
        waiting = [link for link in links if link.held and not self._is_clogged(link)]
        while waiting:
            link = waiting.pop(self._rng.randrange(len(waiting)))
            for message in link.release():
                self._schedule_arrival(link, message)

    def _clog_node(self, node: NodeId, heals: int) -> None:
        """Clog a node, unless the network was healed since that was planned."""
        if heals == self._heals:
            self._clogged.add(node)

    def _unclog_node(self, node: NodeId) -> None:
        self._clogged.discard(node)
        self._release(self._links.values())

    def _is_cut(self, link: SimulatedLink) -> bool:
        return link.is_cut or link.source in self._isolated or link.target in self._isolated

    def _is_clogged(self, link: SimulatedLink) -> bool:
        return link.is_clogged or link.source in self._clogged or link.target in self._clogged

    def _draw(self, probability: float) -> bool:
        return probability > 0.0 and self._rng.random() < probability

    def _links_between(self, source: NodeId, target: NodeId, *, both: bool) -> list[SimulatedLink]:
        forward = self._link(source, target)
        return [forward, self._link(target, source)] if both else [forward]

    def _link(self, source: NodeId, target: NodeId) -> SimulatedLink:
        link = self._links.get((source, target))
        if link is None:
            self._links[source, target] = link = SimulatedLink(source, target)
        return link

    def _later(self, delay_ns: int, callback: Callable[..., object], *arguments: object) -> None:
        self._loop.call_later_ns(delay_ns, callback, *arguments, context=self._no_scope)


class SimulatedPort:
    """One life of one node on a simulated network; it implements the `Network` seam."""

    def __init__(self, network: SimulatedNetwork, node: NodeId) -> None:
        self._network = network
        self._node = node
        self._is_open = True
        self.handler: MessageHandler | None = None
        self.on_lost: LostHandler | None = None
        self.context: contextvars.Context | None = None
        self._inboxes: dict[NodeId, deque[SimulatedMessage]] = {}

    def start(self, handler: MessageHandler, on_lost: LostHandler | None = None) -> None:
        """Deliver incoming messages to `handler`, in the node scope that this is called from.

        `on_lost` is called when a node is killed, some time later, as a broken connection would show.
        """
        self.handler = handler
        self.on_lost = on_lost
        self.context = contextvars.copy_context()

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        """Send one message, copied immediately; a closed port drops it."""
        if self._is_open:
            self._network.send(self._node, to, parts)

    def backlog_bytes(self, to: NodeId) -> int:
        """Return how many bytes are on their way to a node."""
        return self._network.backlog_bytes(self._node, to)

    def inbox(self, source: NodeId) -> deque[SimulatedMessage]:
        """Return what arrived from a node and was not handed over yet, oldest first."""
        return self._inboxes.setdefault(source, deque())

    def close(self) -> None:
        """Neither send nor deliver any more; idempotent."""
        self._is_open = False
        self.handler = None


class SimulatedMessage:
    """One message on its way; compared by identity, because a doubled one is two."""

    __slots__ = ("data", "is_lost", "number")

    def __init__(self, data: bytes, number: int) -> None:
        self.data = data
        self.number = number
        self.is_lost = False


class SimulatedLink:
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
        self.flying: dict[SimulatedMessage, None] = {}
        self.held: list[SimulatedMessage] = []

    def add(self, message: SimulatedMessage) -> None:
        """Take a message on its way."""
        self.flying[message] = None
        self.backlog_bytes += len(message.data)

    def oldest(self) -> SimulatedMessage:
        """Return the message that has been flying longest."""
        return next(iter(self.flying))

    def hold(self, message: SimulatedMessage) -> None:
        """Keep a message that arrived at a clogged link."""
        del self.flying[message]
        self.held.append(message)

    def release(self) -> list[SimulatedMessage]:
        """Let the held messages fly again, ahead of those sent later, and return them."""
        released, self.held = self.held, []
        self.flying = dict.fromkeys((*released, *self.flying))
        return released

    def take(self, message: SimulatedMessage) -> None:
        """Let a message leave the link, delivered or dropped."""
        del self.flying[message]
        self.backlog_bytes -= len(message.data)

    def on_the_way(self) -> list[SimulatedMessage]:
        """Return every message that has not arrived, oldest first."""
        return [*self.held, *self.flying]

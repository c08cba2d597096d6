"""Calls of clients to nodes: they take time, get lost, are doubled, and wait for paused nodes.

The work of a call runs in the scope of the node that serves it: it dies with the node, and then the caller
gets no answer. A call to a node that does not run is refused or lost.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from quiver.clock import Rng
from quiver.errors import QuiverError, UnavailableError
from quiver.model import NodeId
from quiver.testing.groups.node import SimulatedNode

if TYPE_CHECKING:
    from quiver.testing.groups.world import GroupWorld

T = TypeVar("T")
Work = Callable[[SimulatedNode], Awaitable[T]]


class SimulatedRpc:
    """Carry calls to nodes and their answers back; `p_loss` and `p_double` may be changed at any time."""

    def __init__(self, world: GroupWorld, rng: Rng) -> None:
        self.p_loss = 0.0
        self.p_double = 0.0
        self._world = world
        self._rng = rng
        self._no_scope = contextvars.Context()

    def call(self, node: NodeId, work: Work[T]) -> asyncio.Future[T]:
        """Let a node do `work`; the answer, or the error it raised, may never come.

        A doubled call is done twice. An error is reported only when no other copy can succeed: "not done" must be true.
        """
        call = _Call(node, work, self._world.loop.create_future())
        call.copies = 2 if self._rng.random() < self.p_double else 1
        for _ in range(call.copies):
            if self._rng.random() >= self.p_loss:
                self._later(self._arrive, call)
        return call.reply

    def _arrive(self, call: _Call[T]) -> None:
        target = self._world.nodes[call.node]
        if target.is_up:
            with self._world.loop.node_scope(call.node):
                self._world.loop.create_task(self._serve(target, call))
        elif self._rng.random() < 0.7:
            call.fail(UnavailableError("not done: the connection was refused"))

    async def _serve(self, target: SimulatedNode, call: _Call[T]) -> None:
        try:
            result = await call.work(target)
        except QuiverError as error:
            self._answer(call.fail, error)
        else:
            self._answer(call.succeed, result)

    def _answer(self, callback: Callable[..., object], *arguments: object) -> None:
        if self._rng.random() >= self.p_loss:
            self._later(callback, *arguments)

    def _later(self, callback: Callable[..., object], *arguments: object) -> None:
        delay_ns = self._world.network.rates.latency.draw_ns(self._rng)
        self._world.loop.call_later_ns(delay_ns, callback, *arguments, context=self._no_scope)


class _Call(Generic[T]):
    """One call and its copies on the way."""

    def __init__(self, node: NodeId, work: Work[T], reply: asyncio.Future[T]) -> None:
        self.node = node
        self.work = work
        self.reply = reply
        self.copies = 1
        self._error: QuiverError | None = None

    def succeed(self, result: T) -> None:
        """Take an answer."""
        if not self.reply.done():
            self.reply.set_result(result)

    def fail(self, error: QuiverError) -> None:
        """Take an error of one copy."""
        self.copies -= 1
        if self._error is None or error.outcome == "unknown":
            self._error = error
        if not self.copies and not self.reply.done():
            self.reply.set_exception(self._error)

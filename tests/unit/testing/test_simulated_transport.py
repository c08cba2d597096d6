"""The simulated transport tells the truth: not done only if no handler has seen it, or refused it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quiver.errors import NotLeaderError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.model import GroupId, NodeId
from quiver.testing import RandomStreams, SimulatedClock, SimulatedLoop, SimulatedNetwork, SimulatedTransport
from quiver.wire.messages import AnyRequest, CommandSubmitted, GetMembers, MembersFound, SubmitCommand
from quiver.wire.requests import Response
from quiver.wire.serving import Caller

ONE, TWO = NodeId(1), NodeId(2)
ADDRESS = "two:9002"
TIMEOUT_MS = 1_000


class World:
    """Two nodes; the second answers, and remembers what it was asked."""

    def __init__(self, seed: int = 1) -> None:
        streams = RandomStreams(seed)
        self.loop = SimulatedLoop(streams.schedule, time_max_s=600)
        self.network = SimulatedNetwork(self.loop, streams.network)
        self.transport = SimulatedTransport(self.loop, self.network, streams.stream("transport"))
        self.asked: list[tuple[Caller, AnyRequest, bytes]] = []
        self.error: QuiverError | None = None
        self.pause_s = 0.0
        self.is_asked = asyncio.Event()
        with self.loop.node_scope(TWO):
            self.transport.serve(ADDRESS, TWO, self._handle, clock=SimulatedClock(self.loop))

    async def _handle(self, caller: Caller, request: AnyRequest, payload: memoryview) -> tuple[Response, list[bytes]]:
        self.asked.append((caller, request, bytes(payload)))
        self.is_asked.set()
        await asyncio.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        if isinstance(request, GetMembers):
            return MembersFound(voters=(ONE,), learners=()), []
        return CommandSubmitted(index=7), [b"re", b"sult"]  # type: ignore[arg-type]

    async def call(self, *, read: bool = False) -> tuple[Response, bytes]:
        port = self.transport.port(ONE, name="one")
        if read:
            found, payload = await port.call(ADDRESS, GetMembers(group=GroupId(5)), timeout_ms=TIMEOUT_MS)
            return found, bytes(payload)
        done, payload = await port.call(ADDRESS, SubmitCommand(), [b"com", b"mand"], timeout_ms=TIMEOUT_MS)
        return done, bytes(payload)


def run(test: Callable[[World], Coroutine[Any, Any, None]], seed: int = 1) -> None:
    world = World(seed)

    try:
        world.loop.run_until_complete(test(world))
    finally:
        world.loop.close()


def test_request_and_answer_cross_with_their_payloads() -> None:
    async def test(world: World) -> None:
        response, payload = await world.call()
        assert (response, payload) == (CommandSubmitted(index=7), b"result")  # type: ignore[arg-type]
        ((caller, request, asked),) = world.asked
        assert (caller.name, caller.node, caller.is_node) == ("one", ONE, True)
        assert (request, asked) == (SubmitCommand(), b"command")

    run(test)


def test_errors_cross_with_their_class_code_and_hint() -> None:
    async def test(world: World) -> None:
        world.error = NotLeaderError("elsewhere", code="not_primary", leader=TWO)
        with pytest.raises(NotLeaderError) as caught:
            await world.call()
        assert (caught.value.code, caught.value.leader) == ("not_primary", TWO)

    run(test)


def test_nobody_at_the_address_means_not_done() -> None:
    async def test(world: World) -> None:
        world.transport.disconnect(TWO)
        with pytest.raises(UnavailableError):
            await world.call()
        assert not world.asked

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_cut_before_the_request_is_never_handled(seed: int) -> None:
    async def test(world: World) -> None:
        world.network.cut(ONE, TWO)
        with pytest.raises((UnavailableError, OutcomeUnknownError)):
            await world.call()
        assert not world.asked

    run(test, seed)


def test_cut_before_the_answer_is_unknown_except_for_reads() -> None:
    async def test(world: World) -> None:
        world.network.cut(TWO, ONE, both=False)
        with pytest.raises(OutcomeUnknownError):
            await world.call()
        with pytest.raises(UnavailableError):
            await world.call(read=True)
        assert len(world.asked) == 2

    run(test)


def test_death_of_the_asked_node_is_unknown_and_heard_of_soon() -> None:
    async def test(world: World) -> None:
        world.pause_s = 100
        call = asyncio.ensure_future(world.call())
        await world.is_asked.wait()
        began_s = world.loop.time()
        world.loop.kill(TWO)
        world.transport.disconnect(TWO)
        with pytest.raises(OutcomeUnknownError):
            await call
        assert world.loop.time() - began_s < TIMEOUT_MS / 1000

    run(test)


def test_time_over_is_unknown_and_ends_the_handler() -> None:
    async def test(world: World) -> None:
        world.pause_s = 100
        with pytest.raises(OutcomeUnknownError):
            await world.call()
        assert world.loop.time() < 2

    run(test)


def test_broken_connections_are_told_truthfully() -> None:
    async def test(world: World) -> None:
        world.transport.rates.p_break_before = 1.0
        with pytest.raises(OutcomeUnknownError):
            await world.call()
        assert not world.asked
        world.transport.rates.p_break_before, world.transport.rates.p_break_after = 0.0, 1.0
        with pytest.raises(OutcomeUnknownError):
            await world.call()
        assert len(world.asked) == 1
        assert world.transport.faults == {"break_before": 1, "break_after": 1}

    run(test)

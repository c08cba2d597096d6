"""The stream of updates that open consoles share: what a late, a slow and one console too many get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from gateway_world import World

from quiver.errors import OverloadedError
from quiver.gateway.console.feed import CONSOLES_MAX, UPDATE_S_MAX, ConsoleFeed
from quiver.gateway.console.recorder import ConsoleRecorder
from quiver.metadata import BrokerRow, BrokerState, MetadataState, MoveId, MoveRow, MoveState
from quiver.metadata.state import Counters
from quiver.metrics import MetricFamily, labelled
from quiver.model import NodeId, PartitionId, TopicId
from quiver.wire.admin_messages import NodeDescribed
from quiver.wire.requests import Response

MODES = {1: "secure", 2: "insecure"}


MEASURED_S = 0.1
"""Metrics take longer than the history, so that a console waits for its first update."""


def describe_rebuilds(node: int) -> tuple[MetricFamily, ...]:
    peer = (("peer", "2"),)
    return (
        labelled("quiver_rebuild_replicas", "gauge", "", [(peer, 3.0)] if node == 1 else []),
        labelled("quiver_rebuild_remaining_bytes", "gauge", "", [(peer, 4096.0)] if node == 1 else []),
    )


class Nodes:
    """Two nodes of a world; each says how it is protected, and one rebuilds replicas of the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._answer_before = world.cluster._answer
        world.cluster._answer = self._answer  # type: ignore[method-assign]
        rows = [
            BrokerRow(
                broker_id=NodeId(node),
                identity="i",
                wire_address=world.cluster.nodes[NodeId(node)],
                http_address="",
                rack="",
                state=BrokerState.ALIVE,
                is_draining=False,
                registered_ms=0,
                changed_ms=0,
            )
            for node in MODES
        ]
        move = MoveRow(
            move_id=MoveId(9),
            topic_id=TopicId(1),
            partition_id=PartitionId(0),
            source=NodeId(1),
            target=NodeId(2),
            state=MoveState.BEGUN,
            begun_ms=0,
            changed_ms=0,
        )
        self.view = MetadataState([*rows, move], counters=Counters(next_move_id=MoveId(10))).view()

    async def _answer(self, node: NodeId, request: Any, data: bytes) -> tuple[Response, list[bytes]]:
        answer, payload = await self._answer_before(node, request, data)
        assert isinstance(answer, NodeDescribed)
        if request.with_metrics:
            await asyncio.sleep(MEASURED_S)
        described = msgspec.structs.replace(
            answer, security_mode=MODES[node], now_ms=self.world.clock.wall_ms(), metrics=describe_rebuilds(node)
        )
        return described, payload

    def feed(self) -> ConsoleFeed:
        async def describe() -> NodeDescribed:
            raise NotImplementedError

        clock = self.world.clock
        recorder = ConsoleRecorder(view=lambda: self.view, describe=describe, clock=clock)
        return ConsoleFeed(self.world.gateway._router, lambda: self.view, recorder, clock=clock, node=NodeId(1))


def decode(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = event.strip().split(b"\n", 1)
    return name.decode().removeprefix("event: "), msgspec.json.decode(data.removeprefix(b"data: "))


async def next_update(console: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    while True:
        name, value = decode(await anext(console))
        if name == "update":
            return value


def run(scenario: Any) -> None:
    async def main(world: World) -> None:
        nodes = Nodes(world)
        feed = nodes.feed()
        running = asyncio.create_task(feed.run())
        try:
            await scenario(world, feed)
        finally:
            running.cancel()

    World().run(main)


def test_console_that_opens_later_does_not_begin_with_an_old_state() -> None:
    async def scenario(world: World, feed: ConsoleFeed) -> None:
        async with aclosing(feed.stream()) as console:
            await next_update(console)
        await asyncio.sleep(600)
        opened_ms = world.clock.wall_ms()
        async with aclosing(feed.stream()) as console:
            assert (await next_update(console))["time_ms"] >= opened_ms

    run(scenario)


def test_console_that_is_opened_at_once_again_waits_for_nothing() -> None:
    async def scenario(world: World, feed: ConsoleFeed) -> None:
        async with aclosing(feed.stream()) as console:
            first = await next_update(console)
        async with aclosing(feed.stream()) as console:
            assert (await next_update(console))["time_ms"] == first["time_ms"]

    run(scenario)


def test_console_that_opens_beside_another_gets_the_newest_update_at_once() -> None:
    async def scenario(world: World, feed: ConsoleFeed) -> None:
        async with aclosing(feed.stream()) as first, aclosing(feed.stream()) as second:
            shown = [await next_update(first) for _ in range(3)]
            assert await next_update(second) == shown[-1]
            assert feed.open_consoles == 2
        assert feed.open_consoles == 0

    run(scenario)


def test_console_that_reads_slowly_skips_updates() -> None:
    async def scenario(world: World, feed: ConsoleFeed) -> None:
        async with aclosing(feed.stream()) as console:
            first = await next_update(console)
            await asyncio.sleep(2 * UPDATE_S_MAX)
            second = await next_update(console)
            assert second["time_ms"] - first["time_ms"] >= 1000 * UPDATE_S_MAX
            assert (await next_update(console))["time_ms"] > second["time_ms"]

    run(scenario)


def test_one_console_too_many_is_refused_until_another_one_closes() -> None:
    async def scenario(world: World, feed: ConsoleFeed) -> None:
        world.gateway._feed._open = CONSOLES_MAX  # the gateway's own feed, for the status
        status, answer = await world.get("/console/events")
        assert (status, answer["code"]) == (503, "overloaded")
        assert f"{CONSOLES_MAX} consoles are open" in answer["message"]
        world.gateway._feed._open = 0

        opened = [feed.stream() for _ in range(CONSOLES_MAX)]
        for console in opened:
            await anext(console)
        with pytest.raises(OverloadedError):
            await anext(feed.stream())
        await opened.pop().aclose()
        async with aclosing(feed.stream()) as console:
            await anext(console)
        for console in opened:
            await console.aclose()

    run(scenario)


def test_update_says_how_each_node_is_protected_and_how_far_moves_and_rebuilds_are() -> None:
    async def scenario(world: World, feed: ConsoleFeed) -> None:
        async with aclosing(feed.stream()) as console:
            update = await next_update(console)
        nodes = update["nodes"]
        assert [one["security_mode"] for one in nodes] == ["secure", "insecure"]
        assert [one.get("rebuild_replicas", 0) for one in nodes] == [0, 3]
        assert [one.get("rebuild_bytes", 0) for one in nodes] == [0, 4096]
        assert (update["moves_total"], update["moves_ended"]) == (1, 8)

    run(scenario)

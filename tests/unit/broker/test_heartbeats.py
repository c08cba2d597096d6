"""A node whose heartbeats the primary does not get says why: once in the log, and in its status."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from typing import Any, cast

import pytest

from quiver.broker.heartbeats import BrokerRegistration, HeartbeatSender
from quiver.clock import SystemClock
from quiver.errors import QuiverError, UnavailableError
from quiver.manager import NodeRouter
from quiver.model import NodeId
from quiver.wire.messages import HeartbeatReceived


class Primary:
    """Registers everybody, and answers heartbeats unless it cannot be reached."""

    def __init__(self) -> None:
        self.error: QuiverError | None = None

    async def submit(self, _: object) -> None:
        """Register a node."""

    async def ask_primary(self, _: object) -> HeartbeatReceived:
        if self.error is not None:
            raise self.error
        return HeartbeatReceived(is_known=True)


def new_sender(primary: Primary) -> HeartbeatSender:
    return HeartbeatSender(
        BrokerRegistration(node=NodeId(1), identity="i", wire_address="a:1", http_address="", roles=()),
        router=cast("NodeRouter", primary),
        clock=SystemClock(),
        rng=random.Random(1),
        interval_ms=1,
        delay_ms=1,
        on_failure=lambda _: None,
    )


def test_reason_why_the_primary_is_not_reached_is_logged_once_and_kept_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        await sender._send()
        assert sender.problem == ""
        primary.error = UnavailableError("not done: no primary is known")
        await sender._send()
        assert (sender.problem, warnings()) == ("not done: no primary is known", [])
        for reason in ("not valid for 'a'", "not valid for 'a'", "refused", "not valid for 'a'", "refused"):
            primary.error = UnavailableError(f"not done: a:1 was not reached: {reason}", code="not_reached")
            await sender._send()
            assert sender.problem.endswith(reason)
        logged = [one["reason"].rpartition(": ")[2] for one in warnings()]
        assert logged == ["not valid for 'a'", "refused"]
        primary.error = None
        await sender._send()
        assert sender.problem == ""
        primary.error = UnavailableError("not done: a:1 was not reached: refused", code="not_reached")
        await sender._send()
        assert len(warnings()) == 3, "the primary was reached in between"

    def warnings() -> list[dict[str, Any]]:
        return [cast("Any", one).facts for one in caplog.records if one.levelno == logging.WARNING]

    primary = Primary()
    sender = new_sender(primary)
    asyncio.run(scenario())


def test_node_that_cannot_register_says_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Primary):
        async def submit(self, _: object) -> None:
            raise UnavailableError(f"not done: {next(addresses)} was not reached", code="not_reached")

    async def scenario() -> None:
        for _ in range(9):
            assert not await sender._register()

    addresses = itertools.cycle(("a:1", "b:1", "c:1"))
    sender = new_sender(Silent())
    asyncio.run(scenario())
    assert [one.levelno for one in caplog.records if one.message == "node not registered"] == [logging.WARNING] * 3

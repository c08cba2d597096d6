"""A node whose heartbeats the primary does not get says why: once in the log, and in its status."""

from __future__ import annotations

import asyncio
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


def test_reason_why_the_primary_is_not_reached_is_logged_once_and_kept_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        await sender._send()
        assert sender.problem == ""
        primary.error = UnavailableError("not done: no primary is known")
        await sender._send()
        assert (sender.problem, warnings()) == ("not done: no primary is known", [])
        for reason in ("certificate is not valid for 'a'", "certificate is not valid for 'a'", "refused"):
            primary.error = UnavailableError(f"not done: a:1 was not reached: {reason}", code="not_reached")
            await sender._send()
            assert sender.problem.endswith(reason)
        logged = [one["reason"].rpartition(": ")[2] for one in warnings()]
        assert logged == ["certificate is not valid for 'a'", "refused"]
        primary.error = None
        await sender._send()
        assert sender.problem == ""

    def warnings() -> list[dict[str, Any]]:
        return [cast("Any", one).facts for one in caplog.records if one.levelno == logging.WARNING]

    primary = Primary()
    registration = BrokerRegistration(node=NodeId(1), identity="i", wire_address="a:1", http_address="", roles=())
    sender = HeartbeatSender(
        registration,
        router=cast("NodeRouter", primary),
        clock=SystemClock(),
        rng=random.Random(1),
        interval_ms=1,
        delay_ms=1,
        on_failure=lambda _: None,
    )
    asyncio.run(scenario())

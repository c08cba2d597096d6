"""Whatever clients hold, health checks and metrics have room of their own: no probe restarts a busy node."""

from __future__ import annotations

import pytest
from http_echo import HOST, in_loop, serving, until

from quiver.config import GatewaySettings
from quiver.gateway.http.server import RESERVED_CONNECTIONS
from quiver.gateway.routes import EXEMPT_PATHS, ROUTES


def test_probes_and_metrics_are_exempt() -> None:
    assert {"/healthz", "/livez", "/readyz", "/metrics"} == EXEMPT_PATHS
    assert {route.path for route in ROUTES} >= EXEMPT_PATHS
    assert not any(route.changes for route in ROUTES if route.path in EXEMPT_PATHS)


@in_loop
async def test_probe_is_answered_although_long_polls_fill_the_room_for_requests() -> None:
    async with serving(GatewaySettings(requests_max=20)) as served:
        for _ in range(20):
            poll = await served.connect()
            await poll.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: len(served.application.begun) == 20)
        client = await served.connect()
        assert (await client.get("/x"))[0] == 503
        assert (await client.get("/healthz"))[0] == 200


@in_loop
async def test_probe_is_answered_although_busy_connections_fill_the_room_for_connections() -> None:
    async with serving(GatewaySettings(connections_max=5)) as served:
        for _ in range(5):
            poll = await served.connect()
            await poll.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: len(served.application.begun) == 5)
        assert (await (await served.connect()).get("/x"))[0] == 503
        probe = await served.connect()
        assert (await probe.get("/healthz"))[0] == 200
        assert await probe.is_closed(), "the reserve is for one request"


@pytest.mark.parametrize("start", [b"", b"GET / HT"])
@in_loop
async def test_reserve_of_connections_cannot_be_held(start: bytes) -> None:
    async with serving(GatewaySettings(connections_max=1)) as served:
        poll = await served.connect()
        await poll.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: served.application.begun)
        for _ in range(RESERVED_CONNECTIONS + 5):
            silent = await served.connect()
            await silent.send(start)
        await until(lambda: served.server.status().accepted == RESERVED_CONNECTIONS + 6)
        probe = await served.connect()
        assert (await probe.get("/healthz"))[0] == 200
        await until(lambda: served.server.status().connections <= RESERVED_CONNECTIONS + 2)
